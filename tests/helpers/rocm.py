"""A ROCm machine with AITER, pretended for the time of a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention.aiter import fa
from specdec.attention.aiter.latent import latents, mla_sparse
from tests.helpers.aiter_emulation import Machine, install

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
Install = Callable[..., Machine]


def pretend_rocm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Install:
    """A function that pretends the machine, or with no architecture another one; `tiny` also takes
    float32, and latents and index keys smaller than any kernel does.
    """

    def setup(
        version: str = "0.1.20",
        architecture: str | None = "gfx942",
        *,
        tiny: bool = False,
        **options: Any,
    ) -> Machine:
        monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
        if tiny:
            for backend in (fa, latents):
                monkeypatch.setattr(backend, "DTYPES", (torch.float32, *backend.DTYPES))
            shapes = (*latents.LATENT_SHAPES, (32, 16), (16, 8))
            monkeypatch.setattr(latents, "LATENT_SHAPES", shapes)
            monkeypatch.setattr(mla_sparse, "INDEX_HEAD_DIMS", (16, 32, 128))
        kind = {"version": version, "architecture": architecture or "gfx942"}
        machine = Machine(**{"allow_float32": tiny, "any_shape": tiny, **kind, **options})
        return install(monkeypatch, folder, machine)

    return setup
