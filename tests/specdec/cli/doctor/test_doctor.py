"""`specdec doctor`: the choice it reports is the one that is made, every reason is said, and the
wrong package is named.
"""

import tomllib
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention import check, latent_check, selector
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.base.registry import MLA_BACKENDS
from specdec.cli.doctor import run
from specdec.cli.main import main
from specdec.device import self_check
from specdec.device.deviation import Deviation
from specdec.kernels import aiter
from tests.helpers.aiter_emulation import Machine, install

ROOT = Path(__file__).parents[4]


def doctor(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> str:
    """What it prints on a CPU in bfloat16."""
    assert main(["doctor", "--device", "cpu", "--dtype", "bfloat16", *options]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, the device, the choice and the reason against the others; only variables that are
    set.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("GPU_ARCHS", raising=False)
    out = doctor(capsys)
    for line in (
        f"torch         {metadata.version('torch')}",
        "amd-aiter     not installed",
        "  rocm_aiter_fa          no: cpu is not a ROCm device",
        "  torch_ref              chosen by --attention auto",
        "  OMP_NUM_THREADS=3",
    ):
        assert line in out, out
    assert "device        cpu, " in out and "GPU_ARCHS" not in out and "warning" not in out


def test_rocm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On AMD the AITER backend is chosen, and an AITER too old for block drafts is said to be."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    install(monkeypatch, tmp_path, Machine(version="0.1.15"))
    out = doctor(capsys)
    assert "amd-aiter     0.1.15" in out
    assert "  rocm_aiter_fa          chosen by --attention auto" in out
    assert "but not for DFlash drafters: non-causal blocks need amd-aiter 0.1.16" in out
    assert "  rocm_aiter_fa_shuffle  no: the shuffled layout needs amd-aiter 0.1.16" in out
    assert "  torch_ref              works with --attention torch_ref" in out
    assert "no: head size 40" in doctor(capsys, "--head-dim", "40")


def test_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What AITER reads while it compiles and tunes, as the user has set it: AITER sets some of it
    itself when it is imported.
    """
    mine = (
        "AITER_JIT_DIR", "AITER_CONFIG_FMOE", "PYTORCH_ROCM_ARCH", "MAX_JOBS", "MHA_HIP_CLANG_PATH",
        "HSA_OVERRIDE_GFX_VERSION", "HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES",
        "PYTORCH_ALLOC_CONF", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_BLAS_PREFER_HIPBLASLT",
        "ROCPROFILER_QUEUE_INTERPOSITION",
    )  # fmt: skip
    for name in mine:
        monkeypatch.setenv(name, "/mine")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.delenv("AITER_ASM_DIR", raising=False)
    asked = selector.refusals

    def importing(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setenv("AITER_ASM_DIR", "aiter's own")
        return asked(*args, **kwargs)

    monkeypatch.setattr(selector, "refusals", importing)
    out = doctor(capsys)
    for name in mine:
        assert f"\n  {name}=/mine\n" in out
    assert "\n  HIP_VISIBLE_DEVICES=\n" in out and "AITER_ASM_DIR" not in out


@pytest.mark.parametrize("name", ["triton", "pytorch-triton-rocm", "triton-rocm"])
def test_triton_under_any_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """ROCm builds of torch bring it as another distribution."""
    known = metadata.version

    def version(distribution: str) -> str:
        if "triton" in distribution and distribution != name:
            raise metadata.PackageNotFoundError(distribution)
        return "3.5.1" if distribution == name else known(distribution)

    monkeypatch.setattr(metadata, "version", version)
    assert f"triton        3.5.1{'' if name == 'triton' else f' ({name})'}\n" in doctor(capsys)


def test_an_aiter_newer_than_what_was_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note, and nothing else: it may well work."""
    newest = aiter.dotted(aiter.CHECKED_VERSION)
    monkeypatch.setattr(aiter, "installed_version", lambda: f"{newest}.post1")
    assert "warning" not in doctor(capsys)
    monkeypatch.setattr(aiter, "installed_version", lambda: f"{newest}.1")
    assert (
        f"warning       amd-aiter {newest}.1 is newer than {newest}, the newest that was checked;"
        f" compare" in doctor(capsys)
    )


def test_the_extra_installs_an_aiter_that_can_work() -> None:
    """Not what the registry had first, which is older than any version the backends take."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["rocm"] == [
        f"amd-aiter>={aiter.dotted(aiter.MINIMUM_VERSION)}"
    ]


def test_a_gpu_that_torch_does_not_see(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said where the device is left open; who asks for the CPU gets it without a word."""
    monkeypatch.setattr(
        specdec.device.device, "unseen_gpu", lambda: "an AMD GPU is here (gfx942), but hidden"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--dtype", "bfloat16"]) == 0
    assert "no GPU        an AMD GPU is here (gfx942), but hidden\n" in capsys.readouterr().out
    assert "no GPU" not in doctor(capsys)


def test_wrong_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The unrelated `aiter` of the registry is called by its name, with what to do,
    on any machine.
    """
    info = tmp_path / "aiter-0.13.20191203.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.20191203\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = doctor(capsys)
    assert (
        "warning       the installed package 'aiter' is an unrelated async library: uninstall it"
        " and install AMD's amd-aiter" in out
    )
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    assert "rocm_aiter_fa          no: the installed package 'aiter' is an unrelated" in doctor(
        capsys
    )


def test_nothing_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 when no backend can serve the model, and every reason is there."""
    out = doctor(capsys, "--heads", "5", "--kv-heads", "2", status=1)
    assert (
        "chosen" not in out
        and "torch_ref              no: 5 query heads do not share 2 key heads evenly" in out
    )


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "AITER is not installed"), ("0.1.14", "amd-aiter 0.1.14 is older than 0.1.15")],
)
def test_reasons_of_aiter(
    monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
) -> None:
    """Missing and old installations."""
    monkeypatch.setattr(aiter, "installed_version", lambda: version)
    assert [why.startswith(reason) for why in aiter.unavailable_reasons()] == [True]


