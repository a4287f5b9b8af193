"""A tiny model that is told of tools, with a tokenizer of single characters."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specdec.base.config import CacheConfig, EngineConfig
from specdec.session.decoder import SpecDecoder
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, piece_tokenizer, plain_model, random_dflash

_TOLD = "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.description }}\n{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}assistant: {% endif %}"
_MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}BEGIN{{ c.function.name }}"
    "MIDDLE{{ c.function.arguments OBJECT }}END{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
)


def _messages(begin: str, middle: str, end: str, arguments: str = "| tojson") -> str:
    """Messages, and earlier calls that are written so."""
    parts = {"BEGIN": begin, "MIDDLE": middle, "END": end, "OBJECT": arguments}
    text = _MESSAGES
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


_AS_HERMES = _messages('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")

HERMES = _TOLD + _AS_HERMES + _BEGIN
"""As Qwen 3: the tags of calls are text, arguments of earlier ones objects."""

MISTRAL = _TOLD + _messages("[TOOL_CALLS]", "[ARGS]", "", "+ ''") + _BEGIN
"""Calls are written with special tokens, arguments of earlier ones are texts."""

HARMONY = (
    _TOLD
    + "{# <|channel|> functions. #}"
    + _messages("CALL", "=", "")
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss: the output names the channel of every message."""

THINKING = HERMES.replace(_BEGIN, _BEGIN.replace("assistant: ", "assistant: <think>"))
"""The same, with a thinking that the prompt opens."""

MARKED = MISTRAL.replace(_BEGIN, _BEGIN.replace("assistant: ", "assistant: [THINK]"))
"""As Magistral: tokens around the thinking and calls are special."""

UNKNOWN = _TOLD + _messages("CALL", "=", "") + _BEGIN
"""Tells of tools, and not how they are called."""

_DROPPED, _MORE = "^~;!%?&$", "ö市｜▁"


def chat_tokenizer(
    template: str, pieces: Sequence[str], special: Sequence[str], plain: Sequence[str]
) -> PreTrainedTokenizerFast:
    """A token per piece; `special` and `plain` are found as a whole."""
    made = piece_tokenizer(pieces)
    for names, hidden in ((special, True), (plain, False)):
        tokens = [AddedToken(name, special=hidden, normalized=False) for name in names]
        made.add_tokens(tokens, special_tokens=hidden)
    made.chat_template = template
    return made


def tool_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per character, and Mistral's markers, as large as the tiny models' vocabulary."""
    markers, dropped, plain = ["[TOOL_CALLS]", "[ARGS]"], _DROPPED, list[str]()
    if template == HARMONY:
        markers = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"]
        dropped += "'(*"
    if template == MARKED:
        markers += ["[THINK]", "[/THINK]"]
        dropped += "'("
    if template == THINKING:
        markers = []
        plain = ["<think>", "</think>"]
    letters = [chr(place) for place in range(32, 127) if chr(place) not in dropped]
    pieces = ["<pad>", "<s>", "</s>", *markers, *plain, "\n", *letters, *_MORE]
    assert len(pieces) <= VOCAB
    pieces += [f"<unused{place}>" for place in range(VOCAB - len(pieces))]
    return chat_tokenizer(template, pieces, markers, plain)


def tool_decoder(template: str = HERMES, **engine: Any) -> SpecDecoder:
    """A random target with random drafts."""
    verifier = paged_verifier(plain_model("llama"), 4)
    config: dict[str, Any] = {
        "max_num_seqs": 8,
        "num_draft_tokens": 3,
        "max_model_len": 512,
        "seed": 0,
        "cache": CacheConfig(memory_bytes=2**23),
        **engine,
    }
    drafter, made = random_dflash(verifier), EngineConfig(**config)
    return SpecDecoder(verifier, tool_tokenizer(template), drafter, made)


def function(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    """A tool, as requests have it."""
    about = {"name": name, "description": f"does {name}", "parameters": schema, **more}
    return {"type": "function", "function": about}
