"""A pretended AMD machine: torch reports HIP, the emulation stands for AITER, kernels are
interpreted, graphs are launched again.

What `auto` takes there, and what it leaves out when a self-check fails; each time the tokens are
those of plain torch.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention import check
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.backend import AttentionSpec
from specdec.attention.selector import select_backend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import BackendError
from specdec.device import self_check
from specdec.device.deviation import Deviation
from specdec.engine import build
from specdec.engine.capture import capture as capturing
from specdec.engine.capture import graph_check
from specdec.engine.engine import SpecEngine
from specdec.layers.ops import fused
from specdec.layers.packed import check as packed_check
from specdec.layers.packed import linear as packed
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling import argmax, sampler
from specdec.sampling.params import SamplingParams
from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.engines import run_all
from tests.helpers.packed_weights import packed as packed_weight
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash
from tests.helpers.triton_interpreter import require_triton
from tests.specdec.kernels.test_triton_checks import wrong

DEVICE = require_triton()
if DEVICE.type != "cpu":
    pytest.skip(
        "this machine's own GPU is no AMD GPU; make check interprets this file",
        allow_module_level=True,
    )

from specdec.attention.triton import triton_attention  # noqa: E402
from specdec.kernels import triton_argmax  # noqa: E402
from specdec.layers import triton_linear  # noqa: E402
from specdec.layers.ops import kernels as triton_ops  # noqa: E402 (only where Triton can run)
from specdec.layers.ops import triton_activation, triton_embedding  # noqa: E402
from specdec.layers.packed import triton_packed  # noqa: E402
from specdec.sampling import triton_sampler  # noqa: E402

SHAPE = "4x2x16-blocks16"
"""Of the tiny model's heads."""
MODEL: dict[str, Any] = {"num_hidden_layers": 2}
LIMITS: dict[str, Any] = {"max_num_seqs": 2, "cache": CacheConfig(memory_bytes=2**21)}


class Repeat:
    """In the place of CUDA graphs."""

    replays = 0

    def __init__(self, device: torch.device) -> None:
        Repeat.replays = 0

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        launch()

        def replay() -> None:
            Repeat.replays += 1
            launch()

        return replay


class Stale(Repeat):
    """Graphs that do nothing when they are replayed."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        launch()
        return lambda: None


class Refusing(Repeat):
    """A device that captures nothing."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        raise BackendError(
            "cuda:0 cannot capture this model's step: operation not permitted; turn graphs off"
        )


def next_start() -> None:
    """Another process would know nothing; of what comes behind the choice of tokens nothing is
    asked again.
    """
    self_check._known.clear()
    for kernel in (argmax.KERNEL, sampler.KERNEL):
        kernel.forget()


