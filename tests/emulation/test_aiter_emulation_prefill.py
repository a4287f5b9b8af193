"""The emulation of AITER's 8-bit prefill of latent attention: right where it answers, and an error
elsewhere.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation_case import (
    FN,
    GFX950,
    Attempt,
    Load,
    Misuse,
    assert_rounded_once,
    attention,
    check_misuse,
    starts,
)
from tests.helpers.bounds import assert_as_exact


class Prefill:
    """Packed prompts in 8 bits, each with some keys before its queries."""

    def __init__(
        self, widths: list[int], contexts: list[int], heads: int = 16, dim: int = 8
    ) -> None:
        torch.manual_seed(2)
        self.widths, self.lengths, self.heads = (
            widths,
            [w + c for w, c in zip(widths, contexts, strict=True)],
            heads,
        )
        self.queries, self.keys = starts(widths), starts(self.lengths)
        self.q = torch.randn(sum(widths), heads, dim + 4).to(FN)
        self.k, self.v = (
            torch.randn(sum(self.lengths), heads, dim + 4).to(FN),
            torch.randn(sum(self.lengths), heads, dim).to(FN),
        )
        self.out = torch.full((len(self.q), heads, dim), torch.nan, dtype=torch.bfloat16)

    def plan(self, aiter: Any, **changes: Any) -> dict[str, Tensor]:
        """The outputs of the planner, by its own names."""
        sizes = aiter.get_ps_metadata_info_v1(len(self.widths), self.heads, max(self.widths))
        names = (
            "work_metadata_ptrs", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map",
            "reduce_partial_map",
        )  # fmt: skip
        plan = {
            name: torch.full(shape if isinstance(shape, tuple) else (shape,), 77).to(dtype)
            for name, (shape, dtype) in zip(names, sizes, strict=True)
        }
        arguments = {
            "seqlens_qo_indptr": self.queries, "pages_kv_indptr": self.keys,
            "context_lens": torch.tensor(self.lengths, dtype=torch.int32), "gqa_ratio": 1,
            "num_heads_k": self.heads, "kvlen_granularity": 128, "block_size": 1,
        }  # fmt: skip
        aiter.get_ps_metadata_v1(**{**arguments, **plan, **changes})
        return plan

    def run(self, aiter: Any, plan: dict[str, Tensor], **changes: Any) -> tuple[Tensor, Tensor]:
        """Both kernels; partial results before the reduction, and the logarithms after it."""
        count = int(plan["reduce_indptr"][-1]) * 256
        partial, logs = (
            torch.full((count, *self.out.shape[1:]), torch.nan),
            torch.full((count, self.heads), torch.nan),
        )
        one = torch.ones(1)
        arguments = {
            "Q": self.q,
            "K": self.k,
            "V": self.v,
            "qo_indptr": self.queries,
            "kv_indptr": self.keys,
            "kv_page_indices": torch.arange(len(self.k), dtype=torch.int32),
            "work_indptr": plan["work_indptr"],
            "work_info_set": plan["work_info"],
            "max_seqlen_q": max(self.widths),
            "softmax_scale": 0.3,
            "is_causal": True,
            "splitData": partial,
            "splitLse": logs,
            "output": self.out,
            **{f"{side}_scale": one for side in "qkv"},
        }
        aiter.mla_prefill_ps_asm_fwd(**{**arguments, **changes})
        lse = torch.full((len(self.q), self.heads), torch.nan)
        maps = {
            name: plan[name] for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")
        }
        splits = (
            {"num_kv_splits": 0}
            if "num_kv_splits" in inspect.signature(aiter.mla_reduce_v1).parameters
            else {}
        )
        aiter.mla_reduce_v1(
            partial_output=partial,
            partial_lse=logs,
            max_seqlen_q=256,
            final_output=self.out,
            final_lse=lse,
            **maps,
            **splits,
        )
        return partial, lse


@pytest.mark.parametrize(
    ("version", "units"),
    [("0.1.15", 3), ("0.1.15", 112), ("0.1.16", 48), ("0.1.20", 3), ("0.1.20", 112)],
)
def test_prefill(load: Load, version: str, units: int) -> None:
    """Several prompts, some longer than a tile and some with a context: no row is missing, and
    unsplit rows have no logarithm.
    """
    aiter, _ = load(version=version, num_compute_units=units, **GFX950)
    batch = Prefill([300, 20, 1, 530], [0, 150, 40, 0])
    plan = batch.plan(aiter)
    _, lse = batch.run(aiter, plan)
    split = set()
    for group in range(int((plan["reduce_indptr"].diff() > 0).sum())):
        split |= set(range(*plan["reduce_final_map"][group].tolist()))
    for i in range(4):
        rows, keys = (slice(int(s[i]), int(s[i + 1])) for s in (batch.queries, batch.keys))
        (_, plain), (want, log) = (
            attention(batch.q[rows], batch.k[keys], batch.v[keys], 0.3, True, dtype)
            for dtype in (torch.float32, torch.float64)
        )
        assert_rounded_once(batch.out[rows], want)
        mine = [row - rows.start for row in range(rows.start, rows.stop) if row in split]
        if mine:
            assert_as_exact(lse[rows][mine], plain[mine], log[mine])
    assert lse[[row for row in range(851) if row not in split]].isnan().all()
    assert bool(split)


def test_the_prefill_plan_by_hand(load: Load) -> None:
    """Two clusters of two groups; five units of keys, three for the first group; the second tile is
    cut.
    """
    aiter, _ = load(num_compute_units=4, **GFX950)
    plan = Prefill([300], [0], heads=2).plan(aiter)
    tile = [
        [0, -1, 0, 256, 0, 256, 0],
        [0, 0, 256, 300, 0, 128, 172],
        [0, 256, 256, 300, 128, 300, 0],
    ]
    assert plan["work_info"][:6].tolist() == [
        [*work, (head + 1) << 16 | head] for head in range(2) for work in tile
    ]
    assert plan["work_indptr"].tolist() == [0, 2, 3, 5, 6]
    assert (
        plan["reduce_indptr"].tolist() == [0, 2, 2]
        and plan["reduce_partial_map"].tolist()
        == [0, 256, *[0] * 2][: len(plan["reduce_partial_map"])]
    )
    assert plan["reduce_final_map"].tolist() == [[256, 300], [0, 0]]
    assert plan["work_metadata_ptrs"].view(torch.int64).tolist() == [77, 77]
    aiter, _ = load(num_compute_units=2, **GFX950)
    # from the head and the tail
    assert Prefill([600], [0], heads=2).plan(aiter)["work_info"][:3, 2].tolist() == [0, 512, 256]


def _prefill(batch: dict[str, Any] | None = None, **changes: Any) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        data = Prefill(**{"widths": [300, 20], "contexts": [0, 0], **(batch or {})})
        plan = data.plan(aiter)
        data.run(
            aiter,
            plan,
            **{name: value(data) if callable(value) else value for name, value in changes.items()},
        )

    return attempt


def _plan_on_device(view: Callable[[Prefill], Tensor]) -> Attempt:
    def attempt(aiter: Any, machine: Machine) -> None:
        data = Prefill([300, 20], [0, 0])
        machine.on_device.append(view(data))
        data.plan(aiter)

    return attempt


def _stale_prefill(aiter: Any, _: Machine) -> None:
    plan = Prefill([300, 20], [0, 0]).plan(aiter)
    Prefill([20, 300], [0, 0]).run(aiter, plan)


def _altered(alter: Callable[[dict[str, Tensor]], None], **planned: Any) -> Attempt:
    """Lists of AITER's planner, one thing in them changed."""

    def attempt(aiter: Any, _: Machine) -> None:
        data = Prefill([300, 20], [0, 0])
        plan = data.plan(aiter, **planned)
        alter(plan)
        data.run(aiter, plan)

    return attempt


