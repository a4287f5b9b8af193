"""Answers that the target gave elsewhere, trained on as they are: conversations or tokens."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from drafters.training.config import TrainConfig
from drafters.training.data.prompts import PromptSet, TrainingPrompt
from drafters.training.data.rows import (
    THOUGHTS,
    Messages,
    Row,
    chat_messages,
    conversation,
    goes_on,
    read_rows,
)
from drafters.training.data.shards import Say, write_shard
from drafters.training.data.source import Source
from specdec.base.errors import InvalidInputError
from specdec.session.decoder import SpecDecoder

TOKENS, MASK = "input_ids", "loss_mask"
"""Fields of a row of tokens; the mask has a 1 for each token that the target wrote."""

PROMPT, ANSWER = "prompt_ids", "answer_ids"
"""The same as two fields, as servers keep requests."""

_SAID = "WHAT-IS-SAID"

Own = tuple[str, Row]
"""A row and its place."""


def own_answers(config: TrainConfig) -> tuple[PromptSet, list[Own]]:
    """Prompts of the rows that are held out, and all other rows; the same for the same files.

    Raises:
        InvalidInputError: a file is malformed, holds no answers, or too few to hold some out.
    """
    found = [_joined(*own) for file in config.answers_from for own in read_rows(file)]
    rows = [own for own in found if _check(*own)]
    Random(config.seed).shuffle(rows)
    rows = rows[: config.max_prompts]
    if len(rows) <= config.heldout:
        way_out = "give more rows or a smaller --heldout"
        what = f"{len(rows)} rows with answers are too few to hold out {config.heldout}"
        raise InvalidInputError(f"{what}; {way_out}")
    heldout, asked = rows[: config.heldout], {_opening(*own) for own in rows[: config.heldout]}
    rows = [own for own in rows[config.heldout :] if _opening(*own) not in asked]
    if not rows:
        what = f"no row asks anything else than the {config.heldout} that are held out"
        raise InvalidInputError(f"{what}; give more rows or a smaller --heldout")
    return PromptSet([], [_prompt(*own) for own in heldout], []), rows


def write_own(source: Source, folder: Path, shards: dict[str, Sequence[Own]], say: Say) -> None:
    """Writes rows as files of records, each whole or not at all."""
    for name, rows in shards.items():
        records = [record for place, row in rows for record in _records(source, place, row)]
        write_shard(folder / name, records)
        say(f"answers: {len(rows):,} rows of your own are in {name}")


def chained(rows: Sequence[Row], row: Row) -> list[Row]:
    """Records of a conversation with that of its next turn, which takes the place of the last one
    where its prompt begins with all of it. Templates that drop thoughts say it otherwise.

    >>> one = {"prompt_ids": [1, 2], "answer_ids": [3, 4]}
    >>> chained([one], {"prompt_ids": [1, 2, 3, 4, 5], "answer_ids": [6]})
    [{'prompt_ids': [1, 2, 3, 4, 5], 'answer_ids': [6], 'spans': [[2, 4]]}]
    >>> len(chained([one], {"prompt_ids": [1, 2, 3, 5], "answer_ids": [6]}))
    2
    """
    if not rows:
        return [row]
    start, tokens = len(rows[-1]["prompt_ids"]), [*rows[-1]["prompt_ids"], *rows[-1]["answer_ids"]]
    if row["prompt_ids"][: len(tokens)] != tokens:
        return [*rows, row]
    spans = [*rows[-1].get("spans", ()), [start, len(tokens)]]
    return [*rows[:-1], {**row, "spans": spans}]


def tokenized(source: Source | SpecDecoder, messages: Messages, place: str) -> list[int]:
    """A chat up to the answer to come, in the chat template where there is one, else as text.

    Raises:
        InvalidInputError: the template refuses the messages, which stand at `place`.
    """
    if source.reader.has_template:
        try:
            return source.tokenize([{"role": role, "content": text} for role, text in messages])
        except InvalidInputError as error:
            raise InvalidInputError(f"{place}: {error}; leave out what it does not know") from error
    return source.tokenize("\n".join(text for _, text in messages))


def _joined(place: str, row: Row) -> Own:
    """A row, in which prompt and answer are one where they stand as tokens."""
    if ANSWER not in row:
        return place, row
    prompt, answer = row.get(PROMPT) or [], row[ANSWER]
    if not (_numbers(prompt) and _numbers(answer)):
        raise InvalidInputError(f"{place}: {PROMPT} and {ANSWER} must be lists of whole numbers")
    return place, {TOKENS: [*prompt, *answer], MASK: [0] * len(prompt) + [1] * len(answer)}


def _check(place: str, row: Row) -> bool:
    """Whether somebody answers in a row; InvalidInputError: it is malformed, or has thoughts beside
    an answer, of which only the target's template knows how they were written.
    """
    if TOKENS not in row:
        for name in THOUGHTS:
            if any(message.get(name) for message in chat_messages(row)):
                way_out = "put what the target wrote into the content, as it wrote it"
                raise InvalidInputError(f"{place} has {name} beside an answer; {way_out}")
        return any(role == "assistant" for role, _ in conversation(row, place))
    ids, mask = row[TOKENS], row.get(MASK, [])
    if not _numbers(ids) or not _numbers(mask) or len(ids) != len(mask):
        raise InvalidInputError(f"{place}: {TOKENS} and {MASK} must be whole numbers, as many")
    return any(mask)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and one >= 0 for one in value)


def _spans(row: Row) -> list[list[int]]:
    """Spans of the answers in a row of tokens."""
    found, start = [], 0
    for answered, run in groupby(map(bool, row[MASK])):
        end = start + len(list(run))
        if answered:
            found.append([start, end])
        start = end
    return found


def _opening(place: str, row: Row) -> tuple[Any, ...]:
    """What comes before the first answer of a row, or all of it where nothing does."""
    if TOKENS in row:
        return tuple(row[TOKENS][: _spans(row)[0][0]] or row[TOKENS])
    messages = conversation(row, place)
    return messages[: next(i for i, (role, _) in enumerate(messages) if role == "assistant")]


def _prompt(place: str, row: Row) -> TrainingPrompt:
    """What comes before the last answer of a row."""
    if TOKENS in row:
        start = _spans(row)[-1][0]
        return TrainingPrompt(place, (("user", ""),), token_ids=tuple(row[TOKENS][:start]))
    messages = conversation(row, place)
    last = max(i for i, (role, _) in enumerate(messages) if role == "assistant")
    return TrainingPrompt(place, messages[:last])


def _records(source: Source, place: str, row: Row) -> list[Row]:
    about = {"source": place, "template": "chat", "temperature": 0.0, "seed": 0}
    about["finish_reason"] = "own"
    if TOKENS in row:
        if max(row[TOKENS]) >= len(source.tokenizer):
            raise InvalidInputError(
                f"{place}: {TOKENS} has {max(row[TOKENS])} and the tokenizer of the target"
                f" {len(source.tokenizer)} tokens; give tokens of this target"
            )
        *spans, (start, end) = _spans(row)
        parts = {"prompt_ids": row[TOKENS][:start], "answer_ids": row[TOKENS][start:end]}
        return [{**parts, **({"spans": spans} if spans else {}), **about}]
    records: list[Row] = []
    end_of_turn = _end_of_turn(source)
    said = conversation(row, place)
    messages = tuple((role, _without(text, end_of_turn)) for role, text in said)
    for i, ((role, text), cut) in enumerate(zip(messages, goes_on(row, place), strict=True)):
        if role == "assistant" and i:
            ended = text if cut else text + end_of_turn
            answer = source.tokenizer(ended, add_special_tokens=False)["input_ids"]
            prompt_ids = tokenized(source, messages[:i], place)
            records = chained(records, {"prompt_ids": prompt_ids, "answer_ids": answer, **about})
    return records


def _without(text: str, end: str) -> str:
    """A text without its end of turn, which some programs leave there."""
    return text.rstrip().removesuffix(end) if end and text.rstrip().endswith(end) else text


def _end_of_turn(source: Source) -> str:
    """What ends an answer: the special token that the chat template puts behind it, or a text's."""
    tokenizer = source.tokenizer
    if source.reader.has_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        behind = source.reader.chat_text(chat, {}).rpartition(_SAID)[2].strip()
        first = [token for token in tokenizer.all_special_tokens if behind.startswith(token)]
        if first:
            return str(max(first, key=len))
    return str(tokenizer.eos_token or "")
