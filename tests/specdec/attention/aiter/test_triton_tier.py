"""The Triton-only tier on the emulation, where compiled functions do not run."""

import importlib
import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec.device.device
from specdec.attention import selector
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.fa_triton import WIDEST_TILE
from specdec.attention.selector import refusals, select_backend
from specdec.base.errors import BackendError
from specdec.base.registry import ATTENTION_BACKENDS
from specdec.cli.main import main
from specdec.kernels import aiter, aiter_triton_only
from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_generation import generate, wide_dflash
from tests.helpers.attention_case import Case, spec
from tests.helpers.fa_case import model_of, on
from tests.helpers.guards import no_host_sync
from tests.helpers.pairs import pairs
from tests.helpers.rocm import Install
from tests.helpers.tiny_models import paged_verifier
from verifiers.config.shape import attention_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

CUDA = torch.device("cuda")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
TRITON_ONLY = {"unified_attention", "flash_attn_with_kvcache"}


@pytest.fixture
def rdna(rocm: Install) -> Install:
    """Pretends a machine on which AITER has its Triton functions alone; anything else raises when
    it is called.
    """

    def setup(architecture: str | None = "gfx1100", version: str = "0.1.20", **how: Any) -> Machine:
        return rocm(version, architecture, **how)

    return setup


SHAPES: dict[str, tuple[list[int], list[int], bool]] = {
    "single": ([40, 1, 33, 16], [1, 1, 1, 1], True),
    "block": ([40, 5, 33, 21], [5, 5, 5, 5], True),
    "mixed": ([40, 17, 35, 33, 50, 9], [3, 17, 1, 33, 3, 1], False),
}
"""Lengths, rows, and whether only the device knows them."""


@pytest.mark.parametrize(
    ("shape", "window", "extra"),
    pairs([*SHAPES], [None, 1, 9, 100], ["", "blocks", "sinks", "softcap"]),
)
def test_every_case_equals_torch_ref(
    rdna: Install, shape: str, window: int | None, extra: str
) -> None:
    """All phases in one call, blocks of unlike widths apart; only the two Triton functions are
    called.
    """
    machine, causal = rdna(tiny=True), extra != "blocks"
    case = Case(
        spec(dtype=torch.float32), *SHAPES[shape][:2], uniform=SHAPES[shape][2], causal=causal
    )
    sinks, softcap = (
        torch.randn(4) if extra == "sinks" else None,
        0.7 if extra == "softcap" else None,
    )
    how: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": softcap, "sinks": sinks}
    case.check(case.attend(RocmAiterFaBackend(case.spec), layers=2, **how), **how)
    assert machine.names() <= TRITON_ONLY
    if causal:  # one call for each of the two layers
        assert [call.name for call in machine.calls] == ["unified_attention"] * 2


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_whole_generations_equal_torch_ref(rdna: Install, name: str) -> None:
    """Token for token in float32, plain and with DFlash drafts, and nothing waits between draft and
    commit.
    """
    machine = rdna(tiny=True)
    model = model_of(name)
    reference = paged_verifier(model, block_size=16)
    want = generate(reference, None)
    for make in (lambda v: None, wide_dflash):
        verifier = on(RocmAiterFaBackend, model)
        assert generate(verifier, make(verifier), guard=True) == want
    assert machine.names() == TRITON_ONLY


def test_eight_bit_cache(rdna: Install) -> None:
    """RDNA 4 has 8-bit floats: rows are written and read back; drafts read them gathered."""
    rdna("gfx1201")
    asked = spec(cache_dtype=FN)
    for rows, causal in itertools.product([1, 5], [True, False]):
        case = Case(asked, [40, 5, 33], [rows] * 3, uniform=True, causal=causal)
        case.check(case.attend(RocmAiterFaBackend(asked), scale=0.1), scale=0.1)


@pytest.mark.parametrize(
    ("architecture", "dtype", "most"), [("gfx1201", FN, 448), ("gfx942", FNUZ, 240)]
)
def test_eight_bit_writes_round_and_saturate(
    rdna: Install, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: torch.dtype, most: int
) -> None:
    """What is too large would become NaN where torch's own conversion does not saturate."""
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    rdna(architecture)
    case = Case(spec(cache_dtype=dtype), [40], [5], uniform=True)
    cache, rows = case.cache(), torch.randn_like(case.new["key"])
    rows[0] = 1e4
    RocmAiterFaBackend(case.spec).write(cache, rows, -rows, case.metadata.slot_mapping)
    want = rows.float().clamp(-most, most).to(dtype).float()
    for side, stored in zip((want, -want), cache, strict=True):
        assert torch.equal(stored.float().flatten(0, 1)[case.metadata.slot_mapping], side)


