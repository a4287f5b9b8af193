"""Single calls of AITER's Triton kernels and their right answers, for `tests.checks.aiter_triton`.

Attention on the plain layout goes through `rocm_aiter_fa`. The shuffled layout has no backend where
AITER's compiled kernels are missing, so there rows are stored in plain torch and our call of the
kernel is made by itself. `fp8_mqa_logits` scores the rows of a prefill for the indexer;
`fused_qk_rope_reshape_and_cache` rotates rows and writes a cache in either layout.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
from torch import Tensor

from specdec.attention.aiter import fa_triton
from specdec.attention.aiter.fa import CDNA, RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.fa_triton import Layer, Rows, Setup
from specdec.attention.aiter.groups import plan_packed
from specdec.attention.aiter.layout import Layout, read_rows, shuffled
from specdec.attention.aiter.scratch import Scratch
from specdec.kernels import aiter, aiter_triton_only
from specdec.kv_cache import KVLayerSpec, LayerCache, PagedKVCache, blocks_for
from specdec.layers.aiter.kernels import AiterLayers
from specdec.layers.rotary.rotary import Angles, rotate
from tests.helpers.attention_case import Case, attention, spec
from tests.helpers.trees import random_trees

LENGTHS = [37, 5, 64]
LONG = 1000
"""A bound on the lengths, over the 512 from which AITER splits the keys over several programs."""
SPLIT_HEAD_DIMS = (64, 256)

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
WIDE = 128
"""Wider heads in float32, which no model has on AITER, would not fit a GPU's shared memory."""

SPLITS_FLOAT16 = (0, 1, 17)
"""Before it, `unified_attention` refuses float16 where it splits the keys."""

UNIFIED, KVCACHE, LOGITS = "unified_attention", "flash_attn_with_kvcache", "fp8_mqa_logits"
ROPE = "fused_qk_rope_reshape_and_cache"


