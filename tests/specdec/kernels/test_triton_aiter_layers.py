"""AITER's layers on a pretended AMD machine: taken by name alone, after their check; tokens are
those of plain torch.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.backend import AttentionMetadata, AttentionSpec
from specdec.attention.selector import select_backend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.base.config import EngineConfig
from specdec.device import self_check
from specdec.engine.engine import SpecEngine
from specdec.kernels.kernel import check_all
from specdec.kv_cache import KVLayerSpec
from specdec.layers.aiter import check as aiter_layers
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Join
from specdec.layers.rotary.rotary import Angles
from tests.helpers.aiter_emulation.signatures import VERSIONS
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()
if DEVICE.type != "cpu":
    pytest.skip(
        "this machine's own GPU is no AMD GPU; make check interprets this file",
        allow_module_level=True,
    )

from specdec.layers.aiter.ops import AiterOps  # noqa: E402 (only where Triton can run)
from specdec.layers.ops.kernels import TritonOps  # noqa: E402
from tests.specdec.kernels.test_triton_amd import (  # noqa: E402
    LIMITS,
    MODEL,  # noqa: F401
    Amd,
    Run,
    expected,  # noqa: F401
    generate,
    verdicts,
)

BESIDE = "fused_layers,embedding,-experts,-few_rows,-captured_step,-argmax,-sampler"
"""What else is taken and left out, so that only the layers under test are checked."""
WRITERS = {"reshape_and_cache", "reshape_and_cache_flash"}
ROPE = "fused_qk_rope_reshape_and_cache"
NORMS = {"rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add"}


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Amd]:
    """See `Amd`; the emulation takes float32 throughout."""
    monkeypatch.setattr(aiter_layers, "STORED_DTYPES", (torch.float32, torch.bfloat16))
    yield Amd(monkeypatch, tmp_path)
    for said in (aiter_layers._stays_out, aiter_layers.keep_ours):
        said.cache_clear()


def named(amd: Amd, *more: str) -> None:
    """Asks for them."""
    amd.patch.setenv("SPECDEC_KERNELS", ",".join(["aiter_layers", BESIDE, *more]))


@pytest.mark.parametrize(
    ("attention", "architecture", "version"),
    [("rocm_aiter_fa", "gfx950", "0.1.16"), ("rocm_aiter_fa_shuffle", "gfx942", "0.1.20")],
)
def test_generation(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],  # noqa: F811 (a fixture)
    attention: str,
    architecture: str,
    version: str,
) -> None:
    """Norms, activations and RoPE with the cache write are AITER's in the target; only a drafter's
    context is written apart.
    """
    machine = amd(architecture, version)
    amd.patch.setenv("SPECDEC_KERNELS", BESIDE)
    ours = Run(caplog, attention, drafts=True)
    assert not machine.names() & {*NORMS, ROPE, "silu_and_mul"} and machine.names() & WRITERS
    machine.calls.clear()
    named(amd)
    start = Run(caplog, attention, drafts=True)
    assert start.tokens == ours.tokens == expected and start.drafts == ours.drafts != []
    assert start.takes == (attention, True, False, False) and start.warnings == []
    assert verdicts() == {"aiter_layers-float32"}
    machine.calls.clear()
    dense: list[bool] = []

    def watch(function: Any, arguments: dict[str, Any], result: Any) -> None:
        if function.__name__ == "flash_attn_varlen_func":
            dense.append(all(arguments[name].is_contiguous() for name in "qkv"))

    machine.watch = watch
    alone = Run(caplog, attention)
    assert dense and all(dense), (
        "values are part of a joined product, which not every kernel may be able to walk"
    )
    assert (
        alone.tokens == expected
        and machine.names() >= {*NORMS, ROPE, "silu_and_mul"}
        and not machine.names() & WRITERS
    )
    assert {call.details["flash_layout"] for call in machine.calls if call.name == ROPE} == {
        attention == "rocm_aiter_fa"
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2", "mistral"])
def test_families(amd: Amd, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """What AITER has not stays ours: RoPE with norms of heads, sums that are normed before,
    experts; tokens are the same.
    """
    machine = amd()
    model = plain_model(name)
    plain = generate(SpecEngine(paged_verifier(model, 16), None, EngineConfig(**LIMITS)))
    named(amd)
    with caplog.at_level(logging.INFO):
        verifier: Any = paged_verifier(model, 16, backend=partial(select_backend, "rocm_aiter_fa"))
        assert isinstance(verifier._ops, AiterOps)
        machine.calls.clear()
        assert generate(SpecEngine(verifier, None, EngineConfig(**LIMITS))) == plain
    said = " | ".join(
        record.getMessage() for record in caplog.records if record.name == aiter_layers.__name__
    )
    assert (ROPE in machine.names()) == (name != "qwen3_moe") == ("RoPE norms no heads" not in said)
    assert (
        ("rmsnorm2d_fwd_with_add" in machine.names())
        == (name != "gemma2")
        == ("normed or scaled before" not in said)
    )
    assert "rmsnorm2d_fwd" in machine.names()
    activation = {"qwen3_moe": None, "gemma2": "gelu_tanh_and_mul", "mistral": "silu_and_mul"}[name]
    assert machine.names() & {"gelu_tanh_and_mul", "silu_and_mul"} == (
        {activation} if activation else set()
    )


def test_off_unless_named(amd: Amd, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` takes everything else on such a machine."""
    machine = amd()
    amd.patch.setenv("SPECDEC_KERNELS", "-experts,-captured_step,-argmax,-sampler")
    Run(caplog)
    assert "aiter_layers-float32" not in verdicts() and "fused_layers-float32" in verdicts()
    assert not machine.names() & {*NORMS, ROPE, "silu_and_mul"}
    amd.patch.setenv("SPECDEC_KERNELS", BESIDE + ",-aiter_layers")
    Run(caplog)
    assert not machine.names() & {*NORMS, ROPE, "silu_and_mul"}