def test_generation_with_an_eight_bit_cache(rdna: Install) -> None:
    """bfloat16 rows on an 8-bit cache of RDNA 4, plain and with drafts: nothing waits."""
    rdna("gfx1201")
    config = model_of("llama").config
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
    ).eval()
    asked = attention_spec(config, device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16)
    verifier = verifier_for(
        model, name="llama", backend=RocmAiterFaBackend(replace(asked, cache_dtype=FN))
    )
    assert all(generate(verifier, wide_dflash(verifier), guard=True))


@pytest.mark.parametrize("architecture", ["gfx942", "gfx1201"])
def test_gathered_keys_fill_whole_tiles(rdna: Install, architecture: str) -> None:
    """From a dense cache the draft kernel loads whole tiles without a mask: past the last request
    there may be anything.
    """
    machine = rdna(architecture)
    fp8 = FNUZ if architecture == "gfx942" else FN
    for length in (9, 130):
        case = Case(spec(cache_dtype=fp8), [length, 6], [5, 5], uniform=True, causal=False)
        case.attend(RocmAiterFaBackend(case.spec), scale=0.1)
    widths = [key[2] for key in machine.compiled if key[0] == "flash_attn_with_kvcache"]
    assert sorted(widths) == [WIDEST_TILE, 2 * WIDEST_TILE]