class Amd:
    """Pretends an AMD GPU, with AITER of that version or without."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self._folder = patch, folder
        patch.setattr(capturing, "has_graphs", lambda device: True)
        for module in (capturing, build):
            patch.setattr(module, "CudaCapture", Repeat)
        patch.setattr(rocm_aiter_fa, "DTYPES", (torch.float32, *rocm_aiter_fa.DTYPES))
        # The interpreter takes its time: fewer requests, and no prefill padded to 128 rows.
        phases = check.Phase([21, 9], [3, 3]), check.Phase([21, 9], [3, 3], visibility="full")
        patch.setattr(check, "phases", lambda spec: phases)
        patch.setattr(graph_check, "PROMPTS", (3,))
        patch.setattr(graph_check, "MAX_TOKENS", 3)
        patch.setattr(TritonFaBackend, "captures_prefill", False)
        next_start()

    def __call__(self, architecture: str = "gfx942", aiter: str | None = "0.1.20") -> Machine:
        self.patch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
        shallow = aiter is not None and ".dev" in aiter
        if shallow:
            self.patch.setattr("specdec.kernels.aiter.installed_version", lambda: aiter)
        machine = Machine(
            version="0.1.20" if aiter is None or shallow else aiter,
            architecture=architecture,
            allow_float32=True,
            num_compute_units=8,
        )
        return install(self.patch, self._folder, machine) if aiter else machine


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """See `Amd`."""
    yield Amd(monkeypatch, tmp_path)
    next_start()


class Run:
    """A start.

    Attributes:
        takes: attention, and whether it takes fused layers, captured steps and the kernel of
            argmax.
        tokens: of a generation.
        drafts: of every step of it.
        warnings: that were logged.
    """

    def __init__(
        self,
        caplog: pytest.LogCaptureFixture,
        attention: str = "auto",
        *,
        drafts: bool = False,
        **config: Any,
    ) -> None:
        caplog.clear()
        next_start()
        with caplog.at_level(logging.INFO):
            verifier: Any = paged_verifier(
                plain_model("llama", **MODEL), 16, backend=partial(select_backend, attention)
            )
            drafter = (
                random_dflash(verifier, head_dim=16, block_size=3, taps=(0, 1)) if drafts else None
            )
            engine = SpecEngine(
                verifier,
                drafter,
                EngineConfig(num_draft_tokens=2 if drafts else 0, **LIMITS, **config),
            )
            self.drafts = recorded(engine)
            Repeat.replays, checked = 0, verdicts()
            self.tokens = generate(engine)
        assert verdicts() == checked, "no request waits for a check"
        users = [verifier, *([drafter.network] if drafter else [])]
        fused = [isinstance(user._ops, triton_ops.TritonOps) for user in users]
        assert len(set(fused)) == 1, "target and drafter take the same"
        self.captured = engine.runner.graphs is not None
        assert self.captured == (Repeat.replays > 0)
        self.takes = verifier.attention.name, fused[0], self.captured, argmax.KERNEL.runs_on(DEVICE)
        self.warnings = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]


def recorded(engine: SpecEngine) -> list[list[list[int]]]:
    """A list that every proposal of drafts will be added to."""
    drafts: list[list[list[int]]] = []
    bound: Any = engine.runner.drafter
    if bound is not None:
        propose = bound.propose

        def noted(batch: DecodeBatch) -> DraftOutput:
            drafts.append((output := propose(batch)).token_ids.tolist())
            return output

        bound.propose = noted
    return drafts


def generate(engine: SpecEngine) -> list[list[int]]:
    """Tokens of two requests."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return run_all(engine, ([5, 8, 3, 40], [7]), params)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Tokens of plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argmax.KERNEL, "runs_on", lambda device: False)
        return generate(
            SpecEngine(
                paged_verifier(plain_model("llama", **MODEL), 16), None, EngineConfig(**LIMITS)
            )
        )


def verdicts() -> set[str]:
    """Names of what has been checked."""
    return {path.stem for path in self_check.cache_folder().rglob("*.json")}


@pytest.mark.parametrize(
    ("architecture", "aiter", "attention"),
    [("gfx942", "0.1.20", "rocm_aiter_fa"), ("gfx1100", None, "triton_fa")],
)
def test_auto_takes_everything_that_passes(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[int]],
    architecture: str,
    aiter: str | None,
    attention: str,
) -> None:
    """The first start checks and warns of nothing; the second runs no check; tokens are those of
    plain torch.
    """
    amd(architecture, aiter)
    first = Run(caplog, drafts=True)
    assert first.takes == (attention, True, True, True)
    assert first.tokens == expected and first.warnings == []
    checked = {
        f"{attention}-float32-{SHAPE}",
        "argmax",
        "sampler",
        "embedding-float32",
        "fused_layers-float32",
        f"captured_step-{attention}",
    }
    # float32 has no product of few rows; what comes behind the choice is not asked
    assert verdicts() == checked
    monkeypatch.setattr(
        self_check, "run", lambda check: pytest.fail("a second start checks nothing")
    )
    second = Run(caplog)
    assert (second.takes, second.tokens, second.warnings) == (first.takes, expected, [])


