"""Random batches on every AITER backend, emulated: a row's error is at most twice that of plain
torch in the same type.

A draw has one to six requests that are prompts, chunks behind a context or decoding, of any
lengths, in one forward whose lengths the host knows, or one group of equal rows whose lengths only
the device knows; with scattered blocks of 16 or 32, bfloat16 or float16, windows, sinks, softcaps,
both causalities and groups of one to four. Every head size has its turn. The truth is `torch_ref`
in float32 on the same rounded inputs; plain torch's own error is that of `torch_ref` in the drawn
type. What an 8-bit cache is given are numbers it holds exactly, so its error has the same bound.

This is the emulation's rounding, products in float32 and one rounding at the end; the kernels' own
awaits the hardware.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.fa import (
    FP8_ARCHITECTURES,
    RocmAiterFaBackend,
    RocmAiterFaShuffleBackend,
)
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.kv_cache import LatentCache
from tests.helpers import latent_case as latent
from tests.helpers import sparse_case as sparse
from tests.helpers.attention_case import Case, spec
from tests.helpers.rocm import Install

HEAD_DIMS = (64, 96, 128, 256)
POWERS_OF_TWO = (64, 32, 128, 256)
"""Of heads in the shuffled layout."""

WINDOWS = (None, 1, 7, 16, 33, 200)
BOUND = 2.0
TIERS: dict[str, tuple[type[RocmAiterFaBackend], tuple[str, ...]]] = {
    "plain": (RocmAiterFaBackend, ("gfx942", "gfx950")),
    "shuffle": (RocmAiterFaShuffleBackend, ("gfx942", "gfx950")),
    "triton": (RocmAiterFaBackend, ("gfx1100", "gfx1201")),
}
"""Backend and the architectures of its tier."""


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """With few compute units."""
    return partial(rocm, num_compute_units=8)


def random_batch(draw: random.Random) -> tuple[list[int], list[int], bool]:
    """Lengths, rows, and whether only the device knows them."""
    count = draw.randint(1, 6)
    if draw.random() < 0.4:
        width = draw.choice([1, 1, 2, 4, 5, 8])
        return (
            [width + draw.choice([0, draw.randint(1, 90)]) for _ in range(count)],
            [width] * count,
            True,
        )
    widths, lengths = [], []
    for _ in range(count):
        phase = draw.choice(["prefill", "extend", "decode"])
        widths.append(1 if phase == "decode" else draw.randint(1, 40))
        lengths.append(widths[-1] + (0 if phase == "prefill" else draw.randint(1, 60)))
    return lengths, widths, False


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Root mean square error of every row's output."""
    return (got.float() - want).flatten(1).square().mean(-1).sqrt()


def assert_as_exact_as_torch(got: Tensor, plain: Tensor, want: Tensor, drawn: object) -> None:
    """The worst row of `got` is at most `BOUND` times as far off as the worst one of `plain`."""
    assert got.dtype == plain.dtype and got.isfinite().all()
    error, allowed = row_errors(got, want).max(), BOUND * row_errors(plain, want).max()
    assert error <= allowed, f"error {error:.2e}, plain torch's {allowed / BOUND:.2e}: {drawn}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tier", TIERS)
