"""Drafting makes no tensor on the host and never waits for the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafters.load import load_drafter
from drafters.mtp.load import load_mtp
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_assistants import gemma4_target, write_assistant
from tests.helpers.tiny_models import random_prompts
from tests.helpers.tiny_predictions import CASES, reference, write_target
from tests.test_no_sync import guarded_run
from tests.test_one_device import META, PLANS, OneDevice
from verifiers.load import load_verifier

Make = Callable[[torch.device], tuple[Verifier, Drafter]]


@pytest.fixture(params=["layers", "assistant"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """What loads a target and a drafter to a device."""
    assists = request.param == "assistant"
    if assists:
        write_assistant(
            tmp_path / "assistant", gemma4_target(tmp_path / "target", "gemma4"), clusters=True
        )
    else:
        write_target(tmp_path / "target", reference("qwen3_5"), CASES["qwen3_5"][0])

    def load(device: torch.device) -> tuple[Verifier, Drafter]:
        target, _ = load_verifier(
            tmp_path / "target",
            device=device,
            dtype=torch.float32,
            attention="torch_ref",
            block_size=4,
        )
        return target, load_drafter(
            tmp_path / "assistant", verifier=target
        ) if assists else load_mtp(verifier=target)

    return load


@pytest.mark.parametrize("draft_sampling", ["coupled", "probabilistic"])
def test_the_host_never_waits(make: Make, draft_sampling: str) -> None:
    """Point masses write what the target alone would, whatever they are."""
    verifier, drafter = make(torch.device("cpu"))
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)
    outputs = guarded_run(verifier, drafter, random_prompts(3), sampling, draft_sampling)
    if draft_sampling == "coupled":
        assert outputs == guarded_run(verifier, None, random_prompts(3), sampling)


def test_a_step_stays_on_its_device(make: Make) -> None:
    """With filters and without, on a device that is not the host."""
    verifier, drafter = make(META)
    engine = tiny_engine(verifier, drafter, num_draft_tokens=3, max_num_seqs=4, cache_bytes=2**20)
    slots = torch.empty(3, dtype=torch.int64, device=META)
    for plan in (PLANS["greedy"], PLANS["filtered"]):
        with torch.inference_mode(), OneDevice():
            sampling = engine.slots.sampling.select(slots, plan)
            batch = engine.slots.gather(
                slots, sampling, shape=engine.planner.shapes[-1], max_seq_len=64
            )
            assert engine.runner.step_table(batch).shape[0] == 3
