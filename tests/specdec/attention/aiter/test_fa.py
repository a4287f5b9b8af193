"""The AITER backends on the emulation: every kernel within its limits, whole generations equal to
torch_ref, nothing waits.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafters.ngram import NGramDrafter
from specdec.attention.aiter import groups
from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.fa_triton import Layer, Rows, kvcache
from specdec.attention.aiter.layout import read_blocks, read_rows
from specdec.attention.selector import select_backend
from specdec.base.errors import BackendError
from specdec.kv_cache import blocks_for
from tests.helpers.aiter_generation import generate, wide_dflash
from tests.helpers.attention_case import Case, spec
from tests.helpers.fa_case import (
    BACKENDS,
    SHAPES,
    added,
    model_of,
    on,
    replace_head_dim,
)
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.helpers.pairs import pairs
from tests.helpers.rocm import FP8, Install
from tests.helpers.tiny_configs import CONFIGS, WINDOW
from tests.helpers.tiny_models import paged_verifier
from verifiers.config.shape import attention_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME


@pytest.mark.parametrize(
    ("layout", "shape", "window", "extra"),
    pairs([*BACKENDS], [*SHAPES], [None, 1, 9, 100], ["", "blocks", "sinks", "softcap", "both"]),
)  # the rest is refused, as test_refusals shows
def test_every_case_equals_torch_ref(
    rocm: Install, layout: str, shape: str, window: int | None, extra: str
) -> None:
    """Each phase alone and all mixed, in float32: wrong rows, windows off by one, lost context, the
    wrong layout.
    """
    causal = extra != "blocks"
    machine = rocm(tiny=True)
    asked = spec(dtype=torch.float32)
    case = Case(asked, *SHAPES[shape][:2], uniform=SHAPES[shape][2], causal=causal)
    sinks = torch.randn(4) if extra in ("sinks", "both") else None
    how: dict[str, Any] = {
        "scale": 0.2,
        "window": window,
        "softcap": 0.7 if extra in ("softcap", "both") else None,
        "sinks": sinks,
    }
    got = case.attend(BACKENDS[layout](asked), layers=2, **how)
    case.check(got, added=added(machine), **how)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("no_keys", [(0.0, -torch.inf), (0.0, torch.inf), (torch.nan, torch.inf)])
def test_context_in_chunks(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, chunk: int, no_keys: tuple[float, float]
) -> None:
    """Context longer than the workspace is merged chunk by chunk, also when some requests run out
    of it first.

    Whatever a kernel writes for the rows of those.
    """
    monkeypatch.setattr(groups, "CONTEXT_TOKENS", chunk)
    machine = rocm(tiny=True, no_keys=no_keys)
    case = Case(spec(dtype=torch.float32), [40, 9, 33], [3, 2, 17], uniform=False)
    case.check(case.attend(RocmAiterFaBackend(case.spec), scale=0.2), scale=0.2)
    count = sum(call.name == "flash_attn_varlen_func" for call in machine.calls)
    assert count == 1 + blocks_for(37, max(1, chunk // 3))


LIMITS = pairs(
    [128, 16, 64, 80, 96, 256],
    [1, 4],
    [None, 1, 9],
    [True, False],
    [(2, 16), (2, 32), (20, 16), (3, 16)],
)
"""Head size, rows, window, causality, and group with block size."""


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("architecture", "dtype"), [("gfx942", torch.bfloat16), ("gfx950", torch.float16)]
)
@pytest.mark.parametrize("layout", BACKENDS)
def test_e3_no_combination_reaches_a_kernel_that_lacks_it(
    rocm: Install, layout: str, architecture: str, dtype: torch.dtype, fp8: bool
) -> None:
    """Head size, rows, window, causality, group and block size, scale, sinks, softcap, on both
    sides of the assembly limit.

    The emulation raises wherever a kernel has no such case, so an answer at all is the point; it
    must also be the right one. All pairs of the sizes occur; whether the host knows the lengths,
    sinks and softcap are drawn.
    """
    compute_units = 4
    machine = rocm(architecture=architecture, num_compute_units=compute_units)
    draw = random.Random(f"{layout} {architecture} {fp8}")
    for head_dim, rows, window, causal, (group, size) in LIMITS:
        asked = spec(
            dtype=dtype,
            head_dim=head_dim,
            num_kv_heads=2,
            num_heads=2 * group,
            block_size=size,
            cache_dtype=FP8[architecture] if fp8 else None,
            non_causal=not causal,
        )
        if layout == "shuffle" and head_dim in (80, 96):
            assert len(BACKENDS[layout].unsupported_reasons(asked)) == 1
            continue
        assert BACKENDS[layout].unsupported_reasons(asked) == []
        backend = BACKENDS[layout](asked)
        for many, scale in itertools.product(
            [False, True] if rows == 1 else [False], [head_dim**-0.5, 0.05]
        ):
            lengths = [33, rows + 1, 20] * (2 if many else 1)
            case = Case(
                asked, lengths, [rows] * len(lengths), uniform=draw.random() < 0.5, causal=causal
            )
            how: dict[str, Any] = {"scale": scale, "window": window}
            if causal and not many:
                how |= draw.choice([{}, {"sinks": torch.randn(2 * group)}, {"softcap": 3.0}])
            case.check(case.attend(backend, **how), **how)
    names = machine.names()
    assert names >= {"unified_attention", "flash_attn_varlen_func", "flash_attn_with_kvcache"}
    if layout == "plain":
        assert names >= {"paged_attention_v1", "reshape_and_cache_flash"}
    else:
        assert names >= {
            "paged_attention_common",
            "paged_attention_rocm",
            "pa_fwd_asm",
            "reshape_and_cache",
        }


def test_phases(rocm: Install) -> None:
    """A single row behind a context decodes also within a prefill; lengths unknown to the host mean
    decoding.
    """
    rocm()
    lengths, widths, _ = SHAPES["mixed"]
    backend = RocmAiterFaBackend(spec())
    groups = backend.plan(Case(spec(), lengths, widths, uniform=False).metadata).groups
    assert {g.phase: g.query_lens for g in groups} == {
        "extend": [3, 20],
        "prefill": [17, 33],
        "decode": [1],
    }
    assert [
        g.phase for g in backend.plan(Case(spec(), [3, 3], [3, 3], uniform=True).metadata).groups
    ] == ["decode"]


SINKS = torch.zeros(4)
DECISIONS: list[tuple[str, bool, dict[str, Any], dict[str, Any], str, str]] = [
    ("prefill", True, {}, {"window": 9, "sinks": SINKS}, "unified", "unified"),
    ("prefill", True, {}, {"window": 9, "softcap": 5.0}, "varlen", "varlen"),
    ("extend", True, {}, {"window": 9, "sinks": SINKS}, "unified", "unified"),
    ("extend", True, {}, {"window": 9}, "windowed_varlen", "windowed_varlen"),
    ("extend", True, {}, {}, "chunked_varlen", "chunked_varlen"),
    ("block", True, {}, {"window": 9}, "unified", "unified"),
    ("block", False, {}, {"window": 9}, "kvcache", "gathered_kvcache"),
    (
        "block",
        False,
        {"cache_dtype": torch.float8_e4m3fnuz},
        {},
        "gathered_kvcache",
        "gathered_kvcache",
    ),
    ("single", True, {}, {"sinks": SINKS}, "unified", "unified"),
    ("single", True, {"head_dim": 32}, {}, "unified", "unified"),
    ("single", True, {"num_heads": 40}, {}, "unified", "unified"),
    ("single", False, {}, {"window": 9}, "paged_v1", "unified"),
    ("single", True, {}, {"softcap": 5.0}, "paged_v1", "unified"),
    ("single", False, {}, {}, "paged_v1", "paged_rocm"),
    ("single", True, {"head_dim": 128}, {"scale": 128**-0.5}, "paged_v1", "paged_common"),
    ("single", True, {"head_dim": 128}, {"scale": 0.1}, "paged_v1", "paged_rocm"),
    (
        "single",
        True,
        {"head_dim": 128, "block_size": 32},
        {"scale": 128**-0.5},
        "paged_v1",
        "paged_rocm",
    ),
]
"""Rows, causality, shape and layer, then the kernel on each layout: docs/rocm-kernels.md has it."""


@pytest.mark.parametrize(("shape", "causal", "changes", "how", "plain", "shuffle"), DECISIONS)
def test_b3_decision_table(
    rocm: Install,
    shape: str,
    causal: bool,
    changes: dict[str, Any],
    how: dict[str, Any],
    plain: str,
    shuffle: str,
) -> None:
    """The fastest kernel that has the case, not merely one that has it."""
    rocm()
    lengths, widths, uniform = SHAPES[shape]
    case = Case(spec(**changes), lengths, widths, uniform=uniform, causal=causal)
    for backend, want in (
        (RocmAiterFaBackend(case.spec), plain),
        (RocmAiterFaShuffleBackend(case.spec), shuffle),
    ):
        group = max(backend.plan(case.metadata).groups, key=lambda g: g.phase == shape)
        assert backend.kernel(group, Layer(case.cache(), **{"scale": 0.2, **how})).__name__ == want


def test_b7_windows_of_blocks_keep_their_right_side(rocm: Install) -> None:
    """A right window of 0 would make a bidirectional block causal."""
    machine = rocm()
    case = Case(spec(), [40, 30], [5, 5], uniform=True, causal=False)
    case.attend(RocmAiterFaBackend(case.spec), scale=0.1, window=9)
    windows = [c.details["window"] for c in machine.calls if c.name == "flash_attn_with_kvcache"]
    assert windows == [(8, 8)]


def test_layouts_read_back_what_was_written(rocm: Install) -> None:
    """Rows and whole blocks of both layouts, and of 8-bit caches, give back keys and values."""
    rocm()
    for layout, fp8 in itertools.product(BACKENDS, [False, True]):
        asked = spec(cache_dtype=FP8["gfx942"] if fp8 else None)
        case = Case(asked, [40], [40], uniform=False)
        cache, backend = case.cache(), BACKENDS[layout](asked)
        # which 8 bits do not hold exactly
        new = {name: torch.randn_like(rows) for name, rows in case.new.items()}
        backend.write(cache, slot_mapping=case.metadata.slot_mapping, **new)
        rows = read_rows(cache, case.metadata.slot_mapping, backend.layout, torch.float32)
        blocks = read_blocks(cache, case.metadata.block_table[:, :3], backend.layout)
        for want, row, block in zip(new.values(), rows, blocks, strict=True):
            want = want.to(asked.kv_dtype).float()
            torch.testing.assert_close(row, want, atol=0, rtol=0)
            torch.testing.assert_close(block[0, :40].float(), want, atol=0, rtol=0)


def test_eight_bit_writes_saturate(rocm: Install) -> None:
    """AITER's writer converts without saturating, and the emulation raises when it has to."""
    rocm()
    asked = spec(cache_dtype=FP8["gfx942"])
    backend, case = RocmAiterFaBackend(asked), Case(asked, [3], [3], uniform=False)
    cache = case.cache()
    huge = torch.full_like(case.new["key"], 1e4)
    backend.write(cache, huge, -huge, case.metadata.slot_mapping)
    key, value = read_rows(cache, case.metadata.slot_mapping, "plain", torch.float32)
    assert key.unique().item() == 240 and value.unique().item() == -240