def test_damaged_aiter_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function without an argument we pass, or not there at all, refuses with its name; nothing
    is imported by guesswork.
    """
    install(monkeypatch, tmp_path)
    assert aiter.unavailable_reasons() == []
    import aiter as emulated

    monkeypatch.setattr(emulated, "paged_attention_v1", lambda query: query)
    assert (
        "paged_attention_v1 of aiter takes no out, workspace_buffer"
        in aiter.unavailable_reasons()[0]
    )
    monkeypatch.delattr(emulated, "paged_attention_v1")
    assert "aiter has no paged_attention_v1" in aiter.unavailable_reasons()[0]


def sound_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the check of latent attention, which takes seconds on an emulation."""

    def sound(backend: type[MlaBackend], spec: MlaSpec) -> Deviation:
        assert backend.name in MLA_BACKENDS and isinstance(spec, MlaSpec)
        return Deviation(0.0, 0.0)

    for module in (latent_check, run):
        monkeypatch.setattr(module, "check_latent", sound)


def test_latent_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own backends with all their reasons, those of the 8-bit prefill included."""
    out = doctor(capsys, "--mla", "--heads", "20")
    assert (
        "for 20 heads, latents of 512 + 64, keys of 128 + 64 and values of 128, bfloat16\n" in out
    )
    assert (
        "rocm_aiter_mla         no: cpu is not a ROCm device" in out and "rocm_aiter_fa" not in out
    )
    assert "torch_ref              chosen by --attention auto" in out and "DFlash" not in out
    assert "prompts in 8 bits" not in out  # that is a question for a backend that runs
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx950")
    sound_latents(monkeypatch)
    install(monkeypatch, tmp_path, Machine(architecture="gfx950"))
    out = doctor(capsys, "--mla", "--kv-dtype", "fp8")
    assert (
        "128 heads" in out and "cache in float8_e4m3fn" in out and "prompts in 8 bits: yes" in out
    )
    assert "rocm_aiter_mla_sparse  no: the model has no indexer" in out
    assert "rocm_aiter_mla         chosen by --attention auto" in out
    out = doctor(capsys, "--mla", "--heads", "16")
    assert "cache in" not in out and "prompts in 8 bits: yes, those without a context" in out
    out = doctor(capsys, "--mla", "--heads", "16", "--prefill-dtype", "model")
    assert "prompts in 8 bits: no: prompts are asked for in the model's own type" in out
    out = doctor(capsys, "--v-head-dim", "256", "--qk-nope-head-dim", "192", "--kv-dtype", "fp8")
    assert (
        "keys of 192 + 64 and values of 256" in out
        and "prompts in 8 bits: no: heads other than 192" in out
    )
    out = doctor(capsys, "--kv-lora-rank", "256", "--heads", "200")
    assert (
        "rocm_aiter_mla         no: latents of 256 and 64 numbers (the kernels take 512 and 64);"
        " 200 heads" in out
    )


def test_indexers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One size of an indexer is enough to ask about a model that has one."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    sound_latents(monkeypatch)
    install(monkeypatch, tmp_path)
    out = doctor(capsys, "--indexer")
    assert "an indexer of 64 heads of 128 that selects 2048" in out
    assert "rocm_aiter_mla_sparse  chosen by --attention auto" in out
    assert (
        "rocm_aiter_mla         no: an indexer chooses what rows attend to (use"
        " rocm_aiter_mla_sparse)" in out
    )
    assert "prompts in 8 bits: no: with an indexer" in out
    assert "rocm_aiter_mla_sparse  no: 24 index heads" in doctor(capsys, "--index-n-heads", "24")


AITER = "rocm_aiter_fa-bfloat16-32x8x128-blocks16"


def line_of(out: str, name: str) -> list[str]:
    """The words of a kernel's line behind its name."""
    (line,) = (
        line
        for line in out.partition("self-checks\n")[2].splitlines()
        if line.split()[:1] == [name]
    )
    return line.replace(",", "").split()[1:]


