"""The emulation of AITER's indexer: right where it answers, and an error elsewhere."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation_case import FN, FNUZ, Attempt, Load, Misuse, check_misuse, starts
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync

DIM = 32
ARCHITECTURES = [("gfx942", FNUZ), ("gfx950", FN)]


class Indexed:
    """Keys of a few requests in scattered blocks of a cache,
    and the last rows of each as queries.
    """

    def __init__(
        self,
        fp8: torch.dtype,
        *,
        size: int = 16,
        preshuffle: bool = True,
        lengths: tuple[int, ...] = (37, 20),
        next_n: int = 2,
    ) -> None:
        torch.manual_seed(3)
        self.fp8, self.size, self.preshuffle, self.lengths, self.next_n = (
            fp8, size, preshuffle, lengths, next_n,
        )  # fmt: skip
        self.key = torch.randn(sum(lengths), DIM).bfloat16()
        self.key[4] *= 1e-6  # smaller than any key is scaled for
        width = -(-max(lengths) // size)
        self.table = (
            torch.randperm(len(lengths) * width + 3)[: len(lengths) * width]
            .view(len(lengths), width)
            .int()
        )
        self.cache = torch.zeros(len(lengths) * width + 3, size, DIM + 4, dtype=torch.uint8)
        self.lens, self.starts = torch.tensor(lengths, dtype=torch.int32), starts(list(lengths))
        positions = [(i, j) for i, n in enumerate(lengths) for j in range(n)]
        self.places = [(int(self.table[i, j // size]), j % size) for i, j in positions]
        self.slots = torch.tensor([block * size + token for block, token in self.places] + [-1])
        self.query = torch.randn(len(lengths), next_n, 16, DIM).to(fp8)
        self.weights = torch.randn(len(lengths) * next_n, 16)

    def write(self, aiter: Any, **changes: Any) -> None:
        """Puts the keys into the cache; a negative slot behind them is left out."""
        arguments = {
            "quant_block_size": DIM,
            "scale_fmt": "ue8m0",
            "preshuffle": self.preshuffle,
            **changes,
        }
        aiter.indexer_k_quant_and_cache(
            torch.cat([self.key, self.key[:1]]), self.cache, self.slots, **arguments
        )

    def gather(self, aiter: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        """Packed keys and scales."""
        keys, scales = (
            torch.empty(len(self.key), DIM, dtype=self.fp8),
            torch.empty(len(self.key), 4, dtype=torch.uint8),
        )
        arguments = {"dst_scale": scales, "preshuffle": self.preshuffle, **changes}
        aiter.cp_gather_indexer_k_quant_cache(
            self.cache, keys, block_table=self.table, cu_seq_lens=self.starts, **arguments
        )
        return keys, scales.view(torch.float32).view(-1)

    def score(self, aiter: Any, width: int = 512, **changes: Any) -> Tensor:
        """Scores over the cache in rows of nines."""
        logits = torch.full((len(self.weights), width), 9.0)
        arguments = {
            "q_fp8": self.query,
            "kv_cache": self.cache[:, :, None],
            "weights": self.weights,
            "max_model_len": width,
            "Preshuffle": self.preshuffle,
            "KVBlockSize": self.size,
            **changes,
        }
        aiter.deepgemm_fp8_paged_mqa_logits(
            out_logits=logits, context_lens=self.lens, kv_indices=self.table, **arguments
        )
        return logits

    def wanted(self, keys: Tensor, scales: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Scores of every row against all keys of its request, in `dtype`, added term by term, as
        errors grow most.
        """
        rounded = (keys.to(dtype) * scales[:, None]).split(self.lengths)
        scores = []
        for row, (query, weights) in enumerate(
            zip(self.query.to(dtype).flatten(0, 1), self.weights.to(dtype), strict=True)
        ):
            own = rounded[row // self.next_n]
            dots, total = own.new_zeros(len(own), len(query)), own.new_zeros(len(own))
            for d in range(DIM):
                dots += own[:, d, None] * query[:, d]
            for head, weight in enumerate(weights):
                total += dots[:, head].relu() * weight
            scores.append(total)
        return scores

    def check(
        self, logits: Tensor, keys: Tensor, scales: Tensor, parts: Sequence[tuple[int, int, int]]
    ) -> None:
        """Of each of `parts`, row, first column and number, `logits` has the first scores of that
        row.
        """
        plain, exact = (
            self.wanted(keys, scales, dtype) for dtype in (torch.float32, torch.float64)
        )
        runs = [
            (logits[row, first : first + n], plain[row][:n], exact[row][:n])
            for row, first, n in parts
        ]
        assert_as_exact(*(torch.cat(side) for side in zip(*runs, strict=True)))


@pytest.mark.parametrize(("architecture", "fp8"), ARCHITECTURES)
@pytest.mark.parametrize(("size", "preshuffle"), [(16, True), (48, True), (16, False), (1, False)])
def test_cache_layout(
    load: Load, architecture: str, fp8: torch.dtype, size: int, preshuffle: bool
) -> None:
    """Every byte of the cache by the formula: keys by rows or by tiles of 16 x 16, then the scales,
    powers of two.
    """
    aiter, _ = load(architecture=architecture)
    data = Indexed(fp8, size=size, preshuffle=preshuffle)
    with no_host_sync():
        data.write(aiter)
    want = torch.zeros(len(data.cache), size * (DIM + 4), dtype=torch.uint8)
    for key, (block, token) in zip(data.key.float(), data.places, strict=True):
        scale = 2.0 ** math.ceil(
            math.log2(max(float(key.abs().max()), 1e-4) / torch.finfo(fp8).max)
        )
        stored = (key / scale).to(fp8).view(torch.uint8)
        for d in range(DIM):
            tiled = token // 16 * 16 * DIM + d // 16 * 256 + token % 16 * 16 + d % 16
            want[block, tiled if preshuffle else token * DIM + d] = stored[d]
        want[block, size * DIM + 4 * token :][:4] = torch.tensor([scale]).view(torch.uint8)
    assert torch.equal(data.cache.view(len(want), -1), want)


def test_scales_that_are_no_powers_of_two(load: Load) -> None:
    """By another format's name, a key uses the whole range."""
    aiter, machine = load()
    data = Indexed(machine.fp8)
    data.write(aiter, scale_fmt="float")
    keys, scales = data.gather(aiter)
    exact = data.key.double().abs().amax(-1).clamp(min=1e-4) / torch.finfo(machine.fp8).max
    assert_as_exact(scales, exact.float(), exact)
    assert_stored(keys, scales, data.key)


def assert_stored(keys: Tensor, scales: Tensor, want: Tensor) -> None:
    """`keys` in 8 bits times `scales` are `want`: 3 bits behind the first one round by 2**-4 at
    most, tiny numbers by one step.
    """
    error, tiny = (
        (keys.float() * scales[:, None] - want.float()).abs(),
        torch.finfo(keys.dtype).smallest_normal,
    )
    assert (error <= 1.001 * 2**-4 * want.float().abs().clamp(min=scales[:, None] * tiny)).all()


@pytest.mark.parametrize(("size", "preshuffle"), [(16, True), (48, True), (16, False), (1, False)])
def test_gathered_keys(load: Load, size: int, preshuffle: bool) -> None:
    """What was written comes back packed, into scales of either type; read in the other order, it
    is something else.
    """
    aiter, machine = load()
    data = Indexed(machine.fp8, size=size, preshuffle=preshuffle)
    data.write(aiter)
    with no_host_sync():
        keys, scales = data.gather(aiter)
        floats = torch.empty(len(data.key), 1)
        data.gather(aiter, dst_scale=floats)
    assert_stored(keys, scales, data.key)
    assert torch.equal(floats.view(-1), scales)
    if size % 16 == 0:
        other, _ = data.gather(aiter, preshuffle=not preshuffle)
        assert not torch.equal(other.float(), keys.float())


@pytest.mark.parametrize(("architecture", "fp8"), ARCHITECTURES)
@pytest.mark.parametrize(("size", "preshuffle"), [(16, True), (64, True), (1, False)])
def test_scores(
    load: Load, architecture: str, fp8: torch.dtype, size: int, preshuffle: bool
) -> None:
    """Both ways to the scores, packed and paged, agree with the plain formula; what no kernel
    writes stays as it was.
    """
    aiter, _ = load(architecture=architecture)
    data = Indexed(fp8, size=size, preshuffle=preshuffle)
    data.write(aiter)
    begins, ends = torch.tensor([0, 0, 37, 37]).int(), torch.tensor([36, 37, 56, 57]).int()
    with no_host_sync():
        keys, scales = data.gather(aiter)
        paged = data.score(aiter)
        packed = aiter.fp8_mqa_logits(
            data.query.flatten(0, 1), keys, scales, data.weights, begins, ends
        )
    assert packed.stride(0) == 256
    counts = (ends - begins).tolist()
    data.check(packed, keys, scales, [(row, int(begins[row]), n) for row, n in enumerate(counts)])
    data.check(paged, keys, scales, [(row, 0, n) for row, n in enumerate(counts)])
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        assert packed[row, :begin].isneginf().all() and packed[row, end:].isneginf().all()
        written = -(-data.lengths[row // 2] // size) * size
        assert (
            paged[row, end - begin : written].isneginf().all() and (paged[row, written:] == 9).all()
        )


def test_requests_without_keys(load: Load) -> None:
    """A batch padded for a graph: nothing is read or written for them, and nobody else is
    disturbed.
    """
    aiter, machine = load()
    data = Indexed(machine.fp8, lengths=(20, 0))
    data.write(aiter)
    keys, scales = data.gather(aiter)
    logits = data.score(aiter)
    data.check(logits, keys, scales, [(1, 0, 20)])
    assert (logits[2:] == 9).all()


def test_keys_behind_a_row_may_have_scores(load: Load) -> None:
    """Preshuffled, only the last half chunk is masked, so that columns past a row's own position
    are not always -inf.
    """
    aiter, machine = load()
    data = Indexed(machine.fp8, size=128, lengths=(129,), next_n=4)
    data.write(aiter)
    logits = data.score(aiter)
    data.check(
        logits, *data.gather(aiter), [(row, 0, n) for row, n in enumerate([128, 128, 128, 129])]
    )
    for row, own in enumerate([126, 127, 128, 129]):
        assert logits[row, max(own, 128) : 256].isneginf().all() and (logits[row, 256:] == 9).all()


def test_top_k(load: Load) -> None:
    """Columns of the whole row, not counted from its start, filled up with -1; a decode row ends at
    its own position.
    """
    aiter, _ = load()
    logits = torch.randn(4, 40)
    logits[:, 30:] = torch.nan
    indices = torch.zeros(4, 8, dtype=torch.int32)
    begins, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 28, 5], [30, 30, 30, 5]))
    with no_host_sync():
        aiter.top_k_per_row_prefill(logits, begins, ends, indices, None, 4, 40, 1, k=8)
    for row in range(4):
        best = sorted(
            range(int(begins[row]), int(ends[row])), key=lambda column: -float(logits[row, column])
        )[:8]
        assert sorted(indices[row].tolist()) == sorted(best + [-1] * (8 - len(best)))
    lens = torch.tensor([30, 9], dtype=torch.int32)
    with no_host_sync():
        aiter.top_k_per_row_decode(logits, 2, lens, indices, 4, 40, 1, k=8)
    for row, length in enumerate([29, 30, 8, 9]):
        assert set(indices[row].tolist()) == set(logits[row, :length].topk(8).indices.tolist())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_ties(load: Load, phase: str) -> None:
    """Stable, the lower columns win and ascend. Otherwise AITER promises nothing, and here both are
    the other way round.
    """
    logits = torch.tensor([[1.0, 0.0, 2.0, 1.0, 1.0, -1.0, 1.0]])
    bound = torch.tensor([7], dtype=torch.int32)

    def best(version: str, **stable: bool) -> list[int]:
        aiter, _ = load(version=version)
        indices = torch.zeros(1, 3, dtype=torch.int32)
        with no_host_sync():
            if phase == "prefill":
                aiter.top_k_per_row_prefill(
                    logits, bound - 7, bound, indices, None, 1, 7, 1, k=3, **stable
                )
            else:
                aiter.top_k_per_row_decode(logits, 1, bound, indices, 1, 7, 1, k=3, **stable)
        return indices[0].tolist()

    assert best("0.1.20", stable=True) == [0, 2, 3]
    assert best("0.1.20") == best("0.1.15") == [6, 4, 2]
    with pytest.raises(TypeError, match="stable"):
        best("0.1.16", stable=True)


