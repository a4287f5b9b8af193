"""What training says the shipped drafter will do, and what the engine does with it."""

import pytest
import torch

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import expanded
from drafters.shipped import shipped_drafter_path
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.finish import engine_run
from drafters.training.loss.evaluate import replay
from drafters.training.target import Target
from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.base.registry import VERIFIERS, resolve
from specdec.session.decoder import SpecDecoder

QUESTIONS = (
    "Count from 1 to 30.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
)


@pytest.mark.slow
def test_the_forecast_of_the_shipped_drafter_is_what_the_engine_does() -> None:
    """Greedy and sampled: catches a replay that ranks, draws or walks otherwise."""
    config = TrainConfig(
        out="unused",
        device="cpu",
        dtype="float32",
        max_tokens=16,
        batch_size=6,
        anchors=8,
        loss_rows=90,
    )
    shape = BlockShape(16, 15)
    verifier, tokenizer = resolve(VERIFIERS, "hf", "verifier")(
        "embedded", device=torch.device("cpu"), dtype=torch.float32, attention="auto", fuse=False
    )
    tokenize = SpecDecoder(verifier, tokenizer, None, EngineConfig(num_draft_tokens=None)).tokenize
    prompts = [tokenize([{"role": "user", "content": question}]) for question in QUESTIONS]
    shipped, tensors = read_checkpoint(shipped_drafter_path())
    model = DFlashModel(shipped)
    model.load_state_dict(
        {name: tensor.float() for name, tensor in expanded(tensors, verifier).items()}
    )
    target = Target(verifier, shipped.target_layer_ids)
    for temperature in (0.0, 1.0):
        asked = [
            Answer(prompt, (), temperature=temperature, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        tau, answers = engine_run(config, shipped_drafter_path(), asked, shape)
        heldout = AnswerSet(
            answers,
            device=torch.device("cpu"),
            max_length=999,
            bucket=1,
            mask_token_id=shipped.mask_token_id,
        )
        assert replay(model, target, heldout, config).tau(
            shape, sampled=temperature > 0
        ) == pytest.approx(tau, rel=0.02)
        assert tau > 1.5