class Outcome(NamedTuple):
    """What a kernel returned, and how it was reached."""

    got: Tensor
    plain: Tensor
    exact: Tensor


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        kernel: AITER's function that has to be called.
        about: layout or kind, one row of the table together with the head size.
        head_dim: head size.
        what: the rest of it.
        dtype: of the rows.
        run: makes it.
        refused: our backend refuses the head size, since AITER gets it wrong.
    """

    kernel: str
    about: str
    head_dim: int
    what: str
    dtype: torch.dtype
    run: Callable[[], Outcome]
    refused: bool = False

    @property
    def row(self) -> str:
        """Where it counts in the table."""
        return f"{self.kernel + ', ' + self.about:<44} heads of {self.head_dim:>3}"


@dataclass(frozen=True)
class Setting:
    """What to call, and where.

    Attributes:
        device: a GPU, or a CPU for the interpreter.
        every: of the calls on ordinary heads, only every n-th.
        version: of the sources.
        architecture: to pretend in the interpreter.
    """

    device: torch.device
    every: int
    version: str
    architecture: str

    @property
    def scores(self) -> bool:
        """Whether `fp8_mqa_logits` runs: on CDNA it is Gluon, or has 8-bit floats that the
        interpreter does not know.
        """
        return self.device.type != "cpu" or self.architecture not in CDNA


def calls(setting: Setting) -> Iterator[Call]:
    """All of them, the same in every process."""
    device = setting.device
    # the interpreter multiplies the bits of bfloat16
    half = torch.float16 if device.type == "cpu" else torch.bfloat16
    plain = itertools.product(
        [torch.float32, half], [(4, 2), (9, 3)], [1, 4, 16], [True, False], [None, 9, 40]
    )
    for dtype, heads, rows, causal, window in itertools.islice(plain, 0, None, setting.every):
        yield _attention(device, dtype, 64, rows, window, causal=causal, heads=heads)
    for dtype, extra in ((torch.float32, "no extras"), (half, "sinks"), (torch.float32, "softcap")):
        yield _mixed(device, dtype, extra)
    for dim in HEAD_DIMS:
        wide = half if dim > WIDE else torch.float32
        for dtype, rows, window in ((half, 1, None), (wide, 4, 9)):
            if dim != 64:
                yield _attention(device, dtype, dim, rows, window)
            yield _attention(device, dtype, dim, rows, window, shuffle=True)
        for dtype, rows, window in ((half, 4, 9), (wide, 16, None)) if dim != 64 else ():
            yield _attention(device, dtype, dim, rows, window, causal=False)
    if half == torch.bfloat16 or aiter.version_numbers(setting.version) >= SPLITS_FLOAT16:
        for dim, (shuffle, rows) in itertools.product(
            SPLIT_HEAD_DIMS, ((False, 1), (False, 4), (True, 4))
        ):
            yield _attention(device, half, dim, rows, None, split=True, shuffle=shuffle)
    for dim in SPLIT_HEAD_DIMS:
        yield _attention(device, half, dim, 4, None, causal=False, split=True)
    for dtype, rows in ((torch.float32, 17), (half, 4)):
        yield _attention(device, dtype, 64, rows, None, trees=True)
    yield from (
        _rope(device, layout, many)
        for layout, many in itertools.product(get_args(Layout), (False, True))
    )
    if setting.scores:
        yield from (_logits(device, keys) for keys in (40, 300))


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    window: int | None,
    *,
    causal: bool = True,
    heads: tuple[int, int] = (4, 2),
    split: bool = False,
    shuffle: bool = False,
    trees: bool = False,
) -> Call:
    """As many rows of each request, on lengths that only the device knows."""
    lengths = [600, 16] if split else [max(length, rows) for length in LENGTHS]
    asked = spec(
        device=device, dtype=dtype, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim
    )
    refused = shuffle and any(
        reason.startswith("head size")
        for reason in RocmAiterFaShuffleBackend.unsupported_reasons(asked)
    )
    kind = "shuffled" if shuffle else "trees" if trees else "plain" if causal else "blocks"
    what = (
        f"{rows:>2} rows, heads {heads[0]}/{heads[1]}, window"
        f" {window or '-'}{', keys split' if split else ''}"
    )

    def run() -> Outcome:
        case = Case(
            asked,
            lengths,
            [rows] * len(lengths),
            uniform=True,
            causal=causal,
            trees=random_trees(len(lengths) * trees, rows - 1),
        )
        if split:
            case.metadata = replace(
                case.metadata, max_seq_len=LONG, block_table=_wider(case.metadata.block_table)
            )
        how: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}
        got = (
            _attend_shuffled(case, **how)
            if shuffle
            else case.attend(RocmAiterFaBackend(asked), **how)
        )
        return _outcome(case, got, **how)

    return Call(
        KVCACHE if trees or (not causal and rows > 1) else UNIFIED,
        kind,
        head_dim,
        what,
        dtype,
        run,
        refused,
    )


def _mixed(device: torch.device, dtype: torch.dtype, extra: str) -> Call:
    """Prefill, extend and decode together."""
    asked = spec(device=device, dtype=dtype)

    def run() -> Outcome:
        how: dict[str, Any] = {"scale": 0.125}
        if extra != "no extras":
            how[extra] = 0.7 if extra == "softcap" else torch.randn(4).to(device)
        case = Case(asked, [40, 17, 35, 33, 50], [3, 17, 1, 33, 20], uniform=False)
        return _outcome(case, case.attend(RocmAiterFaBackend(asked), **how), **how)

    return Call(UNIFIED, "plain", 64, f"prefill, extend and decode, {extra}", dtype, run)


def _outcome(case: Case, got: Tensor, **how: Any) -> Outcome:
    """Beside the right answer: in float32 the plain computation, of 16 bits the right answer
    rounded.
    """
    exact = case.exact(**how)
    if got.dtype == torch.float32:
        return Outcome(
            got,
            attention(
                case.query,
                case.filled(),
                case.metadata,
                dtype=torch.float32,
                trees=case.trees,
                **how,
            ),
            exact,
        )
    return Outcome(got, exact.to(got.dtype), exact)


def _wider(table: Tensor) -> Tensor:
    """The same block table for requests of up to `LONG` tokens."""
    return torch.cat(
        [table, table[:, :1].expand(-1, blocks_for(LONG, 16) - table.shape[1])], dim=1
    ).contiguous()


def _attend_shuffled(case: Case, *, scale: float, window: int | None) -> Tensor:
    """Our call of `unified_attention` on a shuffled cache; two blocks more, as it reads past heads
    of unlucky sizes.
    """
    asked = case.spec
    blocks = PagedKVCache(
        [KVLayerSpec(asked.num_kv_heads, asked.head_dim)],
        num_blocks=case.num_blocks + 2,
        block_size=asked.block_size,
        dtype=asked.kv_dtype,
        device=asked.device,
    )
    cache = blocks.layers[0]
    for rows, slots in ((case.old, case.old_slots), (case.new, case.metadata.slot_mapping)):
        _write_shuffled(cache, rows["key"], rows["value"], slots)
    setup = Setup(asked, "shuffle", aiter_triton_only.load(), Scratch(asked.device))
    (group,) = plan_packed(case.metadata, asked.block_size).groups
    return fa_triton.unified(
        setup, group, Layer(cache, scale, window), Rows(case.query, **case.new)
    )


def _write_shuffled(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Stores rows [n, num_kv_heads, head_dim] at `slots`, as AITER's own writer does where it is
    built.
    """
    views, size = shuffled(cache), cache.key.shape[1]
    blocks, offsets, x = slots // size, slots % size, views.key.shape[-1]
    views.key[blocks, :, :, offsets] = key.unflatten(-1, (-1, x))
    views.value[blocks, :, offsets // x, :, offsets % x] = value


def _logits(device: torch.device, num_keys: int) -> Call:
    """Scores of rows that see runs of keys: weights times what is positive of the products, added
    over the heads.
    """
    fp8, heads, dim, num_rows = torch.float8_e4m3fn, 32, 128, 5

    def run() -> Outcome:
        function: Any = import_module("aiter.ops.triton.attention.fp8_mqa_logits").fp8_mqa_logits
        aiter_triton_only.load()  # its kernel is launched with AMD's options, too
        torch.default_generator.manual_seed(0)
        # Small whole numbers: some GPUs add up products of 8 bits in less than float32.
        query, keys = (
            torch.randint(-2, 3, shape).float().to(fp8)
            for shape in ((num_rows, heads, dim), (num_keys, dim))
        )
        scales, weights = torch.rand(num_keys) + 0.5, torch.randn(num_rows, heads)
        starts = torch.tensor([0, 0, 3, 17, num_keys // 2], dtype=torch.int32)
        ends = torch.tensor([1, num_keys, 20, 18, num_keys], dtype=torch.int32)
        got: Tensor = function(
            Q=query.to(device),
            KV=keys.to(device),
            kv_scales=scales.to(device),
            weights=weights.to(device),
            cu_starts=starts.to(device),
            cu_ends=ends.to(device),
            clean_logits=True,
        ).cpu()
        columns = torch.arange(num_keys)
        seen = (columns >= starts[:, None]) & (columns < ends[:, None])
        assert bool((got[~seen] == -torch.inf).all()), "a key outside a row's run has a score"
        plain, exact = (
            _scores(query, keys, scales, weights, dtype)[seen]
            for dtype in (torch.float32, torch.float64)
        )
        return Outcome(got[seen], plain, exact)

    return Call(LOGITS, "prefill", dim, f"{num_rows} rows, {num_keys} keys", torch.float32, run)


def _rope(device: torch.device, layout: Layout, many: bool) -> Call:
    """Rotated queries and keys, and what the cache holds of keys and values; as `many` rows have
    it, several heads at a time.
    """
    num_rows, heads, kv_heads, dim, size = 5, 8, 2, 64, 16
    # of which the interpreter multiplies the bits
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def run() -> Outcome:
        home: Any = import_module("aiter.ops.triton.fusions.fused_kv_cache")
        compiled = dict.fromkeys(
            ("rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add", "silu_and_mul", "gelu_tanh_and_mul"),
            _not_here,
        )
        functions: dict[str, Any] = {**compiled, ROPE: getattr(home, ROPE)}
        kernels = AiterLayers(aiter.version_numbers(aiter.installed_version() or ""), **functions)
        torch.default_generator.manual_seed(0)
        rows, turns = (
            torch.randn(num_rows, heads + 2 * kv_heads, dim).to(dtype),
            torch.randn(num_rows, dim // 2),
        )
        angles, num_blocks = (
            Angles(turns.cos().to(dtype), turns.sin().to(dtype)),
            blocks_for(num_rows, size) + 2,
        )
        slots = torch.randperm(num_blocks * size)[:num_rows]
        cache = KVLayerSpec(kv_heads, dim).allocate(num_blocks, size, dtype, device)
        there, wide = (
            Angles(angles.cos.to(kind), angles.sin.to(kind)) for kind in (device, torch.float64)
        )
        query, key, value = rows.to(device).split([heads, kv_heads, kv_heads], dim=1)
        # It takes this type, too: float32 is for the interpreter alone. And what it counts as many
        # rows; old ones count none.
        changes: dict[str, Any] = {"e4m3_dtype": dtype, "_BLOCK_H_MIN_TOKENS": 1 if many else 128}
        with mock.patch.multiple(home, create=True, **changes):
            query, key = kernels.rotate_and_store(
                query,
                key,
                value,
                shuffled(cache) if layout == "shuffle" else cache,
                slots.to(device),
                there.row_index,
                there.cos,
                there.sin,
            )
        stored = read_rows(cache, slots.to(device), layout, dtype)
        got = torch.cat([part.cpu() for part in (query, key, *stored)], dim=1)
        given = rows.split([heads + kv_heads, kv_heads], dim=1)

        def wanted(numbers: tuple[Tensor, ...], turned: Angles) -> Tensor:
            rotated = rotate(numbers[0], *turned.doubled)
            return torch.cat([rotated, rotated[:, heads:], numbers[1]], dim=1)

        return Outcome(
            got, wanted(given, angles), wanted(tuple(part.double() for part in given), wide)
        )

    return Call(ROPE, layout, dim, f"{'many' if many else 'few'} rows", dtype, run)


def _not_here(**arguments: Any) -> None:
    raise NotImplementedError("AITER's compiled kernels are not here")


def _scores(
    query: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    query, keys, scales, weights = (tensor.to(dtype) for tensor in (query, keys, scales, weights))
    products = query.new_zeros(len(query), query.shape[1], len(keys))
    for i in range(keys.shape[1]):  # term by term, the order in which errors grow most
        products += query[:, :, i, None] * keys[None, None, :, i]
    total = products.new_zeros(len(query), len(keys))
    for head in range(query.shape[1]):
        total += weights[:, head, None] * (products[:, head] * scales).clamp(min=0)
    return total
