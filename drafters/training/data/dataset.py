"""Answers for the training loop: a compact tensor of tokens, and batches of like length."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from drafters.training.data.shards import read_shard
from drafters.training.loss.blocks import SequenceBatch
from specdec.base.errors import InvalidInputError

MAX_MASKED = 0.01
"""Share of answers that may hold the mask token by accident of sampling."""


@dataclass(slots=True)
class Answer:
    """A prompt and what the target answered.

    Attributes:
        prompt_ids, answer_ids: tokens, as compact arrays.
        few_shot: the prompt is a few-shot text, and the answer ends where the next question begins.
        temperature, seed: it was drawn with; 0 is greedy.
        spans: earlier answers within the prompt, trained as well, as start and end.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    few_shot: bool = False
    temperature: float = 0.0
    seed: int = 0
    spans: Sequence[Sequence[int]] = ()

    @property
    def all_spans(self) -> list[Sequence[int]]:
        """`spans`, and that of the answer."""
        start = len(self.prompt_ids)
        return [*self.spans, (start, start + len(self.answer_ids))]


def read_answers(folder: Path, split: str) -> list[Answer]:
    """Answers of the finished shards of `split`, "train" or "heldout".

    Raises:
        InvalidInputError: there are none.
        CheckpointError: a shard is damaged.
    """
    paths = sorted(folder.glob(f"{split}-*.jsonl.gz"))
    answers = [answer for path in paths for answer in read_shard(path, _as_answer, stage="answers")]
    if not answers:
        what = f"{str(folder)!r} holds no {split} answers"
        raise InvalidInputError(f"{what}; run the answers stage first")
    return answers


def _as_answer(record: dict[str, Any]) -> Answer:
    prompt_ids, answer_ids = (array("i", record[name]) for name in ("prompt_ids", "answer_ids"))
    few_shot = record["template"] == "few-shot"
    draw = {"temperature": record["temperature"], "seed": record["seed"]}
    return Answer(prompt_ids, answer_ids, few_shot=few_shot, spans=record.get("spans", ()), **draw)


class AnswerSet:
    """All answers on the device.

    Args:
        answers: sequences.
        device: where their tokens live, as int32.
        max_length: longer sequences are left out.
        bucket: batches are padded to a multiple of this many tokens.
        mask_token_id: sequences that hold it are left out: it could not be told from a word;
            None for a drafter without one.

    Attributes:
        lengths: tokens of each sequence.
        draws: temperature and seed of each answer.
        num_too_long: sequences left out for their length.
        num_too_short: those left out because no answer token follows another.
        num_masked: those left out because they hold the mask token.

    Raises:
        InvalidInputError: nothing is left, or the mask token is a common one.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        device: torch.device,
        max_length: int,
        bucket: int,
        mask_token_id: int | None,
    ) -> None:
        fitting = [a for a in answers if len(a.prompt_ids) + len(a.answer_ids) <= max_length]
        long_enough = [a for a in fitting if len(a.answer_ids) >= 2]
        kept = [
            a
            for a in long_enough
            if mask_token_id not in a.answer_ids and mask_token_id not in a.prompt_ids
        ]
        self.num_too_long = len(answers) - len(fitting)
        self.num_too_short = len(fitting) - len(long_enough)
        self.num_masked = len(long_enough) - len(kept)
        if self.num_masked > MAX_MASKED * len(long_enough):
            raise InvalidInputError(
                f"mask-token {mask_token_id} occurs in {self.num_masked} of {len(long_enough)}"
                f" answers, so the drafter could not"
                " tell it from a word; choose another --mask-token"
            )
        if not kept:
            raise InvalidInputError(
                f"none of {len(answers)} answers can be used: {self.num_too_long} are longer than"
                f" max-length {max_length} with their prompt, {self.num_too_short} have fewer than"
                " 2 tokens; raise --max-length or --max-tokens"
            )
        self.bucket = bucket
        self.lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in kept]
        self.draws = [(a.temperature, a.seed) for a in kept]
        tokens, ends = array("i"), array("i")
        for answer in kept:
            tokens.extend(answer.prompt_ids)
            tokens.extend(answer.answer_ids)
            start = len(ends)
            ends.extend([0] * (len(tokens) - start))
            for first, behind in answer.all_spans:
                ends[start + first : start + behind] = array("i", [behind]) * (behind - first)
        self._tokens = torch.frombuffer(tokens, dtype=torch.int32).to(device, copy=True)
        self._ends = torch.frombuffer(ends, dtype=torch.int32).to(device, copy=True)
        self._lengths = torch.tensor(self.lengths).to(device)
        self._prompt_lens = torch.tensor([len(a.prompt_ids) for a in kept]).to(device)
        self._starts = self._lengths.cumsum(0) - self._lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, vocab_size: int) -> Tensor:
        """int64 [vocab_size], how often the answers have each token."""
        weights = (self._ends > 0).double()  # exact, and without a wait for how many they are
        return self._tokens.bincount(weights, minlength=vocab_size).long()

    def take(self, chosen: Sequence[int], indices: Tensor, longest: int) -> SequenceBatch:
        """The sequences `chosen`, `indices` int64 [S] on the device, padded to `longest`."""
        width = -(-longest // self.bucket) * self.bucket
        positions = torch.arange(width, device=self._tokens.device)
        lengths = self._lengths[indices]
        rows = (self._starts[indices][:, None] + positions).clamp(max=self._tokens.shape[0] - 1)
        padding = positions >= lengths[:, None]
        tables = (self._tokens, self._ends)
        tokens, ends = (part[rows].long().masked_fill(padding, 0) for part in tables)
        host = [self.lengths[index] for index in chosen]
        return SequenceBatch(tokens, self._prompt_lens[indices], lengths, host, ends)

    def epoch(self, seed: int, batch_size: int, *, mixed: bool = False) -> list[list[int]]:
        """Batches of sequence indices for one pass, the same for the same seed; the remainder that
        fills no batch is left out.

        Sequences of like length share a batch, so that little of it is padding, and batches come in
        random order. `mixed` ones hold any, the shortest first, to take about as many rows.
        """
        random = Random(seed)
        order = random.sample(range(len(self)), len(self))
        if len(order) < batch_size:
            order = (order * -(-batch_size // len(order)))[:batch_size]
        order = order[: len(order) - len(order) % batch_size]
        if not mixed:
            order.sort(key=lambda index: self.lengths[index])
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        if mixed:
            return [sorted(batch, key=lambda index: self.lengths[index]) for batch in batches]
        random.shuffle(batches)
        return batches

    def longest(self, indices: Sequence[int]) -> int:
        """Tokens of the longest of these sequences."""
        return max(self.lengths[index] for index in indices)


def in_batches(count: int, size: int) -> Iterator[range]:
    """`range(count)` in pieces of `size`."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
