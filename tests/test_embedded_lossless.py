"""The embedded model in float32: every drafter and batch size against Hugging Face `generate`,
token for token.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import load_dflash
from drafters.dflash.model import DFlashModel
from drafters.ngram import load_ngram
from specdec.base.config import CacheConfig, EngineConfig
from specdec.model.core import Drafter, Verifier
from specdec.session.decoder import SpecDecoder
from tests.helpers.scripted import ScriptedDrafter
from verifiers.load import load_verifier
from verifiers.weights.embedded import embedded_model_path

pytestmark = pytest.mark.slow

MAX_TOKENS = 13
K = 5
QUESTIONS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a string.",
    "What is the capital of France, and which river runs through it?",
    "List the first eight prime numbers, separated by commas.",
)


@pytest.fixture(scope="module")
def target() -> tuple[Verifier, SpecDecoder]:
    """The embedded model behind our attention, and a plain decoder for its tokenizer."""
    verifier, tokenizer = load_verifier("embedded", device=torch.device("cpu"), dtype=torch.float32)
    return verifier, SpecDecoder(
        verifier,
        tokenizer,
        None,
        EngineConfig(num_draft_tokens=None, max_num_seqs=1, cache=CacheConfig(memory_bytes=2**26)),
    )


@pytest.fixture(scope="module")
def outputs(target: tuple[Verifier, SpecDecoder]) -> dict[tuple[int, ...], list[int]]:
    """What transformers alone writes, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    found = {}
    for question in QUESTIONS:
        prompt = target[1].tokenize([{"role": "user", "content": question}])
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
            )
        found[tuple(prompt)] = output[0, len(prompt) :].tolist()
    return found


@pytest.fixture(scope="module")
def random_dflash(
    target: tuple[Verifier, SpecDecoder], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A DFlash checkpoint with random weights for the embedded model."""
    verifier = target[0]
    config = DFlashConfig(
        block_size=K + 1,
        mask_token_id=verifier.vocab_size - 1,
        target_layer_ids=(1, 14, 27),
        windows=(None, 16),
        causal=(False, True),
        hidden_size=verifier.hidden_size,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=verifier.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=8192,
        num_target_layers=verifier.num_layers,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("dflash") / "random"
    write_checkpoint(
        path, config, DFlashModel(config).state_dict(), layout="z-lab", dtype=torch.float32
    )
    return path


MakeDrafter = Callable[[Verifier, dict[tuple[int, ...], list[int]], Path], Drafter | None]
DRAFTERS: dict[str, MakeDrafter] = {
    "plain": lambda verifier, outputs, path: None,
    "ngram": lambda verifier, outputs, path: load_ngram(None, verifier=verifier),
    "dflash": lambda verifier, outputs, path: load_dflash(path, verifier=verifier),
    "right": lambda verifier, outputs, path: ScriptedDrafter(outputs, K),
    "wrong": lambda verifier, outputs, path: ScriptedDrafter(
        outputs, K, [set(range(K)), *({i} for i in range(K))]
    ),
}


WAYS = [("plain", 4, 4), ("ngram", 3, 4), ("dflash", 4, 4), ("right", 1, 2), ("wrong", 3, 4)]
"""Drafters, each in the largest batch or where requests wait; `tests/test_lossless.py` has them in
every batch, of tiny models.
"""


def test_greedy_equals_generate(
    subtests: pytest.Subtests,
    target: tuple[Verifier, SpecDecoder],
    outputs: dict[tuple[int, ...], list[int]],
    random_dflash: Path,
) -> None:
    """Real prompts, 13 tokens each; those beyond the batch size wait for a slot.

    The wrong drafter is wrong at every position for one prompt, and at one chosen position for
    the others. All in one test, since the reference takes as long as all of it, and would be
    computed by each worker that has a part.
    """
    verifier, plain = target
    for drafter, batch, num_prompts in WAYS:
        config = EngineConfig(
            num_draft_tokens=None, max_num_seqs=batch, cache=CacheConfig(memory_bytes=2**28)
        )
        with subtests.test(drafter=drafter, batch=batch):
            decoder = SpecDecoder(
                verifier,
                plain.tokenizer,
                DRAFTERS[drafter](verifier, outputs, random_dflash),
                config,
            )
            results = decoder.generate(
                [list(prompt) for prompt in outputs][:num_prompts], max_tokens=MAX_TOKENS
            )
            assert isinstance(results, list)
            assert [result.token_ids for result in results] == list(outputs.values())[:num_prompts]
            if drafter == "right":
                assert (
                    min(
                        result.stats.tau
                        for result in results
                        if len(result.token_ids) == MAX_TOKENS
                    )
                    > K
                )
