"""What a request may ask at most, beside the options of `ServeConfig`. docs/serve.md has all of it
in one table.
"""

from specdec.sampling.params import MOST_EDITS, MOST_STOP_CHARACTERS, MOST_STOPS, MOST_TOP_LOGPROBS

MOST_ENTRIES = {
    "stop": MOST_STOPS,
    "stop_token_ids": MOST_EDITS,
    "logit_bias": MOST_EDITS,
    "messages": 4096,
    "input": 4096,
    "chat_template_kwargs": 256,
    "tools": 128,
}
"""Entries of lists and objects, by the field."""

MOST_CHARACTERS = {"stop": MOST_STOP_CHARACTERS, "cache_salt": 1024}
"""Characters of texts; prompts and grammars have limits of their own."""

MOST_FIELDS = 1024
"""Fields of a request, those within others aside."""

MOST_LOGPROBS = MOST_TOP_LOGPROBS
"""Log-probabilities per token."""

MOST_PROMPT_LOGPROBS = 524_288
"""Log-probabilities of all prompts of a request, with those of the tokens themselves."""

CHARACTERS_PER_TOKEN = 16
"""A text has so many characters at most for each token that it may have: it is not looked at any
further.
"""

TOKENIZED = 131_072
"""Tokens of what `/tokenize` and `/detokenize` take, or those of the context where it is longer."""
