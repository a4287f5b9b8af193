"""What a request may ask at most, beside the options of `ServeConfig`; see docs/serve.md."""

from specdec.sampling.params import MAX_EDITS, MAX_STOP_CHARACTERS, MAX_STOPS

MAX_ENTRIES = {
    "stop": MAX_STOPS, "stop_token_ids": MAX_EDITS, "logit_bias": MAX_EDITS, "messages": 4096,
    "input": 4096, "chat_template_kwargs": 256, "tools": 128,
}  # fmt: skip
"""Entries of lists and objects, by the field."""

MAX_CHARACTERS = {"stop": MAX_STOP_CHARACTERS, "cache_salt": 1024}
"""Characters of texts; prompts and grammars have limits of their own."""

MAX_FIELDS = 1024
"""Fields of a request, those within others aside."""

MAX_PROMPT_LOGPROBS = 524_288
"""Log-probabilities of all prompts of a request, with those of the tokens themselves."""

CHARACTERS_PER_TOKEN = 16
"""A text has so many characters at most for each token that it may have."""

TOKENIZED = 131_072
"""Tokens of what `/tokenize` and `/detokenize` take, or those of the context where it is longer."""
