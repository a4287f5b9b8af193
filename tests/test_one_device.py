"""Everything of a step lies on the target's device.

Without an accelerator, `meta` is a device of its own: no value can be read from it, and what mixes
it with the CPU is caught.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from drafters.ngram import NGramDrafter
from specdec.attention.selector import select_backend
from specdec.model.core import Drafter, Verifier
from specdec.sampling.edits import Edits
from specdec.sampling.tensors import SamplingPlan
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import random_dflash
from verifiers.config.shape import backend_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

META = torch.device("meta")
PLANS = {
    "greedy": SamplingPlan(False, True, 0, False, False, False),
    "filtered": SamplingPlan(False, False, 32, True, True, True),
    "penalized": SamplingPlan(
        True, False, 0, False, False, True, top_logprobs=4, edits=8, counted=True
    ),
}


class OneDevice(TorchDispatchMode):
    """Refuses operations that read or make a tensor anywhere else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        strays = [
            x
            for x in tree_leaves((args, kwargs, outputs))
            if isinstance(x, torch.Tensor) and x.device.type != "meta"
        ]
        assert not strays, (
            f"{func} has {strays[0].dtype} {list(strays[0].shape)} on {strays[0].device}"
        )
        return outputs


def make_verifier(name: str, *, fuse: bool) -> Verifier:
    """A tiny target without weights."""
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation=ATTENTION_NAME, dtype=torch.float32
    ).to(META)
    spec = backend_spec(model.config, device=META, dtype=torch.float32, block_size=4)
    return verifier_for(model, name=name, backend=select_backend("torch_ref", spec), fuse=fuse)


@pytest.mark.parametrize(
    ("name", "fuse"), [("llama", True), ("qwen3", True), ("llama", False), ("gemma2", False)]
)
def test_a_step_stays_on_its_device(name: str, fuse: bool) -> None:
    """A tensor made on the host inside a step stops an accelerator's graph capture, or makes every
    step wait.
    """
    verifier = make_verifier(name, fuse=fuse)
    drafters: list[Drafter | None] = [
        None,
        NGramDrafter(max_draft_tokens=4),
        random_dflash(verifier),
    ]
    for drafter in drafters:
        options = {"num_draft_tokens": None, "draft_sampling": "probabilistic"}
        engine = tiny_engine(verifier, drafter, cache_bytes=2**20, max_num_seqs=4, **options)
        state = engine.slots.sampling
        state.seen = torch.zeros(5, verifier.vocab_size, dtype=torch.bool, device=META)
        state.counts, state.edits = (
            torch.zeros_like(state.seen, dtype=torch.int32),
            Edits.none(5, META),
        )
        slots = torch.empty(3, dtype=torch.int64, device=META)
        if drafter is drafters[-1]:
            # A prefill has brought its frequencies over.
            drafter.network.angles(slots)  # type: ignore[union-attr]
        for plan in PLANS.values():
            with torch.inference_mode(), OneDevice():
                sampling = engine.slots.sampling.select(slots, plan)
                batch = engine.slots.gather(
                    slots, sampling, shape=engine.planner.shapes[-1], max_seq_len=64
                )
                table = engine.runner.step_table(batch)
                engine.slots.rest_padding()
            assert table.shape[0] == 3
