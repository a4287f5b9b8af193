"""Tiny tokenizers and templates with the switches of published thinking models."""

from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tools import chat_tokenizer

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant "
_OFF = "enable_thinking is defined and enable_thinking is false"

SWITCHED = _TURNS + _BEGIN + "{% if " + _OFF + " %}<think></think>{% endif %}{% endif %}"
"""As Qwen3: the output begins with its thinking, unless that is turned off, and empty then."""

OPENED = _TURNS + _BEGIN + "<think>{% endif %}"
"""As DeepSeek-R1: the prompt opens the thinking."""

SPELLED = "{# text #}" + OPENED
"""As OLMo 3: the same, where tags are text like any other."""

LED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant "
    " <think>{{ m.reasoning_content }}</think>{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""As GLM-4.5: a turn that thinks begins with a blank."""

CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss: the output names the channel of every message."""

_TAGS = {
    SWITCHED: (("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")),
    OPENED: (("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")),
    SPELLED: (("<|im_start|>", "<|im_end|>"), ()),
    LED: (("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")),
    CHANNELS: (("<|start|>", "<|end|>", "<|channel|>", "<|message|>"), ()),
}


def thinking_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per character, and those of the template, as large as the tiny models' vocabulary.
    Of the tags only those between which nothing is thought are special, as they are published.
    """
    special, plain = _TAGS[template]
    names = ["<pad>", "<s>", "</s>", *special, *plain]
    letters = [chr(place) for place in range(32, 127) if chr(place) not in '"#$%&*+;=@^`~']
    pieces = [*names, *letters[: VOCAB - len(names)]]
    made = chat_tokenizer(template, pieces, special, plain)
    assert len(made) == len(pieces) <= VOCAB
    return made
