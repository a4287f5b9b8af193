"""DFlash 2's convolutions: against the public `dflash` package, between blocks, and new ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.shape import make_drafter
from specdec.base.errors import CheckpointError
from tests.drafters.dflash.test_drafter import bound, dense_hidden
from tests.drafters.tiny import TINY, FakeVerifier, tiny_drafter, tiny_model, tiny_tensors
from tests.helpers.bounds import assert_as_exact

reference: Any = pytest.importorskip("dflash.model")

CONVOLVED = replace(TINY, conv_kernel_size=3, conv_group_size=8)


def test_formula() -> None:
    """Both sides of a convolution are the public package's, over two blocks."""
    torch.manual_seed(0)
    ours, hidden = DFlashConvolution(CONVOLVED), torch.randn(2, TINY.block_size, TINY.hidden_size)
    theirs = reference.GroupedDynamicCausalConv(TINY.hidden_size, 3, 8)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    output = torch.randn_like(hidden)

    def both(model: Any, hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        before, kernels = model.prepare(hidden)
        return before, model.finish(output, kernels)

    plain = both(theirs, hidden, output)
    exact = both(theirs.double(), hidden.double(), output.double())
    packed, packed_output = hidden.flatten(0, 1), output.flatten(0, 1)
    kernels = ours.kernels(packed)
    found = ours(packed, kernels, 0), ours(packed_output, kernels, 1)
    for ours_now, theirs_now, right in zip(found, plain, exact, strict=True):
        assert_as_exact(ours_now.view_as(hidden), theirs_now, right)


def test_blocks_packed_in_a_row() -> None:
    """Blocks that training packs behind each other have the states that each has alone."""
    model = tiny_model(CONVOLVED)
    torch.manual_seed(1)
    features = torch.randn(5, TINY.feature_size)
    blocks = torch.randn(3, TINY.block_size, TINY.hidden_size)
    keys, values = model.context_kv(features, torch.arange(5))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.unflatten(0, (3, -1)).transpose(1, 2) for x in (query, key, value))
        context = (x[:, layer].expand(3, -1, -1, -1).transpose(1, 2) for x in (keys, values))
        k, v = (torch.cat(pair, dim=2) for pair in zip(context, (key, value), strict=True))
        return (
            F.scaled_dot_product_attention(query, k, v, enable_gqa=True)
            .transpose(1, 2)
            .flatten(0, 1)
        )

    positions = (5 + torch.arange(TINY.block_size)).repeat(3)
    packed = model.block_forward(blocks.flatten(0, 1), positions, attend)
    alone = [dense_hidden(model, features, block) for block in blocks]
    exact = [dense_hidden(model.double(), features.double(), block.double()) for block in blocks]
    assert_as_exact(packed, torch.cat(alone), torch.cat(exact))


def test_what_trains_is_what_drafts() -> None:
    """The module has the network's states; catches a convolution on the wrong side."""
    drafter, verifier, rig = bound(CONVOLVED)
    model = tiny_model(CONVOLVED)
    hidden = drafter.draft_hidden(rig.batch([3, 5], [9, 14], 7))
    generator = torch.Generator().manual_seed(2)
    for request, (anchor, length) in enumerate(((3, 9), (5, 14))):
        features = torch.randn(length, CONVOLVED.feature_size, generator=generator)
        block = verifier.embed(torch.tensor([anchor] + [CONVOLVED.mask_token_id] * 7))
        torch.testing.assert_close(
            hidden[request], dense_hidden(model, features, block)[1:], atol=1e-4, rtol=1e-4
        )


def test_new_ones_change_nothing() -> None:
    """A drafter with new convolutions is that drafter, so that training can start there."""
    model = DFlashModel(CONVOLVED)
    missing = model.load_state_dict(tiny_tensors(), strict=False)
    assert len(missing.missing_keys) == 4 * TINY.num_hidden_layers and not missing.unexpected_keys
    features = torch.randn(5, TINY.feature_size)
    block = torch.randn(TINY.block_size, TINY.hidden_size)
    assert dense_hidden(model, features, block).equal(dense_hidden(tiny_model(), features, block))


def test_training_starts_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random first weights leave convolutions alone."""
    monkeypatch.setattr("drafters.training.shape.new_config", lambda *_: CONVOLVED)
    model = make_drafter(TrainConfig(out="nowhere"), FakeVerifier(), None)
    fresh = DFlashConvolution(CONVOLVED).state_dict()
    for module in (module for module in model.modules() if isinstance(module, DFlashConvolution)):
        assert all(tensor.equal(fresh[name]) for name, tensor in module.state_dict().items())


def test_causal_layers_run_whole_blocks() -> None:
    """Rows of a packed batch are told apart by the length of a block."""
    assert tiny_drafter(FakeVerifier(), replace(TINY, causal=(True,) * 3)).num_lookahead_tokens == 0
    assert (
        tiny_drafter(FakeVerifier(), replace(CONVOLVED, causal=(True,) * 3)).num_lookahead_tokens
        == TINY.block_size
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 2}, "conv_group_size None; convolutions need both"),
        (
            {"conv_kernel_size": 9, "conv_group_size": 8},
            r"conv_kernel_size is 9; it must lie in \[1, 8\]",
        ),
        (
            {"conv_kernel_size": 2, "conv_group_size": 5},
            "conv_group_size is 5; it must be at least 1 and divide hidden_size, which is 32",
        ),
    ],
)
def test_refusals(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]
