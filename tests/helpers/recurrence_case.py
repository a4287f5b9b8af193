"""Random recurrent layers, and sequences that are run through them in pieces and with drafts."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows
from specdec.layers.recurrence.recurrence import recur as oracle
from tests.helpers.bounds import Float64

Recur = Callable[[Tensor, Recurrence, StateCache, RecurrentRows], Tensor]
NAN = float("nan")

EXPONENTIALS = 4
"""Factor for `assert_as_exact`: a GPU's exponential is off by more than torch's, and a state decays
by one in every row.
"""


def layer(
    rule: str = "delta",
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (16, 8),
    *,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Recurrence:
    """With numbers of usual sizes; "plain" has a bias, a skip and limits."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, sizes
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    if rule == "plain":
        limits = {"time_limits": (0.05, 1.5), "skip": torch.randn(value_heads).to(device)}
        options = {"kernel_bias": torch.randn(channels).to(device, dtype) / 4} | limits | options
    return Recurrence(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel=(torch.randn(channels, taps) / 2).to(device, dtype),
        rate=(torch.rand(value_heads) * 2 + 0.05).to(device),
        time_bias=(
            torch.randn(value_heads * (key_dim if options.get("decays_by_key") else 1)) - 2
        ).to(device, dtype),
        rule=rule,  # type: ignore[arg-type]
        **{"kernel_bias": None} | options,
    )


def doubled(one: Recurrence) -> Recurrence:
    """The same layer in float64, for an oracle within `Float64`."""
    names = ("kernel", "kernel_bias", "rate", "time_bias", "skip")
    tensors = {name: value for name in names if (value := getattr(one, name)) is not None}
    doubles: dict[str, Any] = {name: value.double() for name, value in tensors.items()}
    return replace(one, **doubles)


def spoiled_cache(
    one: Recurrence, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device | str
) -> StateCache:
    """A cache whose slots hold what is no number, and lengths that mean nothing."""
    state = torch.full(
        (num_slots, one.num_value_heads, one.key_dim, one.value_dim), NAN, device=device
    )
    inputs = torch.full(
        (num_slots, one.taps - 1 + 2 * max_rows, one.width), NAN, dtype=dtype, device=device
    )
    return StateCache(state, inputs, torch.full((num_slots,), 5, device=device))


def forward_rows(
    slots: list[int],
    starts: list[int],
    counts: list[int],
    device: torch.device,
    *,
    max_pending: int,
    final: bool,
    padding: int = 0,
) -> RecurrentRows:
    """Each request's rows with so many that only pad behind them."""
    ends = torch.tensor([0, *counts]).cumsum(0) + torch.arange(len(counts) + 1) * padding
    places, begins, numbers = (
        torch.tensor(part, device=device) for part in (slots, starts, counts)
    )
    most = max(counts) + padding
    return RecurrentRows(places, begins, numbers, ends.int().to(device), most, max_pending, final)


@dataclass
class World:
    """Requests that are decoded together.

    Attributes:
        recur: what is tested.
        one: the layer.
        inputs: [length, width] per request.
        max_rows: of a step.
        num_padding: requests that only pad the batch; all name slot 0.
        padding: rows behind those of each request that only pad it.
        extra: columns behind what the layer reads.
    """

    recur: Recur
    one: Recurrence
    inputs: list[Tensor]
    max_rows: int = 8
    num_padding: int = 0
    padding: int = 0
    extra: int = 3

    def __post_init__(self) -> None:
        x = self.inputs[0]
        self.slots = [2 * i + 1 for i in range(len(self.inputs))][::-1]
        self.cache = spoiled_cache(
            self.one, 2 * len(self.inputs) + 1, self.max_rows, x.dtype, x.device
        )
        self.done = [0] * len(self.inputs)
        self.outputs: list[list[Tensor]] = [[] for _ in self.inputs]

    def step(self, counts: list[int], accepted: list[int] | None = None) -> None:
        """Rows for each request that has any, of which so many are accepted and the others hold no
        number; None is a final step.
        """
        final, x = accepted is None, self.inputs[0]
        kept = counts if accepted is None else accepted
        present = [i for i, count in enumerate(counts) if count]
        pads = [1] * self.num_padding
        rows = forward_rows(
            [self.slots[i] for i in present] + [0 for _ in pads],
            [self.done[i] for i in present] + [0 for _ in pads],
            [counts[i] for i in present] + pads,
            x.device,
            max_pending=self.max_rows,
            final=final,
            padding=self.padding,
        )
        packed = torch.full(
            (int(rows.first_rows[-1]), self.one.width + self.extra),
            NAN,
            dtype=x.dtype,
            device=x.device,
        )
        firsts = rows.first_rows.tolist()
        for i, first in zip(present, firsts, strict=False):
            new = self.inputs[i][self.done[i] : self.done[i] + kept[i]]
            packed[first : first + len(new), : self.one.width] = new
        for first in firsts[len(present) : -1]:
            packed[first, : self.one.width] = 1
        out = self.recur(packed, self.one, self.cache, rows)
        rows.finish(self.cache.lengths)
        assert (
            out.shape == (len(packed), self.one.num_value_heads * self.one.value_dim)
            and out.dtype == x.dtype
        )
        for i, first in zip(present, firsts, strict=False):
            self.outputs[i].append(out[first : first + kept[i]])
            assert not out[first + counts[i] : first + counts[i] + self.padding].any(), (
                "rows that pad are zeros"
            )
            self.done[i] += kept[i]
        for first in firsts[len(present) : -1]:
            assert out[first].isfinite().all()

    def finish(
        self, seed: int, *, max_prompt: int, drafts: tuple[int, ...] = (0, 1, 3, 7)
    ) -> list[Tensor]:
        """Prompts in pieces, then drafts of which some are accepted, up to the end of each
        sequence; its outputs.
        """
        chance = random.Random(seed)
        lengths = [len(x) for x in self.inputs]
        for i, length in enumerate(lengths):  # prompts one after the other, while those before wait
            prompt = min(chance.randint(1, max_prompt), length)
            while self.done[i] < prompt:
                counts = [0] * len(lengths)
                counts[i] = chance.randint(1, prompt - self.done[i])
                self.step(counts)
        while any(done < length for done, length in zip(self.done, lengths, strict=True)):
            width = chance.choice(drafts) + 1
            left = [
                min(width, length - done) for done, length in zip(self.done, lengths, strict=True)
            ]
            counts = [width if some else 0 for some in left]
            if width == 1 and chance.random() < 0.7:
                self.step(counts)
            else:
                self.step(counts, [chance.randint(1, some) if some else 0 for some in left])
        return [torch.cat(parts) for parts in self.outputs]


def at_once(one: Recurrence, x: Tensor, recur: Recur = oracle) -> tuple[Tensor, Tensor]:
    """Outputs [length, heads * V] and state of one sequence that is taken in by a single call."""
    cache = spoiled_cache(one, 1, 1, x.dtype, x.device)
    cache = cache._replace(state=cache.state.to(torch.promote_types(x.dtype, torch.float32)))
    out = recur(
        x, one, cache, forward_rows([0], [0], [len(x)], x.device, max_pending=0, final=True)
    )
    return out, cache.state[0]


def exactly(one: Recurrence, x: Tensor) -> tuple[Tensor, Tensor]:
    """`at_once` in float64."""
    with Float64():
        return at_once(doubled(one), x.double())
