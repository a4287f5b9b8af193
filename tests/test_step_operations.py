"""How many device operations a captured step consists of beside its decoder layers.

Each costs an accelerator about as long as a small layer's kernel, and nothing else notices when one
is added. Counted is the step as it is captured on a GPU, with Triton's kernels in the layers; none
of them runs, so tokens mean nothing here.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from triton.runtime.jit import JITFunction

from drafters.draft_model.drafter import DraftModel
from specdec.attention.triton import fa as triton_fa
from specdec.attention.triton.fa import TritonFaBackend
from specdec.engine.capture.graphs import StepGraphs
from specdec.kernels import triton_argmax
from specdec.layers import decoder, linear_choice, triton_linear
from specdec.layers.ops import fused
from specdec.model.core import Drafter, Verifier
from specdec.sampling import argmax, sampler, scores, triton_sampler
from specdec.sampling.params import SamplingParams
from specdec.sampling.trees import candidates, triton_candidates
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import random_dflash
from verifiers.config.shape import attention_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

ROOT = Path(__file__).parents[1]
MEMORY_ONLY = {
    "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "unbind",
}  # fmt: skip
"""Operations that compute nothing, beside views."""


class OperationCounter(TorchDispatchMode):
    """Captures by counting the operations of a launch outside decoder layers, by the function of
    ours that calls them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            # an accelerator sees what an operation is made of
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if not func.is_view and name not in MEMORY_ONLY:
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        if self.on:
            frame = sys._getframe(1)
            while not any(
                Path(frame.f_code.co_filename).is_relative_to(ROOT / part)
                for part in ("specdec", "drafters", "verifiers")
            ):
                assert frame.f_back is not None
                frame = frame.f_back
            self.counts[
                f"{Path(frame.f_code.co_filename).relative_to(ROOT)}, {frame.f_code.co_name}:"
                f" {name}"
            ] += 1

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        launch()
        self.counts.clear()
        with self:
            self.on = True
            launch()
            self.on = False
        return launch


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> OperationCounter:
    """Counts Triton's kernels along with torch's operations, and leaves out decoder layers."""
    made = OperationCounter()
    layers = decoder.Decoder.__call__

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        on, made.on = made.on, False
        outputs = layers(*args, **kwargs)
        made.on = on
        return outputs

    monkeypatch.setattr(decoder.Decoder, "__call__", uncounted)
    kernel = triton_argmax.choose_slice

    def filled(keys: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        indices, finite = kernel(keys, shape)
        on, made.on = made.on, False
        indices.zero_()  # a token, at least
        finite.fill_(True)  # or the request would end
        made.on = on
        return indices, finite

    found = triton_candidates.candidates

    def valid(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        token_ids, logprobs = found(*args, **kwargs)
        on, made.on = made.on, False
        token_ids.copy_(torch.arange(token_ids.shape[-1]))  # siblings differ
        logprobs.fill_(-1.0)
        made.on = on
        return token_ids, logprobs

    of_layers = fused.FUSED_LAYERS, fused.FEW_ROWS, fused.EMBEDDING, fused.GROUPED_CONVOLUTION
    for used in (argmax.KERNEL, sampler.KERNEL, candidates.KERNEL, *of_layers):
        monkeypatch.setattr(used, "runs_on", lambda *where: True)
    monkeypatch.setattr(triton_candidates, "candidates", valid)
    for user in (triton_argmax, triton_sampler):
        monkeypatch.setattr(user, "choose_slice", filled)
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **options: made.count(self.fn.__name__)
    )
    monkeypatch.setattr(triton_fa, "unavailable_reasons", lambda device: [])
    monkeypatch.setattr(linear_choice, "can_block", lambda weight: False)  # a layout for CPUs
    monkeypatch.setattr(scores, "lowered_in_cache", scores.lowered)  # a way for CPUs
    for module in (triton_fa, triton_linear):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    return made


@pytest.mark.parametrize(
    ("k", "params", "most"),
    [
        (15, {}, 47),
        (3, {}, 58),  # positions of the block, and of fewer verified rows
        (0, {}, 30),
        (15, {"temperature": 0.8}, 50),
        # what is dropped, of the drafts as well
        (15, {"temperature": 0.8, "top_k": 20, "top_p": 0.95}, 54),
        (0, {"temperature": 0.8}, 33),
        (15, {"repetition_penalty": 1.3}, 66),
    ],
)
def test_operations_beside_the_layers(
    counter: OperationCounter, k: int, params: dict[str, Any], most: int
) -> None:
    """A DFlash step of one request: 4 products, 2 embeddings, 4 kernels for the drafter's context,
    2 per arg max, and the rest.
    """
    verifier = model_on_kernels("llama")
    check_operations(
        counter, verifier, random_dflash(verifier, block_size=16), most, params, num_draft_tokens=k
    )


@pytest.mark.parametrize(
    ("shape", "most"),
    [({"num_draft_tokens": 1}, 79), ({"num_draft_tokens": 7}, 126), ({"tree_nodes": 15}, 325)],
)
def test_operations_of_a_draft_model(
    counter: OperationCounter, shape: dict[str, Any], most: int
) -> None:
    """Each draft takes 8 operations beside its layers, and a level of a tree 20."""
    verifier = model_on_kernels("qwen2")
    check_operations(
        counter, verifier, DraftModel(model_on_kernels("qwen2"), verifier), most, {}, **shape
    )


def model_on_kernels(name: str) -> Verifier:
    """A tiny model whose layers are Triton's kernels."""
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
    )
    spec = attention_spec(config, device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16)
    return verifier_for(model, name=name, backend=TritonFaBackend(spec))


def check_operations(
    counter: OperationCounter,
    verifier: Verifier,
    drafter: Drafter,
    most: int,
    params: dict[str, Any],
    **config: Any,
) -> None:
    """Captures a step of one request, which has at most so many operations."""
    engine = tiny_engine(verifier, drafter, **config)
    engine.runner.graphs = StepGraphs(counter, engine.slots, engine.runner.step_table)
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True, **params))
    while engine.has_work and not counter.counts:
        engine.step()
    listing = "\n".join(f"{count:>3} {place}" for place, count in sorted(counter.counts.items()))
    assert 0 < sum(counter.counts.values()) <= most, listing