@pytest.mark.parametrize(
    ("architecture", "version", "more", "reason"),
    [
        ("gfx942", None, [], "AITER is not installed"),
        ("gfx942", "0.1.14", [], "amd-aiter 0.1.14 is older than 0.1.15"),
        ("gfx1201", "0.1.20", [], "gfx1201 (AITER's compiled kernels are for gfx942 and gfx950)"),
        ("gfx942", "0.1.20", ["-fused_layers"], "there are none around rocm_aiter_fa"),
    ],
)
def test_what_keeps_them_out(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    version: str | None,
    more: list[str],
    reason: str,
) -> None:
    """One line for all layers of target and drafter; ours, or plain torch, run then."""
    check_all(DEVICE)  # of what comes behind the choice of tokens nothing is asked again
    machine = amd(architecture, "0.1.20" if version == "0.1.14" else version)
    if version == "0.1.14":
        amd.patch.setattr(aiter_layers.aiter, "installed_version", lambda: version)
    named(amd, *more)
    attention = "rocm_aiter_fa" if version == "0.1.20" else "triton_fa"
    amd.patch.setattr(
        self_check, "run", lambda check: pytest.fail("nothing is checked that cannot run")
    )
    start = Run(caplog, attention, drafts="-fused_layers" in more)
    (line,) = start.warnings
    assert line.startswith("aiter_layers is left out: ") and reason in line
    assert not machine.names() & NORMS


def test_triton_only(amd: Amd) -> None:
    """AITER without its compiled kernels has no norms."""
    amd()
    amd.patch.setenv("AITER_TRITON_ONLY", "1")
    (reason,) = aiter_layers.unsupported_reasons(DEVICE, torch.bfloat16)
    assert reason == "AITER_TRITON_ONLY=1 leaves out AITER's compiled kernels"


def test_types(amd: Amd) -> None:
    """As the real kernels have them."""
    amd()
    amd.patch.setattr(rocm_aiter_fa, "DTYPES", (torch.bfloat16, torch.float16))
    assert aiter_layers.unsupported_reasons(DEVICE, torch.bfloat16) == []
    (reason,) = aiter_layers.unsupported_reasons(DEVICE, torch.float32)
    assert reason == "dtype torch.float32 (the kernels take bfloat16 and float16)"


def test_a_check_that_fails(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],  # noqa: F811
) -> None:
    """One line, without advice that would not help; our own kernels run."""
    machine = amd()
    spoil(amd.patch, "silu_and_mul")
    named(amd)
    start = Run(caplog, "rocm_aiter_fa")
    (line,) = start.warnings
    assert (
        line.startswith("aiter_layers-float32 is left out")
        and "its error is" in line
        and "takes it all the same" not in line
    )
    machine.calls.clear()
    assert (
        Run(caplog, "rocm_aiter_fa").tokens == start.tokens == expected
        and not machine.names() & NORMS
    )


def spoil(patch: pytest.MonkeyPatch, name: str) -> None:
    """Makes a function of AITER write results that are a little off."""
    home: Any = import_module(
        "aiter.ops.triton.fusions.fused_kv_cache" if name == ROPE else "aiter"
    )
    kernel: Callable[..., Any] = getattr(home, name)

    def off(**arguments: Any) -> Any:
        result = kernel(**arguments)
        written: Tensor = (
            arguments["out"]
            if result is None
            else result
            if isinstance(result, Tensor)
            else result[0]
        )
        written *= 1.02
        return result

    if hasattr(kernel, "__signature__"):
        off.__signature__ = kernel.__signature__  # type: ignore[attr-defined]
    patch.setattr(home, name, off)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check(amd: Amd, version: str, architecture: str, dtype: torch.dtype) -> None:
    """Passes in half precision, also where AITER cuts off what torch rounds; notices each kernel
    that is off.
    """
    amd.patch.setattr(aiter_layers, "STORED_DTYPES", (torch.bfloat16,))
    amd(architecture, version)
    right = aiter_layers.check_aiter_layers(DEVICE, dtype)
    assert right.error <= right.bound
    for name in (
        *NORMS,
        "silu_and_mul",
        "gelu_tanh_and_mul",
        *([ROPE] if dtype == torch.bfloat16 else []),
    ):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, name)
            off = aiter_layers.check_aiter_layers(DEVICE, dtype)
            assert off.error > off.bound, name


