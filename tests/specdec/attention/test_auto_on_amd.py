"""What `auto` takes on every AMD GPU beside every AITER, as `docs/rocm.md` says it; and one line
wherever plain torch is left.

Self-checks pass here, or fail, as they are told to: what they compute, other tests show.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention import check, latent_check
from specdec.attention.backend import AttentionSpec
from specdec.attention.mla import IndexerSpec, MlaSpec
from specdec.attention.selector import select_backend
from specdec.attention.triton import fa as triton_fa
from tests.helpers.aiter_emulation import Machine, install

DOCS = Path(__file__).parents[3] / "docs" / "rocm.md"
CARDS = {
    "gfx90a": "MI210, MI250",
    "gfx942": "MI300X, MI325X",
    "gfx950": "MI350X, MI355X",
    "gfx1030": "RX 6900",
    "gfx1100": "RX 7900",
    "gfx1151": "Strix Halo",
    "gfx1200": "RX 9060",
    "gfx1201": "R9700, RX 9070",
    "gfx1250": "MI455X",
}
SHALLOW = "0.1.dev1+g0123abc"
AITER = {None: "none", "0.1.16": "0.1.16", "0.1.20": "0.1.20", "0.1.23": "0.1.23"}
AITER |= {SHALLOW: "shallow clone"}
CPU = torch.device("cpu")
SPECS: dict[str, AttentionSpec | MlaSpec] = {
    "ordinary": AttentionSpec(CPU, torch.bfloat16, 32, 8, 128, 16),
    "latent": MlaSpec(CPU, torch.bfloat16, 128, 512, 128, 64, 128, 16),
    "sparse": MlaSpec(
        CPU, torch.bfloat16, 128, 512, 128, 64, 128, 16, indexer=IndexerSpec(64, 128, 2048)
    ),
}


def takes(
    patch: pytest.MonkeyPatch,
    folder: Path,
    architecture: str,
    version: str | None,
    failing: tuple[str, ...] = (),
) -> list[str]:
    """Backends of ordinary, latent and sparse attention, with these self-checks failing."""

    def verdict(name: str, *_: Any) -> list[str]:
        return ["its self-check failed: RuntimeError: as told"] if name in failing else []

    patch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    patch.setattr(triton_fa, "unavailable_reasons", lambda device: [])
    for module in (check, latent_check):
        patch.setattr(module, "reasons_against", verdict)
    if version is not None:
        shallow = version == SHALLOW
        install(patch, folder, Machine("0.1.20" if shallow else version, architecture))
        if shallow:
            patch.setattr("specdec.kernels.aiter.installed_version", lambda: SHALLOW)
    return [select_backend("auto", spec).name for spec in SPECS.values()]


def cell(names: list[str]) -> str:
    """As the table has it.

    >>> cell(["triton_fa", "torch_ref", "torch_ref"])
    '`triton_fa`; `torch_ref`'
    >>> cell(["rocm_aiter_fa", "rocm_aiter_mla", "rocm_aiter_mla_sparse"])
    '`rocm_aiter_fa`; `rocm_aiter_mla`, `rocm_aiter_mla_sparse`'
    """
    ordinary, *latents = (f"`{name}`" for name in names)
    return f"{ordinary}; {', '.join(dict.fromkeys(latents))}"


def test_the_table(tmp_path: Path) -> None:
    """Nine architectures, five AITERs; with -s it is printed."""
    rows: dict[str, list[str]] = {}
    for number, architecture in enumerate(CARDS):
        cells = []
        for version in AITER:
            with pytest.MonkeyPatch.context() as patch:
                folder = tmp_path / f"{number}-{version}"
                cells.append(cell(takes(patch, folder, architecture, version)))
        rows[f"{CARDS[architecture]} ({architecture})"] = cells
    lines = [f"| {' | '.join(['card', *AITER.values()])} |", "|---|" + "---|" * len(AITER)]
    lines += [f"| {card} | {' | '.join(cells)} |" for card, cells in rows.items()]
    print("\n" + "\n".join(lines))
    assert "\n".join(lines) in DOCS.read_text(), "docs/rocm.md has another table"


@pytest.mark.parametrize("version", AITER)
@pytest.mark.parametrize("architecture", CARDS)
def test_plain_torch_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    version: str | None,
) -> None:
    """And why on nothing better: for every kind of attention, whatever else is there."""
    failing = ("rocm_aiter_fa", "triton_fa", "rocm_aiter_mla", "rocm_aiter_mla_sparse")
    with caplog.at_level(logging.INFO):
        chosen = takes(monkeypatch, tmp_path, architecture, version, failing)
    assert chosen == ["torch_ref"] * 3
    lines = [record.getMessage() for record in caplog.records if "attention" in record.message]
    assert len(lines) == 3 and "triton_fa: its self-check failed" in lines[0]
    for line, name in zip(lines, ("fa", "mla", "mla_sparse"), strict=True):
        assert "attention torch_ref" in line and f"rocm_aiter_{name}: " in line
