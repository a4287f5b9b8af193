"""Where an output thinks: told by token ids, for tags of one token and of several."""

import pytest

from specdec.base.chat.thinking import BEHIND, WITHIN, Phase, thinking_of
from tests.helpers.thinking import CHANNELS, LED, OPENED, SWITCHED, thinking_tokenizer
from tests.helpers.tiny_models import tiny_tokenizer

CHAT = [{"role": "user", "content": "<think> is a tag"}]


def prompt_of(template: str, **variables: bool) -> list[int]:
    tokenizer = thinking_tokenizer(template)
    text = tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, **variables
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_vocabulary_without_tags_does_not_think() -> None:
    assert thinking_of(tiny_tokenizer()) is None


@pytest.mark.parametrize(
    ("template", "variables", "phase"),
    [
        (SWITCHED, {}, Phase.BEFORE),
        (SWITCHED, {"enable_thinking": True}, Phase.BEFORE),
        (SWITCHED, {"enable_thinking": False}, Phase.BEHIND),
        (OPENED, {}, Phase.WITHIN),
        (LED, {}, Phase.BEFORE),
        (CHANNELS, {}, Phase.BEFORE),
    ],
)
def test_the_prompt_says_where_the_output_begins(
    template: str, variables: dict[str, bool], phase: Phase
) -> None:
    """Whatever the user writes about tags."""
    thinking = thinking_of(thinking_tokenizer(template))
    assert thinking is not None
    prompt = prompt_of(template, **variables)
    assert thinking.behind_prompt(prompt).phase is phase
    if phase is Phase.WITHIN:  # also where some was thought already
        assert thinking.behind_prompt([*prompt, 20, 21]) == WITHIN
    assert thinking.behind_prompt([20, 21]) == thinking.start


@pytest.mark.parametrize(
    ("template", "text", "phases"),
    [
        (SWITCHED, "<think>ab</think>c", "WWWBB"),
        (SWITCHED, "ab<think>", "BBB"),
        (OPENED, "</think>a", "BB"),
        (LED, " <think>ab</think>c", "-WWWBB"),
        (LED, "<think>a</think>c", "WWBB"),
        (LED, "  <think>", "-BB"),
        (SWITCHED, " <think>", "BB"),
        (CHANNELS, "<|channel|>final<|message|>a", "-" * 6 + "BB"),
        (CHANNELS, "<|channel|>finally", "-" * 6 + "BB"),
        (
            CHANNELS,
            "<|channel|>analysis<|message|>a<|end|><|end|>"
            "<|start|>assistant<|channel|>final<|message|>b",
            "-" * 9 + "W" * 20 + "BB",
        ),
    ],
)
def test_phases(template: str, text: str, phases: str) -> None:
    tokenizer = thinking_tokenizer(template)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    place, found = thinking.behind_prompt(prompt_of(template)), ""
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        place = thinking.step(place, token)
        found += {Phase.BEFORE: "-", Phase.WITHIN: "W", Phase.BEHIND: "B"}[place.phase]
    assert found == phases and place == BEHIND
