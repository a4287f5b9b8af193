"""On a CUDA or ROCm GPU: the step under torch's own detector of waits, and captured steps against
steps launched one by one.

Skipped elsewhere, where stand-ins take their place (test_no_sync, test_graphs).
"""

from functools import partial
from typing import Any

import pytest
import torch

from drafters.composed.drafter import ComposedDrafter
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from drafters.xpress.refiner import XPressConfig
from specdec.attention.selector import select_backend
from specdec.base.config import CacheConfig, DraftSampling, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.model.batch import DecodeBatch
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SAMPLINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(
        max_tokens=24, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, logprobs=True
    ),
    SamplingParams(max_tokens=24, repetition_penalty=1.2),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3),
]


def guarded(engine: SpecEngine) -> SpecEngine:
    """The engine with a step that raises when the host waits for the device; a capture has a
    detector of its own.
    """
    launch: Any = engine.runner.step

    def strict(batch: DecodeBatch) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return launch(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.step = strict  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "dflash", "dspark", "dflash2", "xpress"])
@pytest.mark.parametrize("backend", ["torch_ref", "triton_fa"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_captured_steps_equal_eager_ones_and_nothing_waits(
    name: str, backend: str, drafter: str, how: DraftSampling
) -> None:
    """Float32; catches host values baked into a graph, waits in the step, and state that a capture
    disturbs.
    """
    verifier = paged_verifier(
        plain_model(name), 16, device="cuda", backend=partial(select_backend, backend)
    )
    outputs = []
    for graphs in (False, True):
        heads: dict[str, HeadConfig] = {
            "dspark": MarkovConfig(8, "rnn"),
            "dflash2": SelectorConfig(8, 6),
            "xpress": XPressConfig(8, num_passes=3),
        }
        drafts = {"none": None, "ngram": NGramDrafter()}.get(drafter) or random_dflash(
            verifier, head=heads.get(drafter)
        )
        cache = CacheConfig(memory_bytes=2**26)
        engine = guarded(
            SpecEngine(
                verifier,
                drafts,
                EngineConfig(
                    num_draft_tokens=None,
                    max_num_seqs=3,
                    graphs=graphs,
                    draft_sampling=how,
                    cache=cache,
                ),
            )
        )
        requests = [
            engine.add_request(prompt, SAMPLINGS[i % 4])
            for i, prompt in enumerate(random_prompts(8))
        ]
        finish(engine)
        assert bool(engine.runner.graphs and engine.runner.graphs.graphs) == graphs
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


def test_captured_compositions_equal_eager_ones() -> None:
    """Wide trees of copies and of a model, in batches that change; catches drafts that are put
    together before they are there.
    """
    verifier = paged_verifier(
        plain_model("llama"), 16, device="cuda", backend=partial(select_backend, "triton_fa")
    )
    outputs = []
    for graphs, tree_nodes in ((False, None), (False, 63), (True, 63)):
        drafter = ComposedDrafter([SuffixDrafter(), random_dflash(verifier)])
        cache = CacheConfig(memory_bytes=2**26)
        config = EngineConfig(
            num_draft_tokens=None, tree_nodes=tree_nodes, max_num_seqs=8, graphs=graphs, cache=cache
        )
        engine = guarded(SpecEngine(verifier, drafter, config))
        # of which there is much to copy
        prompts = [prompt * 8 for prompt in random_prompts(20, longest=9)]
        requests = [
            engine.add_request(prompt, SamplingParams(max_tokens=24 + 5 * i))
            for i, prompt in enumerate(prompts)
        ]
        finish(engine)
        assert bool(engine.runner.graphs and engine.runner.graphs.graphs) == graphs
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]
