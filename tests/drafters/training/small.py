"""A trainer of a tiny drafter in memory: for what needs neither files of answers nor an engine."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.families.choice import TrainedModel
from drafters.training.loss.blocks import SequenceBatch
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from specdec.attention.backend import AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from tests.drafters.tiny import HIDDEN, TINY, VOCAB, tiny_model, tiny_target

CPU = torch.device("cpu")


def sequences(
    token_ids: Tensor, prompt_lens: list[int] | None = None, lengths: list[int] | None = None
) -> SequenceBatch:
    """Whole rows of `token_ids` int64 [S, T] without a prompt, unless said otherwise."""
    lengths = lengths or [token_ids.shape[1]] * len(token_ids)
    starts, ends = torch.tensor(prompt_lens or [0] * len(lengths)), torch.tensor(lengths)
    places = torch.arange(token_ids.shape[1])
    answered = (places >= starts[:, None]) & (places < ends[:, None])
    return SequenceBatch(token_ids, starts, ends, lengths, torch.where(answered, ends[:, None], 0))


class TinyVerifier:
    """What `Target` needs of a loaded target."""

    name, embedding_scale, final_softcap = "tiny", 1.0, None
    device, dtype = CPU, torch.float32
    hidden_size, weight_bytes = HIDDEN, 7
    kv_specs: tuple[()] = ()
    attention = TorchRefBackend(
        AttentionSpec(device, dtype, num_heads=4, num_kv_heads=2, head_dim=8, block_size=16)
    )

    def __init__(self, model: Any = None) -> None:
        self.model: Any = model or tiny_target()
        self.layers = self.model.model.layers
        self.num_layers, self.vocab_size = len(self.layers), self.model.config.vocab_size

    def keep_layers(self, count: int) -> None:
        del self.layers[count:]

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.model.model.embed_tokens.weight)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        return logits


def small_trainer(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    make: Callable[[Any], TrainedModel] = lambda verifier: tiny_model(TINY),
    **changes: Any,
) -> Trainer:
    """A run in `folder / "run"` on 12 random answers, in steps of 4, of the drafter that `make`
    gives for a target; by default a DFlash drafter.
    """
    options: dict[str, Any] = {"batch_size": 4, "anchors": 4, "lr": 2e-3}
    config = TrainConfig(out=str(folder / "run"), **options | changes)
    verifier = TinyVerifier(tiny_target().to(dtype))
    verifier.dtype = dtype
    source = Random(0)
    rows = [[source.randrange(VOCAB - 1) for _ in range(source.randint(8, 30))] for _ in range(12)]
    answers = [Answer(row[:3], row[3:]) for row in rows]
    made = AnswerSet(answers, device=CPU, max_length=64, bucket=8, mask_token_id=VOCAB - 1)
    model = make(verifier)
    target = Target(verifier, model.config.target_layer_ids, distribution=config.uses_teacher)
    return Trainer(config, model, target, made, made)
