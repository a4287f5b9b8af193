"""Fitted weights of q and noise: known ones are found, and the noise is the target's."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.edges import edges_of, logprobs_of
from drafters.dflash.model import DFlashModel
from drafters.dflash2.selector import SelectorConfig
from drafters.domino.gru import DominoConfig
from drafters.head import HeadConfig, Lattice, Refiner, left_sides
from drafters.training.loss import coupling
from drafters.training.loss.coupling import Choices, fit_weights
from drafters.xpress.refiner import XPressConfig
from specdec.cli.main import main
from tests.drafters.tiny import TINY, tiny_tensors
from tests.drafters.training.toy import (
    MASK,
    VOCAB,
    write_prompts,
    write_target,
)

# a and b of three slots
TRUE = torch.tensor([[1.0, 0.9, 0.8], [0.7, 0.6, 0.5]], dtype=torch.float64)


def drawn(count: int = 6000, tokens: int = 40) -> Choices:
    """Choices of a target that chooses exactly so."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(count) % 3
    logprobs = (2 * torch.randn(count, tokens, generator=generator)).log_softmax(-1)
    noise = -torch.empty(count, tokens).exponential_(generator=generator).log()
    a, b = TRUE[:, slots, None]
    labels = (a * logprobs + b * noise).softmax(-1).multinomial(1, generator=generator).squeeze(1)
    return Choices(slots, logprobs, noise, torch.zeros_like(noise), labels)


def standard_errors(choices: Choices) -> Tensor:
    """[2, 3], from Fisher's information at the true weights."""
    a, b = TRUE[:, choices.slots, None]
    probs = (a * choices.logprobs + b * choices.noise).softmax(-1)[:, None]
    features = torch.stack([choices.logprobs, choices.noise], dim=1).double()
    centered = features - (probs * features).sum(-1, keepdim=True)
    information = (probs * centered) @ centered.mT
    sums = torch.zeros(3, 2, 2, dtype=torch.float64).index_add_(0, choices.slots, information)
    return sums.inverse().diagonal(dim1=1, dim2=2).sqrt().T


def test_known_weights_are_found() -> None:
    """To what so many choices tell of them."""
    choices = drawn()
    fitted = fit_weights(choices, 3)
    assert ((fitted.weights - TRUE).abs() < 5 * standard_errors(choices)).all()
    assert fitted.after > fitted.before


def test_noise_of_another_sign_is_noticed() -> None:
    """It says nothing that helps: b is 0, and the choices are as likely as without."""
    choices = drawn()
    fitted, wrong = fit_weights(choices, 3), fit_weights(choices._replace(noise=-choices.noise), 3)
    assert (wrong.weights[1] == 0).all()
    assert wrong.after < fitted.after - 0.1


def test_slots_that_are_never_reached_follow_their_neighbors() -> None:
    """Rather than staying at one."""
    few = Choices(*(part[drawn().slots == 0] for part in drawn()))
    assert torch.allclose(
        fit_weights(few, 2).weights[:, 1], fit_weights(few, 1).weights[:, 0], atol=0.02
    )


def test_alternatives_stand_for_the_whole_vocabulary() -> None:
    """Named tokens count once, drawn ones for the rest: the sum is that over all tokens."""
    generator = torch.Generator().manual_seed(1)
    count, vocab_size = 400, 3 * coupling.BEST
    logprobs = torch.randn(count, vocab_size, generator=generator).log_softmax(-1)
    noise = torch.randn(count, vocab_size, generator=generator)
    labels = torch.randint(vocab_size, (count,), generator=generator)
    labels[:50] = (logprobs + noise)[:50].argmax(-1)
    found = coupling._alternatives(
        torch.zeros(count, dtype=torch.int64), logprobs, noise, labels, generator
    )
    assert torch.equal(
        found.logprobs.gather(1, found.labels[:, None]), logprobs.gather(1, labels[:, None])
    )
    sums = (found.logprobs / 2 + noise.new_tensor(0.3) * found.noise + found.counts).exp().sum(-1)
    ratio = sums / (logprobs / 2 + 0.3 * noise).exp().sum(-1)
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / math.sqrt(count)