@pytest.mark.parametrize(
    ("architecture", "version", "changes", "reasons"),
    [
        ("gfx1100", "0.1.20", {}, []),
        ("gfx1151", "0.1.16", {"non_causal": True, "windows": frozenset({None, 9})}, []),
        ("gfx1201", "0.1.20", {"cache_dtype": FN, "sinks": True, "softcap": 5.0}, []),
        ("gfx1250", "0.1.20", {}, ["architecture gfx1250"]),
        ("gfx1030", "0.1.20", {}, ["architecture gfx1030"]),
        (
            "gfx1100",
            "0.1.15",
            {},
            ["0.1.15 does not import without its C++ kernels: install 0.1.16"],
        ),
        (
            "gfx1100",
            "0.1.20",
            {"cache_dtype": FN},
            ["gfx1100 has no 8-bit floats that AITER knows"],
        ),
        ("gfx1201", "0.1.20", {"cache_dtype": FNUZ}, ["gfx1201 computes with torch.float8_e4m3fn"]),
        (
            "gfx1100",
            "0.1.20",
            {"non_causal": True, "sinks": True, "softcap": 5.0},
            ["with sinks", "with a softcap"],
        ),
        (
            "gfx1100",
            "0.1.20",
            {"dtype": torch.float32, "block_size": 4},
            ["float32", "blocks of 4"],
        ),
    ],
)
def test_refusals(
    rdna: Install, architecture: str, version: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    """Every limit is said before work starts, and the shuffled layout is refused everywhere."""
    rdna(architecture, version)
    found = RocmAiterFaBackend.unsupported_reasons(spec(**changes))
    assert len(found) == len(reasons), found
    assert all(want in got for want, got in zip(reasons, found, strict=True))
    if not reasons:
        assert (
            "shuffled layout needs AITER's compiled kernels"
            in RocmAiterFaShuffleBackend.unsupported_reasons(spec(**changes))[0]
        )


def test_the_tier_follows_the_machine(rdna: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """CDNA has all kernels unless the user asked AITER for Triton alone; other machines have
    Triton's or none.
    """
    device = torch.device("cpu")
    for architecture, tier in (
        ("gfx942", "full"),
        ("gfx950", "full"),
        ("gfx1100", "triton"),
        ("gfx90a", None),
        (None, None),
    ):
        rdna(architecture)
        assert rocm_aiter_fa.tier_of(device) == tier
    assert rocm_aiter_fa.tier_of(CUDA) == "triton"
    rdna("gfx942")
    assert RocmAiterFaBackend(spec()).tier == "full"
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    assert RocmAiterFaBackend(spec()).tier == "triton"


def test_nvidia_is_served_by_name_alone(rdna: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` neither takes it nor imports AITER; the name does both."""
    rdna(None)
    asked = spec(device=CUDA)
    monkeypatch.setattr(specdec.device.device, "describe_device", str)
    # Others would ask the device that is not there.
    monkeypatch.setattr(
        selector,
        "ATTENTION_BACKENDS",
        {n: ATTENTION_BACKENDS[n] for n in ("rocm_aiter_fa", "torch_ref")},
    )
    assert refusals(asked)["rocm_aiter_fa"] == []
    with monkeypatch.context() as patch:
        patch.delattr(aiter_triton_only, "load")
        assert "only when asked for by name" in refusals(asked, auto=True)["rocm_aiter_fa"][0]
        assert select_backend("auto", asked).name == "torch_ref"
    reasons = refusals(spec(device=CUDA, cache_dtype=FN))["rocm_aiter_fa"]
    assert reasons == ["a torch.float8_e4m3fn cache (cuda has no 8-bit floats that AITER knows)"]


def test_nvidia_without_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it says what is missing and what for."""
    monkeypatch.setattr(aiter, "installed_version", lambda: None)
    with pytest.raises(
        BackendError,
        match="cuda is not a ROCm device; to check AITER's Triton kernels here, install amd-aiter",
    ):
        select_backend("rocm_aiter_fa", spec(device=CUDA))


def test_doctor(rdna: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """The tier is named, and whether it was chosen."""
    rdna()
    assert main(["doctor", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "  rocm_aiter_fa          chosen by --attention auto\n" in out
    assert "\n                         with AITER's Triton kernels alone\n" in out
    assert "  rocm_aiter_fa_shuffle  no: the shuffled layout needs AITER's compiled kernels" in out


def test_aiter_is_imported_without_its_compiled_part(
    rdna: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is set while AITER is imported, and only then."""
    rdna()
    seen = []

    def spy(name: str) -> Any:
        seen.append(os.environ.get("AITER_TRITON_ONLY"))
        return importlib.import_module(name)

    monkeypatch.setattr(aiter, "import_module", spy)
    aiter_triton_only.load()
    assert seen == ["1", "1"] and "AITER_TRITON_ONLY" not in os.environ
    monkeypatch.setenv("AITER_TRITON_ONLY", "0")
    aiter_triton_only.load()
    assert os.environ["AITER_TRITON_ONLY"] == "0"


def test_missing_pieces_are_reasons(rdna: Install) -> None:
    """A function without an argument we pass, or not there at all, refuses with its name."""
    rdna()
    home = importlib.import_module("aiter.ops.triton.attention.unified_attention")
    home.unified_attention = lambda q, k: q  # type: ignore[attr-defined]
    assert (
        "unified_attention of aiter.ops.triton.attention.unified_attention takes no out"
        in aiter_triton_only.unavailable_reasons()[0]
    )
    del home.unified_attention
    assert "has no unified_attention" in aiter_triton_only.unavailable_reasons()[0]


def test_amd_launch_options_are_dropped_where_undeclared(
    rdna: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off AMD, a kernel gets every option but AMD's own; one that declares such an option keeps it;
    on AMD nothing changes.
    """
    got: list[dict[str, Any]] = []

    def kernel(*declared: str) -> Any:
        return SimpleNamespace(arg_names=declared, run=lambda **options: got.append(options))

    plain, declaring, tuned = kernel("x"), kernel("x", "waves_per_eu"), kernel("x")
    package = SimpleNamespace(
        plain=plain,
        declaring=declaring,
        tuned=SimpleNamespace(arg_names=(), configs=[], fn=tuned),
        other=3,
    )
    monkeypatch.setitem(
        sys.modules, "aiter.ops.triton._triton_kernels.attention.unified_attention", package
    )
    rdna()
    monkeypatch.setitem(
        sys.modules, "aiter.ops.triton._triton_kernels.attention.unified_attention", package
    )
    options = {"x": 1, "num_warps": 4, "waves_per_eu": 2, "kpack": 1}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    aiter_triton_only.load()
    plain.run(**options)
    assert got.pop() == options
    monkeypatch.setattr(torch.version, "hip", None)
    aiter_triton_only.load()
    aiter_triton_only.load()  # a second backend changes nothing more
    for each, kept in (
        (plain, {"x", "num_warps"}),
        (declaring, {"x", "num_warps", "waves_per_eu"}),
        (tuned, {"x", "num_warps"}),
    ):
        each.run(**options)
        assert got.pop().keys() == kept


def test_decoding_does_not_wait(rdna: Install) -> None:
    """A decode neither reads back nor builds anything from host lists."""
    rdna()
    for causal in (True, False):
        case = Case(spec(), *SHAPES["block"][:2], uniform=True, causal=causal)
        backend, cache = RocmAiterFaBackend(case.spec), case.cache()
        with no_host_sync():
            backend.run(
                case.query, cache=cache, plan=backend.plan(case.metadata), scale=0.1, **case.new
            )


@pytest.mark.parametrize(
    ("architecture", "version", "head_dim", "warns"),
    [
        ("gfx1201", "0.1.20", 128, False),
        ("gfx1201", "0.1.21", 128, True),
        ("gfx1201", "0.1.21", 64, False),
        ("gfx1100", "0.1.23", 128, False),
        ("gfx1100", "0.1.23", 256, True),
        ("gfx942", "0.1.23", 256, False),
    ],
)
def test_shared_memory_is_told_of(
    rdna: Install, architecture: str, version: str, head_dim: int, warns: bool
) -> None:
    """Whoever names the backend asks no check."""
    rdna(architecture, version)
    said = RocmAiterFaBackend.describe(spec(head_dim=head_dim))
    assert any("shared memory" in line for line in said) == warns
