"""What AITER's kernels of ordinary heads are called with: scratch, views, scales, layouts, and
which kernel is taken.
"""

import dataclasses
from typing import Any

import pytest
import torch

from specdec.attention.aiter import fa_routes
from specdec.attention.aiter.groups import plan_groups
from specdec.attention.aiter.layout import shuffled
from specdec.attention.selector import select_backend
from specdec.base.errors import BackendError
from specdec.cli.doctor.doctor import ENVIRONMENT
from specdec.kernels.aiter import AiterFa
from specdec.kv_cache import LayerCache
from tests.helpers.aiter_emulation import paged
from tests.helpers.attention_case import Case, spec
from tests.helpers.fa_case import (
    BACKENDS,
    SHAPES,
    assert_right,
    case_of,
    spied,
)
from tests.helpers.rocm import FP8, Install

KERNELS = [field.name for field in dataclasses.fields(AiterFa) if field.name != "version"]
ROWS = {"q", "k", "v", "query", "key", "value", "out", "out_"}
"""What AITER calls packed rows; some of its functions a cache, which is dense, too."""


@pytest.mark.parametrize("fp8", [False, True])
def test_e1_scratch_and_views_of_the_paged_kernel(rocm: Install, fp8: bool) -> None:
    """A part per 256 keys of the longest sequence; keys and values in five dimensions, 16 bytes at
    a time.
    """
    rocm()
    asked = spec(head_dim=128, cache_dtype=FP8["gfx942"] if fp8 else None)
    backend = BACKENDS["shuffle"](asked)
    calls = spied(backend, "paged_attention_common")
    for longest, parts in ((254, 1), (255, 2), (600, 3)):  # the host's bound is two more
        case = Case(asked, [longest, 40, 3], [1, 1, 1], uniform=True)
        assert_right(case, backend, scale=128**-0.5)
        arguments = calls.pop()
        assert arguments["exp_sums"].shape == arguments["max_logits"].shape == (3, 4, parts)
        assert arguments["tmp_out"].shape == (3, 4, parts, 128)
        x = 16 if fp8 else 8
        assert arguments["K"].shape == (case.num_blocks, 2, 128 // x, 16, x)
        assert arguments["V"].shape == (case.num_blocks, 2, 16 // x, 128, x)


@pytest.mark.parametrize(("num_compute_units", "assembly"), [(304, False), (4, True)])
def test_e2_both_kinds_of_scales_are_given(
    rocm: Install, num_compute_units: int, assembly: bool
) -> None:
    """AITER chooses the kernel: HIP reads one number, assembly a table per slot and head, where a
    single number faults.
    """
    machine = rocm(num_compute_units=num_compute_units)
    asked = spec(head_dim=128, cache_dtype=FP8["gfx942"])
    backend, case = (
        BACKENDS["shuffle"](asked),
        Case(asked, [40, 17, 33, 20] * 4, [1] * 16, uniform=True),
    )
    calls = spied(backend, "paged_attention_common")
    assert_right(case, backend, scale=128**-0.5)
    (arguments,) = calls
    for side in "KV":
        single, table = arguments[f"{side}_QScale_hip"], arguments[f"{side}_QScale_asm"]
        assert single.tolist() == [1] and table.shape == (case.num_blocks, 2, 16)
        assert table.dtype == torch.float32 and table.is_contiguous() and bool((table == 1).all())
    assert ("pa_fwd_asm" in machine.names()) == assembly


def test_e3_the_shuffled_layout_is_taken_by_name_and_refused_before_work(rocm: Install) -> None:
    """Never by `auto`; what it cannot do is an error when it is chosen, with every reason, and not
    one in a forward.
    """
    rocm()
    assert select_backend("auto", spec()).name == "rocm_aiter_fa"
    with pytest.raises(BackendError, match=r"blocks of 4 tokens.*; head size 8 "):
        select_backend("rocm_aiter_fa_shuffle", spec(block_size=4, head_dim=8))


@pytest.mark.parametrize(
    ("changes", "scale", "assembly"),
    [
        ({"head_dim": 128}, 128**-0.5, True),
        ({"head_dim": 128}, 0.05, False),
        ({"head_dim": 128, "block_size": 32}, 128**-0.5, False),
        ({"head_dim": 64}, 128**-0.5, False),
        ({"head_dim": 256}, 128**-0.5, False),
    ],
)
def test_e4_assembly_gets_only_what_it_is_built_for(
    rocm: Install, changes: dict[str, Any], scale: float, assembly: bool
) -> None:
    """With as many rows as bring the assembly kernel into play: other heads, blocks and scales stay
    with HIP.
    """
    machine = rocm(num_compute_units=4)
    asked = spec(**changes)
    case = Case(asked, [40, 17, 33, 20] * 4, [1] * 16, uniform=True)
    assert_right(case, BACKENDS["shuffle"](asked), scale=scale)
    assert ("pa_fwd_asm" in machine.names()) == assembly
    assert ("paged_attention_rocm" in machine.names()) != assembly
    # which, before 0.1.12, sends other heads to assembly
    assert ("paged_attention_common" in machine.names()) == assembly


@pytest.mark.parametrize(
    ("architecture", "heads", "assembly"),
    [("gfx942", 16, True), ("gfx950", 8, True), ("gfx950", 9, False), ("gfx950", 16, False)],
)
def test_e4_wide_groups_in_8_bits_stay_with_hip_on_gfx950(
    rocm: Install, architecture: str, heads: int, assembly: bool
) -> None:
    """There the assembly kernel yields NaN for contexts of 241 to 255 tokens."""
    machine = rocm(architecture=architecture, num_compute_units=4)
    cache = FP8[architecture]
    asked = spec(head_dim=128, num_heads=heads, num_kv_heads=1, cache_dtype=cache)
    case = Case(asked, [241, 255, 40], [1] * 3, uniform=True)
    assert_right(case, BACKENDS["shuffle"](asked), scale=128**-0.5)
    assert ("pa_fwd_asm" in machine.names()) == assembly
    wide = spec(head_dim=128, num_heads=heads, num_kv_heads=1)  # in 16 bits all of them do
    case = Case(wide, [241, 255, 40], [1] * 3, uniform=True)
    assert_right(case, BACKENDS["shuffle"](wide), scale=128**-0.5)
    assert "pa_fwd_asm" in machine.names()


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_heads_that_the_paged_kernels_do_not_sum_whole(rocm: Install, head_dim: int) -> None:
    """They go by 64 numbers at a time."""
    machine = rocm()
    case = case_of("single", head_dim=head_dim)
    assert_right(case, BACKENDS["plain"](case.spec), scale=0.1)
    assert "unified_attention" in machine.names()


@pytest.mark.parametrize("spare", [0, 1])
def test_e4_caches_whose_blocks_assembly_cannot_tell_apart_stay_with_hip(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """It cuts the number of a block to 16 bits; here, to as many as the cache has, or one fewer."""
    machine = rocm(num_compute_units=1)
    asked = spec(head_dim=128)
    case = Case(asked, [40, 17], [1, 1], uniform=True)
    for module in (fa_routes, paged):
        assert module.ASSEMBLY_BLOCKS == 65_536
        monkeypatch.setattr(module, "ASSEMBLY_BLOCKS", case.num_blocks - spare)
    assert_right(case, BACKENDS["shuffle"](asked), scale=128**-0.5)
    assert ("pa_fwd_asm" in machine.names()) == (spare == 0)


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize("known", [[1, 1], [1, 5]])
def test_prompts_of_one_token_decode(rocm: Install, layout: str, known: list[int]) -> None:
    """`flash_attn_varlen_func`, which takes longer ones, is wrong for single rows in some sizes of
    head and types.
    """
    machine = rocm()
    case = Case(spec(), known, known, uniform=False)
    assert_right(case, BACKENDS[layout](case.spec), scale=0.1)
    phases = {"decode", *(["prefill"] if known[1] > 1 else [])}
    assert {group.phase for group in plan_groups(case.metadata, 16).groups} == phases
    varlen = [call for call in machine.calls if call.name == "flash_attn_varlen_func"]
    assert len(varlen) == (known[1] > 1)


def test_e5_a_name_is_enough(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the environment has to agree with the option."""
    rocm()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    case = case_of("single")
    backend = select_backend("rocm_aiter_fa_shuffle", case.spec)
    assert isinstance(backend, BACKENDS["shuffle"])
    assert_right(case, backend, scale=0.1)


@pytest.mark.parametrize(
    ("shape", "changes", "how"),
    [
        ("single", {"head_dim": 256}, {"scale": 256**-0.5}),  # wide heads
        ("block", {}, {"scale": 0.1}),  # the rows of a verification
        ("single", {"head_dim": 128}, {"scale": 0.3}),  # a scale of the model's own
        ("extend", {}, {"scale": 0.1, "window": 9}),  # a chunk whose window is gathered
        ("single", {}, {"scale": 0.1, "window": 9}),
    ],
)
def test_e6_what_the_shuffled_kernels_lack_runs_elsewhere(
    rocm: Install, shape: str, changes: dict[str, Any], how: dict[str, Any]
) -> None:
    """Each of these has given wrong output, or none, where the shuffled layout was only an option
    of the plain one.
    """
    rocm(num_compute_units=1)
    case = case_of(shape, **changes)
    assert_right(case, BACKENDS["shuffle"](case.spec), **how)


def test_e6_shuffled_views_are_the_cache_itself() -> None:
    """A copy would take the writes and lose them: a cache whose blocks are no views of that shape
    is an error.
    """
    key, value = torch.zeros(2, 3, 16, 2, 64, dtype=torch.bfloat16)
    views = shuffled(LayerCache(key, value))
    assert [view.data_ptr() for view in views] == [key.data_ptr(), value.data_ptr()]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        shuffled(LayerCache(key.transpose(1, 2), value.transpose(1, 2)))


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_cut_from_a_packed_product(
    rocm: Install, layout: str, shape: str, causal: bool
) -> None:
    """Kernels are given dense rows, whatever those lay in, and the answer is that for dense rows,
    bit by bit.
    """
    rocm()
    lengths, widths, uniform = SHAPES[shape]
    dense, packed = (
        Case(spec(), lengths, widths, uniform=uniform, causal=causal, packed=packed)
        for packed in (False, True)
    )
    assert not any(rows.is_contiguous() for rows in (packed.query, *packed.new.values()))
    backend = BACKENDS[layout](dense.spec)
    want = dense.attend(backend, scale=0.1)
    calls = [call for name in KERNELS for call in [spied(backend, name)]]
    assert torch.equal(packed.attend(backend, scale=0.1), want)
    given = [
        (name, rows)
        for seen in calls
        for call in seen
        for name, rows in call.items()
        if name.lower() in ROWS
    ]
    assert len(given) >= 2 * 2 + 1  # the writer twice, and a kernel
    assert [name for name, rows in given if not rows.is_contiguous()] == []


@pytest.mark.parametrize("layout", ["plain", "shuffle"])
@pytest.mark.parametrize(
    ("lengths", "widths", "causal"),
    [([254, 40, 3], [1, 1, 1], True), ([40, 33], [5, 5], False), ([40, 9], [40, 3], True)],
)
def test_a_layer_that_keeps_its_own_type_beside_an_8_bit_cache(
    rocm: Install, layout: str, lengths: list[int], widths: list[int], causal: bool
) -> None:
    """The same bits as without 8 bits, for every phase; catches a layer that is read or written as
    those beside it, and a case in which nothing would be lost.
    """
    rocm()
    uniform = len(set(widths)) == 1
    own, eight = spec(head_dim=128), spec(head_dim=128, cache_dtype=FP8["gfx942"])
    case = Case(own, lengths, widths, uniform=uniform, causal=causal)
    case.new["key"] += 300  # more than 8 bits hold
    backend = BACKENDS[layout](eight)
    want, got = (case.attend(one, scale=0.01) for one in (BACKENDS[layout](own), backend))
    assert torch.equal(got, want)
    assert backend.mixes_cache_types
    other = Case(eight, lengths, widths, uniform=uniform, causal=causal)
    other.new, other.old, other.query = case.new, case.old, case.query
    assert not torch.equal(other.attend(backend, scale=0.01), want)
