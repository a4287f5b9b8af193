"""How long requests may be: what positions were made for, what is asked for, and the tokens of
`generate` at every length.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafters.draft_model.drafter import DraftModel
from drafters.mtp.load import load_mtp
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.model.core import ContextLimits
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import run_all
from tests.helpers.recorder import Recorder
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_greedy, plain_model
from tests.helpers.tiny_predictions import CASES, reference, write_target
from verifiers.config.shape import context_limits
from verifiers.load import load_verifier

STATED, MORE, K = 40, 10, 3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
NESTED = {"sliding_attention": PLAIN, "full_attention": LINEAR}
PARTIAL = {"partial_rotary_factor": 0.5}
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=130,
    max_prefill_tokens=13,
    num_draft_tokens=None,
    cache=CacheConfig(memory_bytes=2**21),
)
PROMPTS = [[3 + i * 7 % 90 for i in range(length)] for length in (20, STATED - 5, 56, 55)]
"""Within the stated positions, across them, and beyond; all begin alike."""


def target(name: str, rope: dict[str, Any], positions: int = STATED, **changes: Any) -> Any:
    model = plain_model(
        name, 0, max_position_embeddings=positions, rope_parameters=copy.deepcopy(rope), **changes
    )
    model.generation_config.eos_token_id = None
    return model


def decoded(engine: SpecEngine, prompts: list[list[int]]) -> list[list[int]]:
    return run_all(engine, prompts, max_tokens=MORE, ignore_eos=True)


def check_as_generate(
    name: str, rope: dict[str, Any], *, fuse: bool = True, captured: bool = False
) -> None:
    """Tokens of prompts that are prefilled in chunks, then begin with what the cache has."""
    # A model that has seen a long text keeps frequencies for it, so that comes last.
    model = target(name, rope)
    expected = [plain_greedy(model, prompt, MORE) for prompt in PROMPTS[:2]]
    expected += [plain_greedy(target(name, rope), prompt, MORE) for prompt in PROMPTS[2:]]
    drafter = ScriptedDrafter(
        {tuple(p): o for p, o in zip(PROMPTS, expected, strict=True)}, K, [{0}, {2}, set()]
    )
    engine = SpecEngine(paged_verifier(target(name, rope), fuse=fuse), drafter, CONFIG)
    if captured:
        engine.runner.host_may_look = False
        engine.runner.graphs = StepGraphs(Recorder(), engine.slots, engine.runner.step_table)
    for _ in range(2):
        assert decoded(engine, PROMPTS) == expected
    assert engine.prefix_counts.found > 0 or name == "qwen3_5"


@pytest.mark.parametrize(
    ("name", "rope", "fuse"),
    [
        ("llama", YARN, True),
        ("llama", LINEAR, True),
        ("llama", DYNAMIC, True),
        ("llama", PLAIN, True),
        ("llama", YARN, False),
        ("qwen3_5", DYNAMIC | PARTIAL, True),
        ("qwen3_5", YARN | PARTIAL, True),
        ("gemma3", NESTED, True),
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, True),
    ],
    ids=lambda value: value.get("rope_type", "nested") if isinstance(value, dict) else str(value),
)
def test_any_length_decodes_as_generate_does(name: str, rope: dict[str, Any], fuse: bool) -> None:
    check_as_generate(name, rope, fuse=fuse)


def test_captured_steps_ask_every_row_for_its_length() -> None:
    check_as_generate("llama", DYNAMIC, captured=True)


def test_frequencies_that_grow_are_not_shared_by_prompts_of_other_lengths() -> None:
    """Two prompts that begin alike have other keys there, but for those within the stated
    positions.
    """
    engine = SpecEngine(paged_verifier(target("llama", DYNAMIC)), None, CONFIG)
    for prompt, found in (
        (PROMPTS[0], 0),
        (PROMPTS[1], 20),
        (PROMPTS[2], 20),
        (PROMPTS[3], 20),
        (PROMPTS[3], 20 + 52),
    ):
        decoded(engine, [prompt])
        assert engine.prefix_counts.found == found


@pytest.mark.parametrize(
    ("rope", "usual", "extended"),
    [
        (PLAIN, 40, 40),
        (YARN, 128, 128),
        (YARN | {"factor": 1.0}, 40, 40),
        (LLAMA3, 40, 40),
        (LINEAR, 40, 120),
        (LINEAR | {"original_max_position_embeddings": 30}, 90, 90),
        (DYNAMIC, 40, 120),
        (NESTED, 40, 40),
        ({"sliding_attention": PLAIN, "full_attention": YARN}, 128, 128),
        ({"sliding_attention": None, "full_attention": YARN}, 128, 128),
    ],
)
def test_what_positions_are_made_for(rope: dict[str, Any], usual: int, extended: int) -> None:
    config: Any = SimpleNamespace(max_position_embeddings=STATED, rope_parameters=rope)
    assert context_limits(config, own=True) == ContextLimits(usual, extended)


@pytest.mark.parametrize(
    ("own", "rope", "most"),
    [
        (False, YARN, None),
        (False, {}, STATED),
        (False, DYNAMIC, STATED),
        (True, {}, None),
        (True, DYNAMIC, None),
    ],
)
def test_where_positions_end(own: bool, rope: dict[str, Any], most: int | None) -> None:
    """A table of positions has an end; RoPE, and no positions at all, have none."""
    config: Any = SimpleNamespace(max_position_embeddings=STATED, rope_parameters=rope)
    assert context_limits(config, own=own).most == most


def test_what_is_asked_for_is_had_or_said(caplog: pytest.LogCaptureFixture) -> None:
    """And a prompt that is too long is told what helps."""
    verifier = paged_verifier(target("llama", LINEAR))

    def engine(asked: int | None) -> SpecEngine:
        return SpecEngine(
            verifier, None, EngineConfig(max_num_seqs=1, max_model_len=asked, cache=CONFIG.cache)
        )

    for asked, had in ((None, 40), (33, 33), (120, 120), (121, 121)):
        caplog.clear()
        built = engine(asked)
        assert built.max_model_len == had and bool(caplog.messages) == (had > 120)
        advice = (
            "or raise max_model_len, which may be 120$"
            if had < 120
            else "beyond what the model was made for$"
        )
        with pytest.raises(CapacityError, match=advice):
            built.add_request([5] * had)
    assert caplog.messages == [
        "max_model_len is 121 and llama was made for 120 tokens: what it writes beyond may be poor"
    ]


def test_a_table_of_positions_is_never_left() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_positions=STATED, n_embd=32, n_layer=2, n_head=2)
    verifier = paged_verifier(GPT2LMHeadModel._from_config(config, attn_implementation="eager"))
    with pytest.raises(
        InvalidInputError, match="41 and the positions of 'gpt2' end at 40; ask for no more"
    ):
        SpecEngine(verifier, None, EngineConfig(max_model_len=STATED + 1))
    engine = SpecEngine(verifier, None, EngineConfig(max_model_len=STATED, cache=CONFIG.cache))
    with pytest.raises(CapacityError, match="for prompt and output together; shorten it"):
        engine.add_request([5] * STATED)


def test_a_draft_model_of_fewer_positions_is_no_hindrance() -> None:
    """It drafts as far as it goes, and outputs are those of the target."""
    model = target("llama", YARN)
    expected = [plain_greedy(model, prompt, MORE) for prompt in PROMPTS]
    verifier = paged_verifier(model)
    drafter = DraftModel(paged_verifier(target("llama", PLAIN)), verifier, max_draft_tokens=K)
    assert drafter.longest == STATED
    assert decoded(SpecEngine(verifier, drafter, CONFIG), PROMPTS) == expected


def test_prediction_layers_of_a_stretched_target_are_no_hindrance(tmp_path: Path) -> None:
    """They are rotated as the target is, from its file."""
    ref = reference("deepseek_v3", max_position_embeddings=STATED, rope_parameters=dict(YARN))
    write_target(tmp_path, ref, CASES["deepseek_v3"][0])
    ref.target.generation_config.eos_token_id = None
    expected = [plain_greedy(ref.target, prompt, MORE) for prompt in PROMPTS]
    verifier, _ = load_verifier(
        tmp_path, device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    assert verifier.context == ContextLimits(128, 128)
    assert decoded(SpecEngine(verifier, load_mtp(verifier=verifier), CONFIG), PROMPTS) == expected


def test_longrope_in_the_midst_of_a_request_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Once per engine, with the number that avoids it."""
    engine = SpecEngine(paged_verifier(plain_model("phi3_long")), None, CONFIG)
    caplog.clear()
    for prompt, tokens in ((PROMPTS[0], 18), (PROMPTS[2], 20)):
        engine.add_request(prompt, SamplingParams(max_tokens=tokens))
    assert not caplog.messages
    for _ in range(2):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=19))
    (said,) = caplog.messages
    assert said.startswith("a prompt of 20 tokens") and said.endswith(
        "max_tokens of 18 or less keeps the first ones"
    )