def broken(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that the compiler refuses."""

    def call(*args: Any, **options: Any) -> Any:
        raise RuntimeError("LLVM ERROR: cannot select")

    return call


def spoil(amd: Amd, name: str, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Breaks a kernel wherever it has been imported."""
    homes: dict[str, list[tuple[Any, str]]] = {
        "argmax": [(triton_argmax, "argmax")],
        "sampler": [(triton_sampler, "sample")],
        "embedding": [(triton_embedding, "embed"), (triton_ops, "embed")],
        "few_rows": [(triton_linear, "few_rows")],
        "fused_layers": [(triton_activation, "gated"), (triton_ops, "gated")],
        "triton_fa": [(triton_attention, "paged_attention")],
    }
    for module, attribute in homes[name]:
        amd.patch.setattr(module, attribute, how(getattr(module, attribute)))


@pytest.mark.parametrize(
    ("name", "how", "takes"),
    [
        ("argmax", wrong, ("triton_fa", True, False, False)),
        ("embedding", broken, ("triton_fa", True, False, True)),
        ("fused_layers", wrong, ("triton_fa", False, False, True)),
        ("triton_fa", broken, ("torch_ref", False, False, True)),
        ("triton_fa", wrong, ("torch_ref", False, False, True)),
    ],
)
def test_a_kernel_that_fails_is_left_out(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    name: str,
    how: Callable[[Callable[..., Any]], Callable[..., Any]],
    takes: Any,
) -> None:
    """One line says so, and plain torch, or the next backend, takes its place."""
    amd(aiter=None)
    amd.patch.setenv("SPECDEC_KERNELS", "-captured_step")
    spoil(amd, name, how)
    start = Run(caplog)
    assert start.takes == takes and start.tokens == expected
    (line,) = start.warnings
    assert line.startswith(f"{name}") and f"SPECDEC_KERNELS={name} takes it all the same" in line
    assert ("RuntimeError: LLVM ERROR: cannot select" if how is broken else "its error is") in line


def test_few_rows_that_fail_are_left_out(amd: Amd, caplog: pytest.LogCaptureFixture) -> None:
    """In half precision; torch multiplies."""
    amd(aiter=None)
    where = DEVICE, torch.float16
    assert fused.FEW_ROWS.runs_on(*where) and not caplog.records
    next_start()
    assert fused.FEW_ROWS.runs_on(*where)
    spoil(amd, "few_rows", wrong)
    assert fused.FEW_ROWS.runs_on(*where)  # as it was when it was checked
    check = fused.FEW_ROWS.check_on(*where)
    self_check.verdict_of("few_rows", DEVICE, check, torch.float16, again=True)
    next_start()
    assert not fused.FEW_ROWS.runs_on(*where)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["few_rows-float16"]


def test_packed_products_that_fail_are_left_out(amd: Amd, caplog: pytest.LogCaptureFixture) -> None:
    """In half precision: such a layer makes numbers of its weight then, and checkpoints are read as
    plain numbers.
    """
    amd(aiter=None)
    weight, x = packed_weight("e4m3", (40, 64), 32), torch.randn(3, 64).half()
    right = packed.PackedLinear(weight)
    product = right(x)
    assert (
        right._has_kernels
        and packed_check.KERNEL.runs_on(DEVICE, torch.float16)
        and not caplog.records
    )
    assert not packed_check.KERNEL.runs_on(DEVICE, torch.float32)
    amd.patch.setattr(triton_packed, "product", wrong(triton_packed.product))
    amd.patch.setattr(packed_check, "_SIZES", {"e4m3": 1.0})
    amd.patch.setattr(packed_check, "_OF_EXPERTS", ())
    check = packed_check.KERNEL.check_on(DEVICE, torch.float16)
    self_check.verdict_of("packed", DEVICE, check, torch.float16, again=True)
    next_start()
    left = packed.PackedLinear(weight)
    torch.testing.assert_close(left(x), product, rtol=1e-2, atol=1e-2)
    assert not left._has_kernels and left.few_rows(x) is None and left.prefetchable is None
    assert [record.getMessage().split()[0] for record in caplog.records] == ["packed-float16"]


def test_aiter_that_fails_makes_room_for_triton(
    amd: Amd, caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    """Its kernels are there, and one of them is wrong."""
    amd()
    import aiter.ops.triton.attention.unified_attention as home

    def doubled(**options: Any) -> Any:
        kernel(**options | {"softmax_scale": 2 * options["softmax_scale"]})

    kernel = home.unified_attention
    doubled.__signature__ = kernel.__signature__  # type: ignore[attr-defined]
    amd.patch.setattr(home, "unified_attention", doubled)
    amd.patch.setenv("SPECDEC_KERNELS", "-captured_step,-fused_layers")
    start = Run(caplog)
    assert start.takes == ("triton_fa", False, False, True) and start.tokens == expected
    (line,) = start.warnings
    assert line.startswith(f"rocm_aiter_fa-float32-{SHAPE} is left out")
    assert "SPECDEC_KERNELS=rocm_aiter_fa takes it" in line


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (Stale, "gives other tokens than the same step"),
        (Refusing, "cannot capture this model's step: operation not permitted"),
    ],
)
def test_captured_steps_that_fail_are_left_out(
    amd: Amd,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    capture: type[Repeat],
    reason: str,
) -> None:
    """Steps are launched one by one then."""
    amd(aiter=None)
    for module in (capturing, build):
        amd.patch.setattr(module, "CudaCapture", capture)
    amd.patch.setenv("SPECDEC_KERNELS", "-fused_layers")
    start = Run(caplog)
    assert start.takes == ("triton_fa", False, False, True) and start.tokens == expected
    (line,) = start.warnings
    assert line.startswith("captured_step-triton_fa is left out") and reason in line