def _work(work: int, column: int, value: int) -> Callable[[dict[str, Tensor]], None]:
    """Changes one number of the work list."""

    def alter(plan: dict[str, Tensor]) -> None:
        plan["work_info"][work, column] = value

    return alter


def _twice(plan: dict[str, Tensor]) -> None:
    """The first work again in place of the last."""
    plan["work_info"][int(plan["work_indptr"][-1]) - 1] = plan["work_info"][0]


def _fewer(plan: dict[str, Tensor]) -> None:
    """The last compute unit gets nothing."""
    plan["work_indptr"][-1] = plan["work_indptr"][-2]


def _both_at_0(plan: dict[str, Tensor]) -> None:
    """The parts of a split tile on top of each other."""
    plan["work_info"][plan["work_info"][:, 1] >= 0, 1] = 0


ONE_CLUSTER = {**GFX950, "num_compute_units": 3}
"""The tiles of 300 and 20 rows are 2 + 3 + 1 units of keys: each compute unit gets two, and the
second tile is cut after two.
"""

MISUSES: dict[str, Misuse] = {
    "prefill list, not causal": Misuse(
        _altered(lambda plan: None, is_causal=False), "beyond the diagonal", machine=ONE_CLUSTER
    ),
    "prefill list, a tile short of keys": Misuse(
        _altered(_work(0, 5, 128)), "other lengths", machine=ONE_CLUSTER
    ),
    "prefill list, a tile missing": Misuse(_altered(_fewer), "other lengths", machine=ONE_CLUSTER),
    "prefill list, a tile twice": Misuse(_altered(_twice), "other lengths", machine=ONE_CLUSTER),
    "prefill list, another cut": Misuse(
        _altered(lambda plan: None, kvlen_granularity=64), "multiples of 128", machine=ONE_CLUSTER
    ),
    "prefill list, a whole tile to scratch": Misuse(
        _altered(_work(0, 1, 1024)), "1 parts at", machine=ONE_CLUSTER
    ),
    "prefill list, parts in one place": Misuse(
        _altered(_both_at_0), "two parts at row 0", machine=ONE_CLUSTER
    ),
    "prefill list, keys behind": Misuse(
        _altered(_work(0, 6, 44)), "keys behind the parts", machine=ONE_CLUSTER
    ),
    "prefill on gfx942": Misuse(_prefill(), "gfx942"),
    "prefill, not causal": Misuse(_prefill(is_causal=False), "logarithms", machine=GFX950),
    "prefill, 8 heads": Misuse(_prefill({"heads": 8}), "multiple of 16", machine=GFX950),
    "prefill, real sizes": Misuse(_prefill(), "sizes", machine={**GFX950, "any_shape": False}),
    "prefill, bf16": Misuse(_prefill(V=lambda d: d.v.bfloat16()), "takes", machine=GFX950),
    "prefill, fp16 output": Misuse(
        _prefill(output=lambda d: d.out.half()), "bf16 bits", machine=GFX950
    ),
    "prefill without a scale": Misuse(_prefill(k_scale=None), "k_scale", machine=GFX950),
    "prefill without work": Misuse(_prefill(work_indptr=None), "work list", machine=GFX950),
    "prefill, small scratch": Misuse(
        _prefill(splitData=torch.zeros(256, 16, 8)),
        "scratch",
        machine={**GFX950, "num_compute_units": 48},
    ),
    "prefill, stale plan": Misuse(_stale_prefill, "other lengths", machine=GFX950),
    "prefill plan on the device": Misuse(
        _plan_on_device(lambda d: d.queries), "makes the host wait", machine=GFX950
    ),
    "prefill plan on the device, a view": Misuse(
        _plan_on_device(lambda d: d.keys[1:]), "makes the host wait", machine=GFX950
    ),
    "prefill plan in a capture": Misuse(
        _prefill(), "cannot be captured", machine={**GFX950, "capturing": True}
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])