def _write(size: int) -> Attempt:
    return lambda aiter, machine: Indexed(machine.fp8, size=size).write(aiter)


def _gather(size: int = 16, **changes: Any) -> Attempt:
    return lambda aiter, machine: Indexed(machine.fp8, size=size).gather(aiter, **changes)


def _score(size: int = 16, preshuffle: bool = True, width: int = 64, **changes: Any) -> Attempt:
    def attempt(aiter: Any, machine: Machine) -> None:
        data = Indexed(machine.fp8, size=size, preshuffle=preshuffle)
        data.score(
            aiter,
            width,
            **{name: value(data) if callable(value) else value for name, value in changes.items()},
        )

    return attempt


def _score_real_size(aiter: Any, machine: Machine) -> None:
    query, cache = (
        torch.zeros(1, 1, 16, 128).to(machine.fp8),
        torch.zeros(1, 16, 1, 132, dtype=torch.uint8),
    )
    lens = torch.ones(1, dtype=torch.int32)
    aiter.deepgemm_fp8_paged_mqa_logits(
        query,
        cache,
        torch.zeros(1, 16),
        torch.zeros(1, 256),
        lens,
        lens[:, None] - 1,
        256,
        Preshuffle=True,
        KVBlockSize=16,
    )


def _top(strides: tuple[int, int] = (40, 1), length: int = 30, k: int = 8) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        logits = torch.full((2, 40), torch.nan)
        logits[:, :30] = 0
        indices = torch.zeros(2, 8, dtype=torch.int32)
        aiter.top_k_per_row_decode(
            logits, 1, torch.tensor([30, length], dtype=torch.int32), indices, 2, *strides, k=k
        )

    return attempt