def test_a_process_that_died_in_a_check_is_remembered(
    amd: Amd, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel that took it down is not run again."""
    amd(aiter=None)
    folder = self_check._folder(DEVICE)
    folder.mkdir(parents=True)
    (folder / "fused_layers-float32.json").write_text('{"started": true}\n')
    amd.patch.setenv("SPECDEC_KERNELS", "-captured_step")
    start = Run(caplog)
    assert start.takes == ("triton_fa", False, False, True)
    (line,) = start.warnings
    assert line.startswith("fused_layers-float32") and "a process ended in the midst of it" in line


def test_graphs_by_name(
    amd: Amd, caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    """On without a check, off without one."""
    amd(aiter=None)
    amd.patch.setenv("SPECDEC_KERNELS", "-fused_layers,-argmax,-sampler")
    on = Run(caplog, graphs=True)
    off = Run(caplog, graphs=False)
    assert (on.captured, off.captured) == (True, False) and on.tokens == off.tokens == expected
    assert verdicts() == {f"triton_fa-float32-{SHAPE}"}


CARDS = {
    "gfx90a": "triton_fa",
    "gfx942": "rocm_aiter_fa",
    "gfx950": "rocm_aiter_fa",
    "gfx1030": "triton_fa",
    "gfx1100": "rocm_aiter_fa",
    "gfx1151": "rocm_aiter_fa",
    "gfx1200": "rocm_aiter_fa",
    "gfx1201": "rocm_aiter_fa",
    "gfx1250": "triton_fa",
}
"""What `auto` takes where AITER is installed; our own attention without it."""


@pytest.mark.parametrize(
    ("architecture", "aiter"),
    [
        *product(CARDS, [None, "0.1.20"]),
        *product(["gfx942", "gfx1100"], ["0.1.16", "0.1.23", "0.1.dev1+g0123abc"]),
    ],
)
def test_auto_on_every_card(
    amd: Amd, caplog: pytest.LogCaptureFixture, architecture: str, aiter: str | None
) -> None:
    """None falls to plain torch while ours pass, nor in silence when they do not."""
    amd(architecture, aiter)
    spec = AttentionSpec(DEVICE, torch.float32, 4, 2, 16, 16)
    assert select_backend("auto", spec).name == (CARDS[architecture] if aiter else "triton_fa")
    assert verdicts() == {f"{select_backend('auto', spec).name}-float32-{SHAPE}"}
    variant: list[Any] = [torch.float32, *SHAPE.split("-")]
    for name in ("rocm_aiter_fa", "triton_fa"):
        self_check.verdict_of(name, DEVICE, lambda: Deviation(1.0, 0.0), *variant, again=True)
    with caplog.at_level(logging.INFO):
        caplog.clear()
        assert select_backend("auto", spec).name == "torch_ref"
    assert "attention torch_ref" in caplog.text
    assert "triton_fa: its self-check failed" in caplog.text


@pytest.mark.parametrize("attention", ["rocm_aiter_fa", "rocm_aiter_fa_shuffle"])
def test_fused_layers_beside_aiter(
    amd: Amd, caplog: pytest.LogCaptureFixture, expected: list[list[int]], attention: str
) -> None:
    """AITER writes the cache in either layout, from rows that our kernel has rotated; a drafter's
    context as well.
    """
    machine = amd()
    amd.patch.setenv("SPECDEC_KERNELS", "-fused_layers,-captured_step,-argmax,-sampler")
    plain = Run(caplog, attention, drafts=True)
    amd.patch.setenv("SPECDEC_KERNELS", "fused_layers,embedding,-captured_step,-argmax,-sampler")
    start = Run(caplog, attention, drafts=True)
    assert (
        start.takes == (attention, True, False, False) and start.tokens == plain.tokens == expected
    )
    assert start.drafts == plain.drafts != []
    assert machine.names() >= {
        "flash_attn_varlen_func",
        "unified_attention",
        "flash_attn_with_kvcache",
    }
