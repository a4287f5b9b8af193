"""Kernels around attention against plain torch, and whole tiny models on them; see
`tests.helpers.triton_interpreter`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionMetadata, AttentionSpec
from specdec.attention.selector import select_backend
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kv_cache import KVLayerSpec, LayerCache
from specdec.layers.experts.joined import JoinedExperts
from specdec.layers.experts.router import Router
from specdec.layers.experts.routing import Experts, Routing
from specdec.layers.linear import DenseLinear
from specdec.layers.mlp import GatedMLP, MixtureOfExperts
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Join, Ops
from specdec.layers.packed.linear import PackedLinear
from specdec.layers.packed.weight import PackedWeight
from specdec.layers.rotary.rotary import Angles, rotate
from tests.helpers.bounds import assert_as_exact
from tests.helpers.pairs import pairs
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.kernels import triton_prefetch  # noqa: E402 (only where Triton can run)
from specdec.kernels.triton_launch import num_processors, overlap_options  # noqa: E402
from specdec.kernels.triton_norm import add_rms_norm, rms_norm  # noqa: E402
from specdec.kernels.triton_prefetch import hint_options, prefetch_programs  # noqa: E402
from specdec.kernels.triton_rope import rope_store  # noqa: E402
from specdec.layers.experts.triton_experts import FEW_ROWS  # noqa: E402
from specdec.layers.ops.kernels import TritonOps  # noqa: E402
from specdec.layers.ops.triton_activation import gated as triton_gated  # noqa: E402
from specdec.layers.ops.triton_embedding import embed  # noqa: E402
from specdec.layers.triton_linear import divide, few_rows  # noqa: E402


def transformers_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Computed in float32 at least, rounded, then weighted."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


def check(got: Tensor, formula: Callable[..., Tensor], *inputs: Tensor | None) -> None:
    """`got` is as exact as a formula of plain torch in the type of these inputs."""
    assert_as_exact(
        got, formula(*inputs), formula(*(x if x is None else x.double() for x in inputs))
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_joined_experts(gated: bool) -> None:
    """Routed experts and what is shared at once, as exact as one after the other; more rows than
    that product takes have two.
    """
    torch.manual_seed(0)

    def linear(*shape: int) -> DenseLinear:
        return DenseLinear(random(*shape) / shape[-1] ** 0.5)

    router = Router(linear(9, 24), Routing(9, 3))
    experts = Experts(random(9, 32, 24), random(9, 24, 16), "silu")
    mlp, gate = GatedMLP(linear(64, 24), linear(24, 32)), linear(1, 24) if gated else None
    joined = JoinedExperts.of(router, experts, mlp, gate)
    assert joined is not None and joined.shared.count == 2
    layer = MixtureOfExperts(router, experts, mlp, gate, joined=joined)
    weights = [
        router.gate.weight,  # type: ignore[attr-defined]
        mlp.gate_up.weight,  # type: ignore[attr-defined]
        mlp.down.weight,  # type: ignore[attr-defined]
        *([] if gate is None else [gate.weight]),
    ]

    def formula(x: Tensor, *weights: Tensor) -> Tensor:
        chooses, gate_up, down, *gates = (DenseLinear(weight) for weight in weights)
        shared, shared_gate = GatedMLP(gate_up, down), gates[0] if gates else None
        plain = MixtureOfExperts(
            Router(chooses, router.routing), experts.to(x.dtype), shared, shared_gate
        )
        return plain(Ops(), x, x, Join(None), None)[1]

    ops = TritonOps(DEVICE, torch.float32, mixes=True)
    for rows in (1, 7, FEW_ROWS + 1):
        x = random(rows, 24)
        assert (ops.joined_experts(joined, x) is None) == (rows > FEW_ROWS)
        check(layer(ops, x, x, Join(None), None)[1], formula, x, *weights)


def test_what_is_not_joined() -> None:
    """Layers with biases, of other widths, types or activations."""
    router, gate_up, down = (DenseLinear(random(*shape)) for shape in ((9, 24), (64, 24), (24, 32)))
    experts = Experts(random(9, 32, 24), random(9, 24, 16), "silu")
    of = partial(JoinedExperts.of, Router(router, Routing(9, 3)))
    assert of(experts, GatedMLP(gate_up, down), None) is not None
    biased = DenseLinear(down.weight, random(24))
    for mlp in (
        GatedMLP(gate_up, down, "gelu"),
        GatedMLP(gate_up, biased),
        GatedMLP(gate_up, DenseLinear(down.weight.half())),
    ):
        assert of(experts, mlp, None) is None
    assert (
        of(experts, GatedMLP(DenseLinear(random(40, 24)), DenseLinear(random(24, 20))), None)
        is None
    )
    assert (
        of(
            Experts(experts.gate_up, experts.down, "silu", random(9, 32)),
            GatedMLP(gate_up, down),
            None,
        )
        is None
    )
    assert of(experts, GatedMLP(gate_up, down), DenseLinear(random(1, 24), random(1))) is None


@pytest.mark.parametrize("width", [48, 576, 5])
def test_norm_and_residual(width: int) -> None:
    """Any width; the input may be a view; the sum is what the norm sees."""
    torch.manual_seed(0)
    x, residual, weight = random(7, width + 3)[:, :width], random(7, width), random(width)
    norm = partial(transformers_norm, epsilon=1e-3)
    check(rms_norm(x, weight, 1e-3), norm, x, weight)
    normed, added = add_rms_norm(x, residual, weight, 1e-3)
    assert added.equal(x + residual)
    check(normed, norm, added, weight)


def test_norm_rounds_as_transformers() -> None:
    """In half precision the normed value is rounded before its weight, and the norm sees the
    rounded sum.
    """
    torch.manual_seed(0)
    x, residual, weight = (
        random(*shape, dtype=torch.float16) for shape in ((64, 96), (64, 96), (96,))
    )
    normed, added = add_rms_norm(x, residual, weight, 1e-6)
    assert added.equal(x + residual)
    # a sum in another order may round elsewhere
    assert (normed == transformers_norm(added, weight, 1e-6)).float().mean() > 0.995


@pytest.mark.parametrize(("late", "parts", "normed"), pairs([False, True], [1, 3], [True, False]))
def test_what_joins_the_residual_stream(late: bool, parts: int, normed: bool) -> None:
    """A norm of the sublayer's output, factors of it and of the sum, no norm of the sum, weights
    that round late: as plain torch has it."""
    torch.manual_seed(0)
    x = random(parts, 7, 96) if parts > 1 else random(7, 96, dtype=torch.float16)
    residual, gains = (
        random(7, 96, dtype=torch.float16),
        random(2, 96, dtype=torch.float32 if late else torch.float16),
    )
    norm, after = (Norm(gain, 1e-3) for gain in gains)
    scale = 1.0 if normed else 0.7
    factor = torch.tensor([0.8], dtype=torch.float16, device=DEVICE) if late else None
    join = Join(norm if normed else None, after, scale, factor)
    ours, plain = (
        TritonOps(DEVICE, torch.float16).add(x, residual, join),
        Ops().add(x, residual, join),
    )
    wide_norm, wide_after = (Norm(gain.double(), 1e-3) for gain in gains)
    wide = Join(
        wide_norm if normed else None,
        wide_after,
        scale,
        None if factor is None else factor.double(),
    )
    exact = Ops().add(x.double(), residual.double(), wide)
    for got, expected, true in zip(ours, plain, exact, strict=True):
        assert_as_exact(got, expected, true)
    assert (ours[0] is ours[1]) == (not normed)


def gated_product(joined: Tensor) -> Tensor:
    """The second half, gated by the first."""
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("width", [48, 1536])
def test_swiglu(width: int) -> None:
    """Gate is the first half of the joined product."""
    torch.manual_seed(0)
    joined = random(5, 2 * width) * 3
    check(triton_gated(joined, "silu"), gated_product, joined)


@pytest.mark.parametrize("parts", [2, 3])
def test_norm_adds_up_parts(parts: int) -> None:
    """A product that was split has the norm of the whole one, rounded as that would be."""
    torch.manual_seed(0)
    x, residual, weight = (
        random(parts, 5, 96),
        random(5, 96, dtype=torch.float16),
        random(96, dtype=torch.float16),
    )
    whole = x.sum(0).to(torch.float16)
    for got, expected in zip(
        add_rms_norm(x, residual, weight, 1e-6),
        add_rms_norm(whole, residual, weight, 1e-6),
        strict=True,
    ):
        assert (got == expected).float().mean() > 0.99


@pytest.mark.parametrize(
    ("width", "inputs", "how", "rows", "biased"),
    [
        (width, inputs, how, [1, 5, 33][(i + j) % 3], (i + j) % 2 == 0)
        for i, (width, inputs) in enumerate([(64, 192), (960, 576), (128, 1536)])
        for j, how in enumerate(["plain", "gated", "split"])
    ],
)
def test_product_of_few_rows(width: int, inputs: int, how: str, rows: int, biased: bool) -> None:
    """Split sums are those of the whole product with one bias, rounded once; a row's bits do not
    depend on the rows beside it.
    """
    torch.manual_seed(0)
    gated = how == "gated"
    options: dict[str, Any] = {"activation": "silu" if gated else None, "may_split": how == "split"}
    x = random(rows, inputs + 8, dtype=torch.float16)[:, :inputs]
    weight = random(width * (1 + gated), inputs, dtype=torch.float16) / inputs**0.5
    bias = random(width * (1 + gated), dtype=torch.float16) if biased else None
    got = few_rows(x, weight, bias, **options)
    assert got is not None and (
        got.ndim == 3 or how != "split" or divide_splits(width, inputs) == 1
    )
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    exact = gated_product(exact) if gated else exact
    whole = got.sum(0) if got.ndim == 3 else got
    assert_as_exact(whole.half(), exact.half(), exact)
    alone = few_rows(x[:1], weight, bias, **options)
    assert alone is not None and alone[..., 0, :].equal(got[..., 0, :])


def divide_splits(width: int, inputs: int) -> int:
    """Parts in which the product comes."""
    plan = divide(width, inputs, gated=False, may_split=True, processors=num_processors(DEVICE))
    assert plan is not None
    return plan.splits


@pytest.mark.parametrize("width", [5, 576, 2500])
def test_embedding(width: int) -> None:
    """Any width, ids of any shape and strides, rows of a wider table, the last of them too."""
    torch.manual_seed(0)
    table = random(9, width + 3, dtype=torch.float16)[:, :width]
    token_ids = torch.tensor([[8, 0, 3], [3, 5, 8]], device=DEVICE)
    for ids in (token_ids, token_ids.T, token_ids[0, :1], token_ids[:, 1:].expand(2, 2)):
        assert embed(ids, table).equal(F.embedding(ids, table))


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights up to the limit, of half bytes the beginning of larger ones, where chips take hints;
    every byte is some thread's.
    """
    weights = [random(rows, 1024, dtype=torch.float16) for rows in (4096, 4097)]
    assert DenseLinear(weights[0]).prefetchable is None or overlap_options(DEVICE)["OVERLAP"]
    monkeypatch.setattr(triton_prefetch, "overlap_options", lambda device: {"OVERLAP": True})
    small, large = map(DenseLinear, weights)
    assert small.prefetchable is small.weight and large.prefetchable is None
    codes, scale = (
        torch.zeros(9000, 1024, dtype=torch.uint8, device=DEVICE),
        torch.ones(9000, 8, dtype=torch.float16, device=DEVICE),
    )
    halves = PackedLinear(PackedWeight(codes, scale, None, 256, "int4", torch.float16))
    whole = PackedLinear(
        PackedWeight(codes.view(torch.int8), scale, None, 128, "int8", torch.float16)
    )
    assert halves.prefetchable is not None and halves.prefetchable.nbytes == 8 * 2**20
    assert whole._has_kernels and whole.prefetchable is None
    assert hint_options(small.weight) == {"prefetch": small.weight, "PREFETCH": 8 * 2**20}
    assert (
        prefetch_programs(small.weight, 4),
        prefetch_programs(large.weight, 4),
        prefetch_programs(large.weight, 8),
        prefetch_programs(None, 4),
    ) == (64, 65, 33, 0)