MISUSES: dict[str, Misuse] = {
    "written tiles in blocks of 8": Misuse(_write(8), "not whole tiles"),
    "gathered tiles in blocks of 24": Misuse(_gather(24), "not whole tiles"),
    "gathered scales without a second dimension": Misuse(
        _gather(dst_scale=torch.zeros(57)), "scales"
    ),
    "blocks of rows": Misuse(_score(preshuffle=False), "per token unless Preshuffle; blocks of 16"),
    "scored tiles in blocks of 8": Misuse(_score(8), "not whole tiles"),
    "blocks larger than half a chunk": Misuse(_score(256), "not emulated"),
    "8 heads": Misuse(
        _score(q_fp8=lambda d: d.query[:, :, :8], weights=lambda d: d.weights[:, :8]),
        "at least 16 heads",
    ),
    "16 heads of real size": Misuse(
        _score_real_size, "16 heads leave threads", machine={"any_shape": False}
    ),
    "paged, real sizes": Misuse(_score(), "sizes", machine={"any_shape": False}),
    "strided weights": Misuse(_score(weights=lambda d: d.weights.T.contiguous().T), "strided"),
    "context beyond the bound": Misuse(_score(width=32), "beyond max_model_len"),
    "last block beyond the row": Misuse(_score(width=40), "writes 48 columns of a row of 40"),
    "top-k of unwritten columns": Misuse(_top(length=31), "nobody wrote"),
    "top-k with the width as stride": Misuse(_top(strides=(30, 1)), "strides"),
    "top-k of another width": Misuse(_top(k=4), "indices"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])