def test_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """What can run, with error, bound and time; why the others cannot; nothing is kept."""
    out = doctor(capsys, "--run")
    error, bound, milliseconds = map(float, line_of(out, "torch_ref-bfloat16-9x3x64-blocks16"))
    assert 0 < error < bound < 1 and milliseconds > 0
    for name in (
        "triton_fa-bfloat16-16x2x256-blocks16",
        "argmax",
        "embedding-bfloat16",
        "few_rows-bfloat16",
        "experts-bfloat16",
        "fused_layers-bfloat16",
    ):
        said = " ".join(line_of(out, name))
        assert said == "not here: cpu is not a CUDA or ROCm device"
    assert line_of(out, "captured_step") == ["not", "here:", "cpu", "has", "no", "graphs"]
    assert all(
        any(line.split()[:1] and line.split()[0].startswith(name) for line in out.splitlines())
        for name in self_check.NAMES
    )
    assert " ".join(line_of(out, "aiter_layers-bfloat16")).startswith(
        "not here: cpu (AITER's compiled kernels are for gfx942"
    )
    assert " ".join(line_of(out, AITER)) == "not here: cpu is not a ROCm device"
    assert not self_check.cache_folder().exists()
    assert "self-checks" not in doctor(capsys)


def test_run_checks_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an AMD GPU it mends what an earlier start has kept, on which the choice of auto depends; a
    failure is status 1.
    """
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    install(monkeypatch, tmp_path, Machine())
    sound_latents(monkeypatch)
    monkeypatch.setattr(run, "SHAPES", run.SHAPES[:1])
    home: Any = import_module("aiter.ops.triton.attention.unified_attention")
    with monkeypatch.context() as patch:

        def broken(**options: Any) -> None:
            raise RuntimeError("no\ncompiler")

        broken.__signature__ = home.unified_attention.__signature__  # type: ignore[attr-defined]
        patch.setattr(home, "unified_attention", broken)
        out = doctor(capsys, "--run", status=1)
        assert line_of(out, AITER) == ["failed:", "RuntimeError:", "no", "compiler"]
    reason = "its self-check failed: RuntimeError: no compiler"
    out = doctor(capsys)
    assert (
        f"works with --attention rocm_aiter_fa\n{'':<25}auto passes over it: {reason}" in out
        and "torch_ref              chosen" in out
    )
    out = doctor(capsys, "--run")
    error, bound, _ = map(float, line_of(out, "aiter_layers-bfloat16"))
    assert 0 < error <= bound
    error, bound, _ = map(float, line_of(out, "rocm_aiter_fa-bfloat16-32x8x128-blocks16"))
    assert error <= bound and "rocm_aiter_fa          chosen by --attention auto" in doctor(capsys)


def test_run_shows_what_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its figures; in the types that were asked about."""
    monkeypatch.setattr(check, "deviation", lambda *args: Deviation(0.25, 0.125))
    out = doctor(capsys, "--run", "--dtype", "float32", status=1)
    line = line_of(out, "torch_ref-float32-32x8x128-blocks16")
    assert line[:2] == ["2.5e-01", "1.2e-01"] and line[-1] == "failed"
    assert line_of(out, "few_rows-float16") and line_of(out, "fused_layers-float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-heads", "0"], "--kv-heads is 0; it must be at least 1"),
        (["--head-dim", "-3"], "--head-dim is -3; it must be at least 1"),
        (["--window", "0"], "--window is 0; it must be at least 1"),
        (["--index-topk", "0"], "--index-topk is 0; it must be at least 1"),
        (
            ["--heads", "many"],
            "argument --heads: 'many' is not a whole number; see specdec doctor --help",
        ),
        (
            ["--mla", "--window", "9"],
            "--window is not of latent attention; leave it out, or leave out --mla, --indexer and"
            " their",
        ),
        (["--kv-lora-rank", "512", "--sinks"], "--sinks is not of latent attention"),
        (["--kv-dtype", "int4"], "kv_dtype is 'int4'; choose 'auto' or 'fp8'"),
        (["--mla", "--prefill-dtype", "fp8"], "prefill_dtype is 'fp8'; choose 'auto' or 'model'"),
        (["--kv-lora-rnk", "9"], "unknown option --kv-lora-rnk; did you mean --kv-lora-rank?"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    """One line with the value, the limit and the way out, and nothing else."""
    assert main(["doctor", "--device", "cpu", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"specdec: error: {message}")