def test_products_that_are_torchs() -> None:
    """Many rows, float32, and shapes that the tiles do not divide are left alone."""
    half = random(16, 64, dtype=torch.float16)
    assert few_rows(random(65, 64, dtype=torch.float16), half) is None
    assert few_rows(random(2, 64), half.float()) is None
    assert few_rows(half[:2, :48], half[:, :48].contiguous()) is None
    assert few_rows(half[:2], half[:8]) is None


def normed_and_rotated(rows: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None) -> Tensor:
    """What rows become before attention."""
    rows = rows if norm is None else transformers_norm(rows, norm, 1e-5)
    return rotate(rows, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


@pytest.mark.parametrize(
    ("head_dim", "normed", "with_query"), pairs([8, 64, 80], [True, False], [True, False])
)
def test_rope_with_cache_write(head_dim: int, normed: bool, with_query: bool) -> None:
    """Views of a joined product; keys and values land in their slots and nowhere else; values are
    neither normed nor rotated.
    """
    torch.manual_seed(0)
    num_tokens, heads, kv_heads = 5, 3, 2
    query, key, value = random(num_tokens, heads + 2 * kv_heads, head_dim).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    angles = random(num_tokens, 1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    query_norm, key_norm = (random(head_dim), random(head_dim)) if normed else (None, None)
    cache = KVLayerSpec(kv_heads, head_dim).allocate(4, 4, torch.float32, DEVICE)
    slots = torch.tensor([4, 9, 5, 15, 7], device=DEVICE)
    rotated = rope_store(
        query if with_query else None,
        key,
        value,
        cache,
        slots,
        cos=cos[:, 0],
        sin=sin[:, 0],
        query_norm=query_norm,
        key_norm=key_norm,
        epsilon=1e-5,
    )
    if with_query:
        check(rotated, normed_and_rotated, query, cos, sin, query_norm)
    else:
        assert rotated.numel() == 0
    keys, values = (tensor.flatten(0, 1) for tensor in cache)
    check(keys[slots], normed_and_rotated, key, cos, sin, key_norm)
    assert values[slots].equal(value)
    others = [slot for slot in range(16) if slot not in slots.tolist()]
    assert not keys[others].any() and not values[others].any()


@pytest.mark.parametrize(("stored", "width"), [(2, 16), (1, 16), (1, 20), (0, 20)])
def test_attention_on_values_of_other_kinds(stored: int, width: int) -> None:
    """Values that are normed, that are the keys, and that another layer has written: as plain torch
    has it.
    """
    torch.manual_seed(0)
    spec = AttentionSpec(DEVICE, torch.float32, 4, 2, width, block_size=4, reads_others=True)
    qkv, gains, angles = random(3, 4 + 2 * stored, width), random(3, width), random(3, width // 2)
    norms = [Norm(gain, 1e-5) for gain in gains]
    heads = Heads(
        0.3,
        query_norm=norms[0],
        key_norm=norms[1] if stored else None,
        value_norm=norms[2] if stored else None,
    )
    table, slots = (
        torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE),
        torch.tensor([11, 4, 5], device=DEVICE),
    )
    metadata = AttentionMetadata.packed([3], [6], table, slots)

    def attend(ops: Any, backend: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(1)
        cache = LayerCache(*(torch.randn(3, 4, 2, width).to(DEVICE, dtype) for _ in "kv"))
        own: dict[str, Any] = {
            name: Norm(one.weight.to(dtype), 1e-5)
            for name, one in heads._asdict().items()
            if isinstance(one, Norm)
        }
        turned = Angles(angles.to(dtype).cos(), angles.to(dtype).sin())
        plan, prefetch = backend.plan(metadata), DenseLinear(torch.zeros(1, 1))
        inputs = AttentionInputs(backend, heads._replace(**own), turned, cache, plan, prefetch)
        out: Tensor = ops.attend(qkv.to(dtype), inputs)
        return torch.cat([out.flatten(), *(tensor.flatten() for tensor in cache)])

    plain, exact = (
        attend(Ops(), TorchRefBackend(replace(spec, dtype=kind)), kind)
        for kind in (torch.float32, torch.float64)
    )
    assert_as_exact(
        attend(TritonOps(DEVICE, torch.float32), TritonFaBackend(spec), torch.float32), plain, exact
    )


@pytest.mark.parametrize("backend", ["triton_fa", "torch_ref"])
def test_rope_before_a_write(backend: str) -> None:
    """With the write in it where the cache is ours; another backend writes its cache itself, from
    rotated rows.
    """
    torch.manual_seed(0)
    spec = AttentionSpec(DEVICE, torch.float32, 2, 2, 16, block_size=4)
    key, value = random(5, 4, 16).split(2, dim=1)
    angles, norm = random(5, 1, 8), random(16)
    cos, sin = angles.cos(), angles.sin()
    cache = KVLayerSpec(2, 16).allocate(4, 4, torch.float32, DEVICE)
    slots = torch.tensor([4, 9, 5, 15, 7], device=DEVICE)
    ops = TritonOps(DEVICE, torch.float32)
    ops.write(
        select_backend(backend, spec),
        key,
        value,
        Norm(norm, 1e-5),
        Angles(cos[:, 0], sin[:, 0]),
        cache,
        slots,
    )
    keys, values = (tensor.flatten(0, 1)[slots] for tensor in cache)
    check(keys, normed_and_rotated, key, cos, sin, norm)
    assert values.equal(value)