@pytest.mark.parametrize(
    ("rows", "width", "late", "strided"),
    [(3, 96, True, False), (3, 92, False, False), (2, 8200, False, False), (3, 96, False, True)],
)
def test_norms_that_stay_ours(
    amd: Amd, caplog: pytest.LogCaptureFixture, rows: int, width: int, late: bool, strided: bool
) -> None:
    """Weights that round late, and rows that AITER's kernel cannot walk; said once, with the same
    bits as ever.
    """
    machine = amd()
    x = normal(rows, 2 * width)[:, :width] if strided else normal(rows, width)
    norm = Norm(normal(width).float() if late else normal(width), 1e-5)
    ops, ours = (kind(DEVICE, torch.bfloat16) for kind in (AiterOps, TritonOps))
    machine.calls.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert torch.equal(ops.norm(x, norm), ours.norm(x, norm))
    (line,) = (
        record.getMessage() for record in caplog.records if record.name == aiter_layers.__name__
    )
    assert (
        line.startswith("aiter_layers: a norm stays with our own kernels: ") and not machine.calls
    )


@pytest.mark.parametrize("kind", ["parts", "after", "scale", "no norm", "late", "another type"])
def test_sums_that_stay_ours(amd: Amd, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """What AITER's kernel would get wrong, or has no way to say."""
    caplog.set_level(logging.INFO, aiter_layers.__name__)
    machine = amd()
    x = (
        normal(2, 3, 96).float()
        if kind == "parts"
        else normal(3, 96).float()
        if kind == "another type"
        else normal(3, 96)
    )
    norm = Norm(normal(96).float() if kind == "late" else normal(96), 1e-5)
    join = Join(
        None if kind == "no norm" else norm,
        norm if kind == "after" else None,
        0.5 if kind == "scale" else 1.0,
    )
    ops, ours = (made(DEVICE, torch.bfloat16) for made in (AiterOps, TritonOps))
    machine.calls.clear()
    for got, wanted in zip(
        ops.add(x, normal(3, 96), join), ours.add(x, normal(3, 96), join), strict=True
    ):
        assert torch.equal(got, wanted)
    assert not machine.calls and ("left partial sums" in caplog.text) == (kind == "parts")
    ops.add(normal(3, 96), normal(3, 96), Join(Norm(normal(96), 1e-5)))
    assert machine.names() == {"rmsnorm2d_fwd_with_add"}


@pytest.mark.parametrize(
    ("activation", "width", "theirs"),
    [("silu", 48, True), ("gelu", 48, False), ("silu", 44, False)],
)
def test_activations(amd: Amd, activation: str, width: int, theirs: bool) -> None:
    """Two of them are AITER's; a product of few rows has its own in it."""
    machine = amd()
    ops, ours = (made(DEVICE, torch.bfloat16) for made in (AiterOps, TritonOps))
    joined = normal(3, 2 * width)
    machine.calls.clear()
    got = ops.activate(joined, activation)
    assert bool(machine.calls) == theirs and (
        theirs or torch.equal(got, ours.activate(joined, activation))
    )


@pytest.mark.parametrize(
    "kind", ["fits", "float16", "8-bit cache", "heads of 48", "no angles", "triton_fa"]
)
def test_cache_writes(amd: Amd, kind: str) -> None:
    """With the rotation where AITER's kernel has the case; the cache holds the same rows in any."""
    machine = amd("gfx950")
    dtype, dim = (
        {"float16": torch.float16, "8-bit cache": torch.bfloat16}.get(kind, torch.float32),
        48 if "48" in kind else 32,
    )
    cache_dtype = torch.float8_e4m3fn if kind == "8-bit cache" else None
    spec = AttentionSpec(DEVICE, dtype, 4, 2, dim, block_size=16, cache_dtype=cache_dtype)
    backend: Any = (TritonFaBackend if kind == "triton_fa" else RocmAiterFaBackend)(spec)
    batch = AttentionMetadata.packed(
        [5], [5], torch.tensor([[1, 2]], dtype=torch.int32), torch.arange(16, 21)
    )
    qkv, turns = normal(5, 8, dim).to(dtype), normal(5, dim // 2).float()
    angles = None if kind == "no angles" else Angles(turns.cos().to(dtype), turns.sin().to(dtype))
    found = []
    for made in (AiterOps, TritonOps):
        cache = KVLayerSpec(2, dim).allocate(4, 16, spec.kv_dtype, DEVICE)
        ops: Any = made(DEVICE, dtype)
        machine.calls.clear()
        inputs: Any = backend, Heads(scale=dim**-0.5), angles, cache, backend.plan(batch), None
        out = ops.attend(qkv, AttentionInputs(*inputs))
        found.append((out.float(), *(side.float() for side in cache)))
        assert (ROPE in machine.names()) == (kind == "fits" and made is AiterOps)
    assert found[0][1].any()
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def normal(*shape: int) -> Tensor:
    """Always the same random numbers for a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
