"""What answers the prompts of an evaluation."""

import pytest

from drafters.suffix.drafter import SuffixDrafter
from evals.runner import num_captured
from evals.system import LocalSystem
from specdec.base.config import EngineConfig
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.warmup import set_serving
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.helpers.recorder import Recorder
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts, tiny_tokenizer


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_warm_up_leaves_nothing_to_capture_and_nothing_to_copy(temperature: float) -> None:
    """Three requests at once that end one by one; catches steps that are captured while answers are
    timed, and drafts copied from the warm-up.
    """
    verifier, found = paged_verifier(plain_model("llama"), 4), []
    prompts = [prompt * 3 for prompt in random_prompts(7, longest=9)]
    samplings = [
        SamplingParams(max_tokens=90 + number, temperature=temperature, seed=number)
        for number in range(len(prompts))
    ]
    for warms_up in (False, True):
        config = EngineConfig(max_num_seqs=3, num_draft_tokens=3)
        decoder = SpecDecoder(verifier, tiny_tokenizer(), SuffixDrafter(), config)
        engine = decoder.engine
        steady_len = verifier.attention.steady_len
        engine.runner.graphs = StepGraphs(
            Recorder(), engine.slots, engine.runner.step_table, steady_len=steady_len
        )
        system = LocalSystem(decoder)
        if warms_up:
            system.warm_up(prompts, samplings)
        captured = num_captured(engine)
        set_serving(engine, False)
        answers = sorted(system.answers(prompts, samplings), key=lambda answer: answer.number)
        assert (num_captured(engine) == captured) == warms_up
        found.append([(one.result.token_ids, one.result.stats) for one in answers])
        decoder.close()
    assert found[0] == found[1]