@pytest.mark.parametrize("config", [SelectorConfig(3, 8), DominoConfig(3, 4), XPressConfig(3)])
def test_a_head_says_along_an_answer_what_it_says_in_a_run(config: HeadConfig) -> None:
    """Behind known tokens it gives its candidates the scores that a tree would have."""
    torch.manual_seed(0)
    model = DFlashModel(replace(TINY, head=config)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.5)
    head = config.head(
        model, torch.nn.Embedding(TINY.vocab_size, TINY.hidden_size).requires_grad_(False)
    )
    assert not isinstance(head, Lattice)
    hidden, temperature = torch.randn(2, 4, TINY.hidden_size), 0.7
    logprobs = (torch.randn(2, 4, TINY.vocab_size) / temperature).log_softmax(-1)
    scores, token_ids = logprobs.topk(coupling.MAX_CANDIDATES, dim=-1)
    anchors = torch.tensor([3, 5])
    start, scale = None, torch.full((2, 4), 1 / temperature)
    if isinstance(head, Refiner):
        start = head.start(torch.randn(2, TINY.block_size, TINY.hidden_size), anchors)
    tables = edges_of(head, hidden, anchors, token_ids, token_ids, scores, scale, start=start)
    tables = logprobs_of(tables, scores)
    # along the best chain, which is where a recurrent state is exact
    ranks = tables[:, 0, 0].argmax(-1)
    path, expected = [ranks], [tables[:, 0, 0]]
    for slot in range(1, 4):
        expected.append(tables[torch.arange(2), slot, path[-1]])
        path.append(expected[-1].argmax(-1))
    tokens = token_ids.gather(2, torch.stack(path, dim=1)[..., None]).squeeze(2)
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
    left = left_sides(head, hidden, previous, start)
    coupling._share_out(head, logprobs, logprobs.clone(), left, temperature)
    torch.testing.assert_close(logprobs.gather(2, token_ids), torch.stack(expected, dim=1))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, prompts, and a drafter that knows nothing."""
    folder = tmp_path_factory.mktemp("coupling")
    write_target(folder / "target")
    write_prompts(folder / "prompts.txt")
    write_drafter(folder / "drafter")
    return folder


def write_drafter(folder: Path, **changes: Any) -> None:
    values: dict[str, Any] = {
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 3),
        "windows": (None,),
        "causal": (False,),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 256,
        "num_target_layers": 6,
    }
    config = DFlashConfig(**values | changes)
    write_checkpoint(folder, config, tiny_tensors(config))


def couple(toy: Path, *more: str, drafter: str = "drafter", prompts: str = "prompts.txt") -> int:
    flags = [
        "--model", str(toy / "target"), "--device", "cpu", "--dtype", "float32", "--prompts",
        str(toy / prompts),
    ]  # fmt: skip
    return main(
        ["couple", str(toy / drafter), *flags, "--max-prompts", "24", "--max-tokens", "24", *more]
    )


@pytest.mark.parametrize("head", [None, XPressConfig(4)])
def test_the_command_finds_the_noise_of_the_target(
    toy: Path, tmp_path: Path, head: HeadConfig | None
) -> None:
    """In every slot, of an ignorant drafter; what is written loads, the rest stays."""
    folder = tmp_path / "drafter"
    write_drafter(folder, head=head)
    before = json.loads((folder / "config.json").read_text())
    assert couple(toy, "--temperatures", "2", "0.8", drafter=str(folder)) == 0
    after = json.loads((folder / "config.json").read_text())
    assert {name: value for name, value in after.items() if name != "coupling"} == before
    found = read_checkpoint(folder)[0].coupling
    assert found is not None and found.temperatures == (0.8, 2.0)
    assert min(found.b[1]) > 0.5, "the hotter the target, the more the noise decides"
    assert max(found.a[1]) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda toy: couple(toy, prompts="gsm8k-test.jsonl"), "is an evaluation split by its name"),
        (
            lambda toy: couple(toy, "--temperatures", "0", "1"),
            "coupling has temperatures [0.0, 1.0]; they must rise from above 0",
        ),
        (lambda toy: couple(toy, "--max-tokens", "1"), "max-tokens is 1; it must be at least 2"),
        (lambda toy: couple(toy, drafter="none"), "is not a folder"),
        (lambda toy: couple(toy, drafter="scaled"), "has embeddings, a head or scales of its own"),
        (lambda toy: main(["couple", str(toy / "drafter")]), "there is no prompt to answer"),
    ],
)
def test_refusals(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: Callable[[Path], int], message: str
) -> None:
    """Before any model is loaded."""
    if not (toy / "scaled").exists():
        write_drafter(toy / "scaled", output_multiplier=0.5)
    assert arguments(toy) == 2
    assert message in capsys.readouterr().err


def test_another_target_is_refused_before_it_answers(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many layers and another width; the drafter's config is as it was."""
    write_drafter(tmp_path / "wide", hidden_size=64, head_dim=16)
    before = (tmp_path / "wide" / "config.json").read_text()
    monkeypatch.setattr(
        "drafters.training.couple._answers", lambda *_: pytest.fail("the target answers")
    )
    assert couple(toy, drafter=str(tmp_path / "wide")) == 2
    assert "its hidden size 64 cannot share embeddings of width 32" in capsys.readouterr().err
    assert (tmp_path / "wide" / "config.json").read_text() == before
