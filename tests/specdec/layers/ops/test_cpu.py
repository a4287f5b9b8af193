"""What lies between products on a CPU, by our own C++, beside plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, AttentionSpec, TreeRows
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.kernels.native import native
from specdec.kv_cache import KVLayerSpec
from specdec.layers.linear import DenseLinear
from specdec.layers.ops.cpu import CpuOps
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Join, Ops
from specdec.layers.rotary.rotary import Angles
from tests.helpers.bounds import assert_as_exact
from tests.helpers.processors import PROCESSORS, library_for

library = native()
pytestmark = pytest.mark.skipif(library is None, reason="there is no C++ compiler")

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 64, 16


def ops() -> CpuOps:
    assert library is not None
    return CpuOps(library)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [1, 5])
def test_norms(rows: int) -> None:
    """By themselves, and of what joins the stream."""
    norm = Norm(random(576, seed=1), 1e-5)
    x, stream = random(rows, 2 * 576)[:, :576], random(rows, 576, seed=2)
    wide = Norm(norm.weight.double(), norm.epsilon)
    plain, exact = Ops().norm(x, norm), Ops().norm(x.double(), wide)
    assert_as_exact(ops().norm(x, norm), plain, exact)
    got, kept = ops().add(x, stream, Join(norm))
    plain, residual = Ops().add(x, stream, Join(norm))
    assert kept.equal(residual)
    assert_as_exact(got, plain, Ops().norm(residual.double(), wide))


@pytest.mark.parametrize("rows", [1, 70])
def test_gates(rows: int) -> None:
    """Also of numbers whose exponential has no place in float32."""
    weight, x = random(2 * 960, 96, seed=1), random(rows, 96)
    x[0, 0], weight[0, 0], weight[1, 0] = 40, 100, -100
    linear, prefetch = DenseLinear(weight), DenseLinear(random(96, 960))
    gate, up = linear(x).double().chunk(2, dim=-1)
    plain = Ops().gated(linear, x, "silu", prefetch)
    exact = torch.nn.functional.silu(gate) * up
    assert_as_exact(ops().gated(linear, x, "silu", prefetch), plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_instructions(processor: str) -> None:
    """What processors without VNNI, AVX-512 and AVX2 compute, as exactly."""
    other = CpuOps(library_for(processor))
    for width, visibility in ((1, "causal"), (6, "causal"), (6, "full"), (6, "ancestors")):
        plain, exact = (
            attended(Ops(), dtype, width, visibility, normed=True)
            for dtype in (torch.bfloat16, torch.float64)
        )
        got = attended(other, torch.bfloat16, width, visibility, normed=True)
        assert_as_exact(got, plain, exact)


def attended(
    ops: Ops,
    dtype: torch.dtype,
    width: int,
    visibility: Any,
    normed: bool = False,
    beside: int = 0,
    dim: int = DIM,
) -> Tensor:
    """Rows of three requests, one of which has no context, and what they leave in the cache.

    `beside` them are as many numbers of something else.
    """
    lengths = torch.tensor([width + 37, width, width + 150], dtype=torch.int32)
    table = torch.randperm(3 * 12, generator=torch.Generator().manual_seed(3)).view(3, 12).int()
    spec = AttentionSpec(torch.device("cpu"), dtype, HEADS, KV_HEADS, dim, BLOCK)
    backend = TorchRefBackend(spec)
    cache = KVLayerSpec(KV_HEADS, dim).allocate(3 * 12, BLOCK, dtype, torch.device("cpu"))
    for number, side in enumerate(cache):
        side.copy_(random(*side.shape, seed=number + 5))
    places = (lengths[:, None] - width + torch.arange(width)).long()
    blocks = table.gather(1, places // BLOCK).long()
    slots = (blocks * BLOCK + places % BLOCK).flatten()
    metadata = AttentionMetadata.uniform(width, lengths, table, slots, max_seq_len=160)
    tree = None
    if visibility == "ancestors":
        above = [sum(1 << bit for bit in range(i % 2, i + 1, 2)) for i in range(width - 1)]
        tree = TreeRows(torch.tensor([0, *above]).repeat(3), torch.arange(width).repeat(3))
    metadata = replace(metadata, visibility=visibility, tree=tree)
    qkv = random(3 * width, HEADS + 2 * KV_HEADS, dim).to(dtype)
    qkv = torch.nn.functional.pad(qkv.flatten(1), (0, beside))[:, : qkv[0].numel()].view(qkv.shape)
    turns = torch.randn(3 * width, dim // 2, generator=torch.Generator().manual_seed(9))
    angles = Angles(turns.cos().bfloat16().to(dtype), turns.sin().bfloat16().to(dtype))
    prefetch = DenseLinear(torch.zeros(1, 1))
    norms = [Norm(random(dim, seed=seed).to(dtype), 1e-6) if normed else None for seed in (7, 8)]
    heads = Heads(dim**-0.5, query_norm=norms[0], key_norm=norms[1])
    plan = backend.plan(metadata)
    out = ops.attend(qkv, AttentionInputs(backend, heads, angles, cache, plan, prefetch))
    return torch.cat([out.flatten(), *(side.flatten() for side in cache)])


@pytest.mark.parametrize("visibility", ["causal", "full", "ancestors"])
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("normed", [False, True])
def test_attention(width: int, visibility: Any, normed: bool) -> None:
    """Chains, blocks whose rows see each other, and trees; what is written to the cache, too."""
    plain = attended(Ops(), torch.bfloat16, width, visibility, normed)
    exact = attended(Ops(), torch.float64, width, visibility, normed)
    assert_as_exact(attended(ops(), torch.bfloat16, width, visibility, normed), plain, exact)


def test_bits_of_a_row_do_not_depend_on_rows_after_it() -> None:
    """A token that is verified among drafts is the token that is decoded alone."""
    one, many = (attended(ops(), torch.bfloat16, width, "causal") for width in (1, 6))
    assert one[: HEADS * DIM].equal(many[: HEADS * DIM])


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_attention_of_other_widths(dim: int) -> None:
    """Of heads that are no multiple of what is summed at once, and of the widest."""
    kinds = torch.bfloat16, torch.float64
    plain, exact = (attended(Ops(), kind, 6, "causal", dim=dim) for kind in kinds)
    assert_as_exact(attended(ops(), torch.bfloat16, 6, "causal", dim=dim), plain, exact)


def test_attention_of_some_columns() -> None:
    """Of a product that has gates of the heads, too."""
    alone, some = (attended(ops(), torch.bfloat16, 6, "causal", beside=n) for n in (0, HEADS * DIM))
    assert some.equal(alone)


def test_other_types_are_left_to_torch() -> None:
    """Rows in float32, as a head that is computed so has them."""
    norm, x = Norm(random(96, seed=1).float(), 1e-5), random(3, 96).float()
    assert ops().norm(x, norm).equal(Ops().norm(x, norm))
    linear, prefetch = DenseLinear(random(192, 96, seed=1).float()), DenseLinear(random(96, 96))
    expected = Ops().gated(linear, x, "silu", prefetch)
    assert ops().gated(linear, x, "silu", prefetch).equal(expected)


@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_that_are_written(normed: bool) -> None:
    """Of rows of several layers, as drafters have them; beside them the cache stays as it was."""
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, HEADS, KV_HEADS, DIM, BLOCK)
    backend, rows = TorchRefBackend(spec), random(5, 3, 2, KV_HEADS, DIM)
    turns = torch.randn(5, DIM // 2, generator=torch.Generator().manual_seed(9))
    slots, norm = torch.tensor([40, 3, 17, 16, 63]), Norm(random(DIM, seed=7), 1e-6)

    def written(ops: Ops, dtype: torch.dtype) -> Tensor:
        cache = KVLayerSpec(KV_HEADS, DIM).allocate(4, BLOCK, dtype, torch.device("cpu"))
        for number, side in enumerate(cache):
            side.copy_(random(*side.shape, seed=number + 5))
        key, value = rows[:, 1, 0].to(dtype), rows[:, 1, 1].to(dtype)
        if dtype == torch.bfloat16:
            key, value = rows[:, 1, 0], rows[:, 1, 1]
        angles = Angles(turns.cos().bfloat16().to(dtype), turns.sin().bfloat16().to(dtype))
        own = Norm(norm.weight.to(dtype), norm.epsilon) if normed else None
        ops.write(backend, key, value, own, angles, cache, slots)
        return torch.cat([side.flatten() for side in cache])

    plain, exact = written(Ops(), torch.bfloat16), written(Ops(), torch.float64)
    got = written(ops(), torch.bfloat16)
    assert_as_exact(got, plain, exact)
    untouched = torch.ones(2, 4 * BLOCK, dtype=torch.bool).index_fill_(1, slots, False)
    same = got.view(2, 4 * BLOCK, -1)[untouched].equal(plain.view(2, 4 * BLOCK, -1)[untouched])
    assert same and got.view(2, 4 * BLOCK, -1)[1].equal(plain.view(2, 4 * BLOCK, -1)[1])
