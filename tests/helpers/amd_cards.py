"""AMD's GPUs and the AITERs beside them, pretended: what `auto` takes of attention there."""

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

CARDS = {
    "gfx90a": "MI210, MI250", "gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X",
    "gfx1030": "RX 6900", "gfx1100": "RX 7900", "gfx1151": "Strix Halo", "gfx1200": "RX 9060",
    "gfx1201": "R9700, RX 9070", "gfx1250": "MI455X",
}  # fmt: skip
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


def row(folder: Path, architecture: str) -> dict[str | None, list[str]]:
    """What is taken beside each AITER."""
    found = {}
    for version in AITER:
        with pytest.MonkeyPatch.context() as patch:
            found[version] = takes(
                patch, folder / f"{architecture}-{version}", architecture, version
            )
    return found
