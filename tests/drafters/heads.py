"""Tiny drafters with a head, and DSpark's formulas as its paper has them, slot by slot."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import BoundDFlash, load_dflash
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig
from tests.drafters.dflash.test_drafter import dense_hidden
from tests.drafters.tiny import TINY, FakeVerifier, Rig, tiny_model, tiny_tensors, write_tiny_dflash

ANCHORS, LENGTHS = (3, 5), (9, 14)
"""Of the two requests of `headed`."""


def with_head(head: HeadConfig, **changes: object) -> DFlashConfig:
    """`TINY` with a head."""
    return replace(TINY, head=head, **changes)  # type: ignore[arg-type]


def head_tensors(config: DFlashConfig) -> dict[str, Tensor]:
    """Random weights, the head's so large that it decides much."""
    plain = tiny_tensors(replace(config, head=None)).keys()
    return {
        name: tensor if name in plain else 5 * tensor
        for name, tensor in tiny_tensors(config).items()
    }


def context(config: DFlashConfig) -> list[Tensor]:
    """Features of both requests' texts."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(length, config.feature_size, generator=generator) for length in LENGTHS]


def headed(
    path: Path,
    config: DFlashConfig,
    draft_sampling: str = "greedy",
    tensors: dict[str, Tensor] | None = None,
) -> tuple[BoundDFlash, Rig]:
    """A drafter read from its checkpoint, with the context of both requests."""
    write_tiny_dflash(path, config, tensors=tensors or head_tensors(config))
    verifier = FakeVerifier()
    rig = Rig(load_dflash(path, verifier=verifier), verifier, draft_sampling=draft_sampling)
    for request, features in enumerate(context(config)):
        rig.prefill(request, features, 0, torch.arange(len(features)))
    assert isinstance(rig.bound, BoundDFlash)
    return rig.bound, rig


def backbone(config: DFlashConfig, request: int) -> tuple[Tensor, Tensor]:
    """Hidden states [K, H] and logits [K, V] of a request's slots, from the module alone and
    without a cache; see `block_rows`.
    """
    rows = block_rows(config, request)
    hidden = rows if config.sample_from_anchor else rows[1:]
    return hidden, FakeVerifier().head(hidden)


def block_rows(config: DFlashConfig, request: int) -> Tensor:
    """Hidden states [B, H] of all rows of a request's block."""
    verifier = FakeVerifier()
    model = tiny_model(config)
    model.load_state_dict(head_tensors(config))
    block = torch.tensor([ANCHORS[request], *[config.mask_token_id] * (config.block_size - 1)])
    return dense_hidden(model, context(config)[request], verifier.embed(block))


class PaperMarkov:
    """A Markov head (arXiv 2607.05147): corrections of one slot after the other.

    Args:
        config: its kind.
        tensors: by their names in a checkpoint.
    """

    def __init__(self, config: MarkovConfig, tensors: dict[str, Tensor]) -> None:
        self.kind, self.rank = config.kind, config.rank
        self.w = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}
        self.state = torch.zeros(config.rank, dtype=tensors["fc.weight"].dtype)

    def correction(self, hidden: Tensor, previous: int) -> Tensor:
        """[V] of the next slot."""
        w1, w2 = self.w["markov_w1.weight"][previous], self.w["markov_w2.weight"]
        if self.kind == "vanilla":
            return w2 @ w1
        if self.kind == "gated":
            gate = 1 / (
                1
                + torch.exp(
                    -(
                        self.w["gate_proj.weight"] @ torch.cat([hidden, w1])
                        + self.w["gate_proj.bias"]
                    )
                )
            )
            return w2 @ (gate * w1)
        joint = (
            self.w["joint_proj.weight"] @ torch.cat([self.state, w1, hidden])
            + self.w["joint_proj.bias"]
        )
        gate = joint[: self.rank]
        candidate = joint[self.rank : 2 * self.rank]
        output = joint[2 * self.rank :]
        gate = 1 / (1 + torch.exp(-gate))
        self.state = gate * self.state + (1 - gate) * candidate.tanh()
        return w2 @ output.tanh()
