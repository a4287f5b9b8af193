"""The steps without the hardware: on a CPU, at tiny sizes, as on gfx950 with AITER's emulation in
place of AITER.

A process that has imported torch already is forked for each step, since importing it takes longer
than a tiny step.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import specdec.device.device
from specdec.attention import latent_check
from specdec.attention.aiter import fa
from specdec.attention.mla import IndexerSpec
from specdec.cli.doctor import run as doctor
from tests.checks.amd_first_day.run import ROOT
from tests.checks.amd_first_day.steps import Step
from tests.helpers.aiter_emulation import Machine, install

ARCHITECTURE = "gfx950"
_PRELOADED = (
    "verifiers.hf",
    "drafters.dflash.drafter",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    __name__,
)


def smaller(steps: list[Step]) -> list[Step]:
    """The steps that can be rehearsed, at tiny sizes."""
    return [
        replace(step, arguments=(*step.arguments, *step.small))
        for step in steps
        if step.small is not None
    ]


def prepare(folder: Path) -> None:
    """Writes the checkpoint that stands for the embedded model."""
    from tests.evals.tiny import TEMPLATE
    from tests.helpers.tiny_models import plain_model, tiny_tokenizer

    if not folder.exists():
        plain_model("llama", head_dim=64).save_pretrained(folder)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)


def launch(step: Step, log: Path) -> int | None:
    """See `tests.checks.amd_first_day.run.Launch`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    process = context.Process(target=_child, args=(step.arguments, dict(step.environ), log))
    process.start()
    try:
        process.join(step.minutes * 60)
        return process.exitcode
    finally:
        process.kill()
        process.join()


def _child(arguments: tuple[str, ...], environ: Mapping[str, str], log: Path) -> None:
    """Runs `python -m` with these arguments on the pretended machine, and ends with its status."""
    os.chdir(ROOT)
    os.environ.update(environ)
    # nothing of a pretended machine stays behind
    os.environ["SPECDEC_CACHE"] = str(log.parent / "cache")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(specdec.device.device, "rocm_architecture", lambda device: ARCHITECTURE)
        patch.setattr(fa, "DTYPES", (torch.float32, *fa.DTYPES))
        # of the self-checks one shape, and of latents prompts and decoding
        patch.setattr(doctor, "SHAPES", doctor.SHAPES[1:2])
        patch.setattr(doctor, "INDEXER", IndexerSpec(32, 128, 64))
        patch.setattr(latent_check, "PHASES", latent_check.PHASES[:3:2])
        install(patch, Path(folder), Machine(architecture=ARCHITECTURE, allow_float32=True))
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