def test_e6_scratch_keeps_its_address(rocm: Install) -> None:
    """Captured graphs use the same buffers as the plain call before them, whatever batches come
    between.
    """
    machine = rocm()
    backend = RocmAiterFaBackend(spec())
    small, large = (Case(spec(), [40] * n, [1] * n, uniform=True) for n in (2, 9))
    small.attend(backend, scale=0.1)
    kept = dict(backend._setup.scratch._buffers)
    large.attend(backend, scale=0.1)
    machine.capturing = True
    with no_host_sync():
        backend.plan(small.metadata)
    small.attend(backend, scale=0.1)
    assert kept and all(
        backend._setup.scratch._buffers.get(key) is buffer for key, buffer in kept.items()
    )


@pytest.mark.parametrize(
    ("version", "architecture", "backend", "changes", "reasons"),
    [
        ("0.1.20", "gfx90a", "plain", {}, ["architecture gfx90a"]),
        ("0.1.15", "gfx942", "plain", {}, []),
        (
            "0.1.15",
            "gfx942",
            "plain",
            {"non_causal": True},
            ["non-causal blocks need amd-aiter 0.1.16"],
        ),
        ("0.1.15", "gfx942", "shuffle", {}, ["shuffled layout needs amd-aiter 0.1.16"]),
        ("0.1.16", "gfx950", "shuffle", {"non_causal": True}, []),
        (
            "0.1.20",
            "gfx942",
            "shuffle",
            {"head_dim": 80},
            ["head size 80 (of the shuffled layout AITER reads powers of two"],
        ),
        (
            "0.1.20",
            "gfx942",
            "shuffle",
            {"head_dim": 40},
            ["head size 40 (the kernels take multiples of 16"],
        ),
        ("0.1.20", "gfx942", "shuffle", {"head_dim": 32}, []),
        ("0.1.20", "gfx942", "plain", {"head_dim": 80}, []),
        (
            "0.1.20",
            "gfx942",
            "plain",
            {"reads_others": True},
            ["layers that read the cache of other layers"],
        ),
        (
            "0.1.15",
            "gfx942",
            "plain",
            {"dtype": torch.float16},
            ["a float16 cache needs amd-aiter 0.1.17; bfloat16 does not"],
        ),
        (
            "0.1.16",
            "gfx950",
            "shuffle",
            {"dtype": torch.float16},
            ["a float16 cache needs amd-aiter 0.1.17"],
        ),
        (
            "0.1.16",
            "gfx950",
            "plain",
            {"dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn},
            [],
        ),
        ("0.1.20", "gfx942", "plain", {"dtype": torch.float16}, []),
        (
            "0.1.20",
            "gfx942",
            "plain",
            {"non_causal": True, "sinks": True, "softcap": 5.0},
            ["with sinks", "with a softcap"],
        ),
        (
            "0.1.20",
            "gfx942",
            "plain",
            {"dtype": torch.float32, "block_size": 4, "head_dim": 8},
            ["float32", "blocks of 4", "size 8"],
        ),
        (
            "0.1.20",
            "gfx950",
            "plain",
            {"cache_dtype": torch.float8_e4m3fnuz},
            ["gfx950 computes with torch.float8_e4m3fn"],
        ),
        ("0.1.20", "gfx942", "plain", {"num_heads": 5}, ["5 query heads do not share 2"]),
    ],
)
def test_refusals(
    rocm: Install,
    version: str,
    architecture: str,
    backend: str,
    changes: dict[str, Any],
    reasons: list[str],
) -> None:
    """Every limit is said before work starts, and all at once."""
    rocm(version=version, architecture=architecture)
    found = BACKENDS[backend].unsupported_reasons(spec(**changes))
    assert len(found) == len(reasons), found
    for want, got in zip(reasons, found, strict=True):
        assert want in got


def test_selection(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` takes AITER where it runs, and says what else it left out; a name means that or an
    error.
    """
    with pytest.raises(
        BackendError, match="'rocm_aiter_fa' cannot serve this model: cpu is not a ROCm device"
    ):
        select_backend("rocm_aiter_fa", spec())
    rocm()
    assert select_backend("auto", spec()).name == "rocm_aiter_fa"
    assert select_backend("rocm_aiter_fa_shuffle", spec()).name == "rocm_aiter_fa_shuffle"
    caplog.set_level("INFO")
    assert select_backend("auto", spec(block_size=4)).name == "torch_ref"
    assert "blocks of 4 tokens" in caplog.text


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "plain"),
        ("qwen3", "shuffle"),
        ("gpt_oss", "plain"),
        ("gemma3", "shuffle"),
        ("gemma2", "plain"),
    ],
)  # the others are in test_generation
@pytest.mark.slow
def test_whole_generations_equal_torch_ref(rocm: Install, name: str, layout: str) -> None:
    """Token for token in float32, plain, with n-gram and with DFlash drafts, and nothing waits
    between draft and commit.
    """
    machine = rocm(tiny=True)
    model = model_of(name, head_dim=128 if name == "qwen3" else 64)
    reference = paged_verifier(model, block_size=16)
    want = generate(reference, None)
    for make in (lambda v: None, lambda v: NGramDrafter(max_draft_tokens=4), wide_dflash):
        verifier = on(BACKENDS[layout], model)
        assert generate(verifier, make(verifier), guard=True) == want
    assert "flash_attn_with_kvcache" in machine.names()


@pytest.mark.parametrize("layout", BACKENDS)
def test_generation_with_an_eight_bit_cache(rocm: Install, layout: str) -> None:
    """bfloat16 rows on an 8-bit cache: drafts and plain decoding read the same cache, and nothing
    waits.
    """
    rocm(architecture="gfx950")
    torch.manual_seed(0)
    config = replace_head_dim(CONFIGS["llama"]())
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
    ).eval()
    asked = attention_spec(config, device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16)
    backend = BACKENDS[layout](replace(asked, cache_dtype=FP8["gfx950"]))
    verifier = verifier_for(model, name="llama", backend=backend)
    outputs = generate(verifier, wide_dflash(verifier), guard=True)
    assert all(len(output) == 8 or output[-1] == 2 for output in outputs)


@pytest.mark.parametrize("window", [None, 9])
def test_a5_known_lengths_are_not_read_back(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """A prefill of all phases takes its lengths from the host's lists and copies nothing from the
    device.
    """
    rocm()
    case = Case(spec(), *SHAPES["mixed"][:2], uniform=False)
    backend = RocmAiterFaBackend(case.spec)

    def refuse(*_: Any) -> Any:
        raise HostSyncError("read back")

    for name in ("item", "cpu", "tolist", "numpy", "nonzero", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    case.attend(backend, scale=0.1, window=window)


def test_b7_old_aiter_waits_and_is_caught(rocm: Install) -> None:
    """The draft kernel before 0.1.16 reads lengths on the host; the refusal of such versions is
    what keeps it out of a step.
    """
    rocm(version="0.1.15")
    case = Case(spec(), [40, 30], [5, 5], uniform=True, causal=False)
    backend = RocmAiterFaBackend(case.spec)
    with pytest.raises(HostSyncError), no_host_sync():
        group, layer, rows = (
            backend.plan(case.metadata).groups[0],
            Layer(case.cache(), 0.1, WINDOW),
            Rows(case.query, **case.new),
        )
        kvcache(backend._setup, group, layer, rows)