def test_ordinary_heads(rocm: Install, tier: str, seed: int) -> None:
    """Wrong rows, keys, blocks, windows, scales and merges, in whatever combination."""
    draw = random.Random(seed)
    backend, architectures = TIERS[tier]
    architecture = draw.choice(architectures)
    rocm(architecture=architecture)
    causal, kv_heads = draw.random() < 0.7, draw.choice([1, 2])
    rounded = draw.random() < 0.3 and architecture in FP8_ARCHITECTURES
    fp8 = specdec.device.device.float8_dtype(torch.device("cpu")) if rounded else None
    asked = spec(
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        head_dim=(POWERS_OF_TWO if tier == "shuffle" else HEAD_DIMS)[seed % 4],
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw.choice([1, 2, 4]),
        block_size=draw.choice([16, 32]),
        non_causal=not causal,
        cache_dtype=fp8,
    )
    if (
        asked.dtype is torch.bfloat16
        and torch.cpu._is_amx_tile_supported()
        and not specdec.device.device.uses_avx512()
    ):
        pytest.skip(
            "torch's own bfloat16 attention fails where ATEN_CPU_CAPABILITY excludes AVX-512 on a"
            " CPU with AMX"
        )
    lengths, widths, uniform = random_batch(draw)
    case = Case(asked, lengths, widths, uniform=uniform, causal=causal)
    how = {
        "scale": draw.choice([asked.head_dim**-0.5, 0.05]),
        "window": draw.choice(WINDOWS),
        "sinks": torch.randn(asked.num_heads) if causal and draw.random() < 0.3 else None,
        "softcap": 3.0 if causal and draw.random() < 0.3 else None,
    }
    assert backend.unsupported_reasons(asked) == []
    plain_spec = replace(asked, cache_dtype=None)
    case.spec = plain_spec
    plain = case.attend(TorchRefBackend(plain_spec), **how)
    case.spec = asked
    drawn = (asked, lengths, widths, uniform, causal, how)
    assert_as_exact_as_torch(case.attend(backend(asked), **how), plain, case.want(**how), drawn)


@pytest.mark.parametrize("seed", range(12))
def test_latent_attention(rocm: Install, seed: int) -> None:
    """The same for latents: keys built or maps absorbed, counts of heads that fill up, rows taken
    together.
    """
    draw = random.Random(seed)
    rocm(architecture=draw.choice(["gfx942", "gfx950"]), any_shape=True)
    value_dim = HEAD_DIMS[seed % 4]
    causal = draw.random() < 0.7
    asked = latent.spec(
        num_heads=draw.choice([2, 4, 16, 20]),
        kv_lora_rank=draw.choice([32, 64]),
        qk_nope_head_dim=value_dim - 16,
        qk_rope_head_dim=16,
        v_head_dim=value_dim,
        block_size=draw.choice([1, 16, 32]),
        non_causal=not causal,
    )
    lengths, widths, uniform = random_batch(draw)
    case = latent.Case(asked, lengths, widths, uniform=uniform, causal=causal)
    clean = LatentCache(*(t.nan_to_num() if t.is_floating_point() else t for t in case.cache()))
    reference = TorchRefMlaBackend(asked)
    plain = reference.run(
        case.rows, case.up, clean, reference.plan(case.metadata), scale=case.scale
    )
    got = case.attend(RocmAiterMlaBackend(asked))
    assert_as_exact_as_torch(got, plain, case.want(), (asked, lengths, widths, uniform, causal))


@pytest.mark.parametrize("seed", range(6))
def test_sparse_latent_attention(rocm: Install, seed: int) -> None:
    """The same behind an indexer, three forwards on one cache; all backends select the same
    positions.
    """
    draw = random.Random(seed)
    rocm(architecture=draw.choice(["gfx942", "gfx950"]), any_shape=True)
    value_dim = HEAD_DIMS[seed % 4]
    asked = sparse.spec(
        dtype=torch.bfloat16,
        num_heads=draw.choice([2, 4, 16, 20]),
        qk_nope_head_dim=value_dim - 16,
        v_head_dim=value_dim,
        block_size=draw.choice([16, 32]),
        indexer=IndexerSpec(num_heads=16, head_dim=32, topk=draw.choice([3, 6, 40])),
    )
    count, width = draw.randint(1, 4), draw.choice([1, 4, 5])
    steps = [
        ([draw.randint(1, 30) for _ in range(count)], True),
        ([draw.choice([1, draw.randint(2, 20)]) for _ in range(count)], True),
        ([width] * count, False),
    ]
    case = sparse.Case(
        asked, [sum(widths[i] for widths, _ in steps) for i in range(count)], seed=seed
    )
    histories = [
        case.history(backend, steps)
        for backend in (
            RocmAiterMlaSparseBackend(asked),
            TorchRefMlaBackend(asked),
            case.reference(),
        )
    ]
    for got, plain, want in zip(*histories, strict=True):
        assert (
            [sparse.sets(s) for s in got[0]]
            == [sparse.sets(s) for s in want[0]]
            == [sparse.sets(s) for s in plain[0]]
        )
        assert_as_exact_as_torch(got[1][0], plain[1][0], want[1][0], (asked, steps))
