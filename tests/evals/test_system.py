"""What answers the prompts of an evaluation."""

import pytest

from drafters.suffix.drafter import SuffixDrafter
from evals.runner import num_captured
from evals.system import LocalSystem
from specdec.base.config import EngineConfig
from specdec.engine.capture import prefill_graphs
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.capture.warmup import set_serving
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.helpers.recorder import Recorder
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts, tiny_tokenizer


@pytest.mark.parametrize(("drafts", "temperature"), [(0, 0.0), (3, 0.0), (3, 0.9)])
def test_a_warm_up_leaves_nothing_to_capture_and_nothing_to_copy(
    drafts: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests at once that end one by one; catches steps that are captured while answers are
    timed, and drafts copied from the warm-up.
    """
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 8)
    verifier, found = paged_verifier(plain_model("llama"), 4), []
    prompts = [prompt * 3 for prompt in random_prompts(7, longest=9)]
    samplings = [
        SamplingParams(max_tokens=90 + number, temperature=temperature, seed=number)
        for number in range(len(prompts))
    ]
    for warms_up in (False, True):
        config = EngineConfig(max_num_seqs=3, num_draft_tokens=drafts or None)
        decoder = SpecDecoder(
            verifier, tiny_tokenizer(), SuffixDrafter() if drafts else None, config
        )
        engine = decoder.engine
        steady_len = verifier.attention.steady_len
        steps = engine.runner.graphs = StepGraphs(
            Recorder(), engine.slots, engine.runner.step_table, steady_len=steady_len
        )
        prefills = engine.runner.prefill_graphs = PrefillGraphs(
            Recorder(), engine.slots, engine.runner.prefill_step, dtype=verifier.dtype, max_rows=64
        )
        system = LocalSystem(decoder)
        if warms_up:
            system.warm_up(prompts, samplings)
        captured = [graphs.num_captured for graphs in (steps, prefills)]
        assert num_captured(engine) == sum(captured)
        set_serving(engine, False)
        answers = sorted(system.answers(prompts, samplings), key=lambda answer: answer.number)
        again = [graphs.num_captured for graphs in (steps, prefills)]
        assert (again == captured) == warms_up and min(again) > 0
        found.append([(one.result.token_ids, one.result.stats) for one in answers])
        decoder.close()
    assert found[0] == found[1]
