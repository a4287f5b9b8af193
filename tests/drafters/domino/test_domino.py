"""Domino's head: its formula as training has it, the authors' chain, and what is drawn from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import parse_config
from drafters.dflash.drafter import BoundDFlash
from drafters.dflash.model import DFlashModel
from drafters.domino.gru import DominoConfig
from drafters.head import Lattice, left_sides
from drafters.load import load_drafter
from specdec.base.errors import CheckpointError
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams
from tests.drafters.dflash.test_drafter import dense_hidden
from tests.drafters.tiny import (
    HIDDEN,
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    tiny_target,
    tiny_tensors,
    write_tiny_dflash,
)
from tests.helpers.bounds import assert_as_exact
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_greedy
from tests.test_no_sync import guarded_run

HEAD = DominoConfig(rank=6, state_size=10, pure_prefix=1)
ANCHORS, LENGTHS = (3, 5), (9, 14)


def domino(shift_label: bool = True, prefix: int = 1) -> DFlashConfig:
    return replace(TINY, head=replace(HEAD, pure_prefix=prefix), sample_from_anchor=shift_label)


def tensors_of(config: DFlashConfig) -> dict[str, Tensor]:
    """Random weights, the head's so large that it decides much."""
    large = ("prefix_gru.", "embed_proj.")
    return {
        name: (4 if name.startswith(large) else 1) * tensor
        for name, tensor in tiny_tensors(config).items()
    }


class Paper:
    """The head as SpecForge's modules compute it, over whole sequences of tokens."""

    def __init__(self, tensors: dict[str, Tensor], prefix: int, table: Tensor) -> None:
        dtype = tensors["fc.weight"].dtype
        self.prefix, self.table = prefix, table.to(dtype)
        self.gru = nn.GRU(HIDDEN, 10, batch_first=True, bias=False).to(dtype)
        self.gru.load_state_dict(
            {name: tensors[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
        )
        self.first, self.second = tensors["embed_proj.0.weight"], tensors["embed_proj.2.weight"]

    def corrections(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[K, V] for slots [K, H] behind tokens int64 [K], the anchor first."""
        states = self.gru(self.table[previous][None])[0][0]
        corrections = F.silu(torch.cat([hidden, states], dim=-1) @ self.first.T) @ self.second.T
        corrections[: self.prefix] = 0
        return corrections.detach()


def features(config: DFlashConfig) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(length, config.feature_size, generator=generator) for length in LENGTHS]


def drafting(
    path: Path, config: DFlashConfig, **options: Any
) -> tuple[BoundDFlash, Rig, FakeVerifier]:
    """A drafter read from a checkpoint, with the context of two requests."""
    write_tiny_dflash(path, config, tensors=tensors_of(config))
    verifier = FakeVerifier()
    rig = Rig(load_drafter(path, verifier=verifier), verifier, **options)
    for request, rows in enumerate(features(config)):
        rig.prefill(request, rows, 0)
    assert isinstance(rig.bound, BoundDFlash)
    return rig.bound, rig, verifier


def backbone(config: DFlashConfig, request: int, verifier: FakeVerifier) -> tuple[Tensor, Tensor]:
    """Hidden states [K, H] and logits [K, V] of a request's slots, from the module alone."""
    model = DFlashModel(config)
    model.load_state_dict(tensors_of(config))
    block = torch.tensor([ANCHORS[request], *[config.mask_token_id] * (config.block_size - 1)])
    rows = dense_hidden(model, features(config)[request], verifier.embed(block))
    hidden = rows if config.sample_from_anchor else rows[1:]
    return hidden, verifier.head(hidden)


def logits_behind(
    config: DFlashConfig, request: int, drafts: list[int], verifier: FakeVerifier
) -> Tensor:
    """Corrected logits [K, V] of the slots behind the anchor and these drafts."""
    hidden, logits = backbone(config, request, verifier)
    assert isinstance(config.head, DominoConfig)
    paper = Paper(tensors_of(config), config.head.pure_prefix, verifier.embed(torch.arange(VOCAB)))
    previous = torch.tensor([ANCHORS[request], *drafts])[: len(drafts)]
    return logits[: len(drafts)] + paper.corrections(hidden[: len(drafts)], previous)


def test_state_dict_is_the_checkpoint(tmp_path: Path) -> None:
    """Names and shapes are the public ones, and what is written is what is read."""
    config = domino()
    write_tiny_dflash(tmp_path / "drafter", config)
    read, tensors = read_checkpoint(tmp_path / "drafter")
    assert read == config
    shapes = {
        name: list(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(("prefix_gru", "embed_proj"))
    }
    assert shapes == {
        "prefix_gru.weight_ih_l0": [30, HIDDEN],
        "prefix_gru.weight_hh_l0": [30, 10],
        "embed_proj.0.weight": [6, HIDDEN + 10],
        "embed_proj.2.weight": [VOCAB, 6],
    }
    with pytest.raises(
        CheckpointError, match="the speculators layout has no domino; write the z-lab layout"
    ):
        config_json(config, "speculators", dtype="float32")


@pytest.mark.parametrize(("stated", "drafts"), [(True, 8), (False, 7), (None, 7)])
def test_alignment(stated: bool | None, drafts: int) -> None:
    """`shift_label` says which row predicts first; SpecForge's is behind the anchor."""
    raw = config_json(domino(), "z-lab", dtype="float32")
    own = raw["dflash_config"]
    del own["sample_from_anchor"]
    config = parse_config(
        raw | {"dflash_config": own | ({} if stated is None else {"shift_label": stated})}
    )
    assert config.max_draft_tokens == drafts and config.algorithm == "domino"


def test_formula() -> None:
    """Corrections behind known tokens, as in training, against a GRU over the sequence."""
    config, table = domino(), torch.randn(VOCAB, HIDDEN)
    tensors, model = tensors_of(config), DFlashModel(config)
    model.load_state_dict(tensors)
    assert config.head is not None
    head = config.head.head(model, lambda tokens: table[tokens])
    assert not isinstance(head, Lattice)
    hidden, previous = torch.randn(2, 5, HIDDEN), torch.randint(VOCAB, (2, 5))
    ours = left_sides(head, hidden, previous) @ head.right.T
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    plain, exact = (
        torch.stack(
            [
                Paper(weights, 0, table).corrections(states, tokens)
                for states, tokens in zip(rows, previous, strict=True)
            ]
        )
        for weights, rows in ((tensors, hidden), (wide, hidden.double()))
    )
    assert_as_exact(ours.detach(), plain, exact, factor=3)


@pytest.mark.parametrize(
    ("shift_label", "prefix", "k"), [(True, 1, 8), (True, 0, 3), (False, 1, 7), (False, 0, 7)]
)
def test_drafts_are_the_authors(shift_label: bool, prefix: int, k: int, tmp_path: Path) -> None:
    """In either alignment; a state without a token, or a corrected prefix, differs."""
    config = domino(shift_label, prefix)
    drafter, rig, verifier = drafting(tmp_path / "drafter", config)
    found = drafter.propose(rig.batch(ANCHORS, LENGTHS, k)).token_ids.tolist()
    for request, drafts in enumerate(found):
        assert drafts == logits_behind(config, request, drafts, verifier).argmax(-1).tolist()
        other = replace(config, head=replace(HEAD, pure_prefix=1 - prefix))
        plain = backbone(config, request, verifier)[1][:k].argmax(-1).tolist()
        assert drafts != plain and (prefix == 0 or drafts[0] == plain[0])
        assert (
            logits_behind(other, request, drafts, verifier).argmax(-1).tolist() != drafts or k == 3
        )


def test_what_is_drawn_says_its_distribution(tmp_path: Path) -> None:
    """Probabilistic drafts come from logits corrected behind drawn tokens, and say so."""
    config = domino()
    drafter, rig, verifier = drafting(tmp_path / "drafter", config, draft_sampling="probabilistic")
    draft = drafter.propose(rig.batch(ANCHORS, LENGTHS, 8, temperature=0.8))
    assert isinstance(draft, DraftOutput) and draft.probs is not None
    for request, drafts in enumerate(draft.token_ids.tolist()):
        expected = (logits_behind(config, request, drafts, verifier) / 0.8).softmax(-1)
        torch.testing.assert_close(draft.probs[request], expected, atol=1e-4, rtol=1e-3)


WAYS: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "greedy": ({"num_draft_tokens": 8}, SamplingParams(max_tokens=14)),
    "part of the block": (
        {"num_draft_tokens": 3, "pipeline_depth": 1},
        SamplingParams(max_tokens=14),
    ),
    "tree": ({"tree_nodes": 9}, SamplingParams(max_tokens=14)),
    "coupled": (
        {"num_draft_tokens": 8, "draft_sampling": "coupled"},
        SamplingParams(max_tokens=14, temperature=1.0, seed=3),
    ),
    "coupled tree": (
        {"tree_nodes": 9, "draft_sampling": "coupled"},
        SamplingParams(max_tokens=14, temperature=1.0, seed=3),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_lossless(way: str, tmp_path: Path) -> None:
    """Greedy output is the target's, and sampled output that of the same seed without drafts."""
    path = write_tiny_dflash(tmp_path / "drafter", domino(), tensors=tensors_of(domino()))
    changes, sampling = WAYS[way]
    target, prompts, outputs = tiny_target(), [[1, 2, 3], list(range(20, 31))], []
    for drafts in (True, False):
        verifier = paged_verifier(target, block_size=4)
        options = changes if drafts else {}
        engine = tiny_engine(
            verifier,
            load_drafter(path, verifier=verifier) if drafts else None,
            max_num_seqs=2,
            max_model_len=64,
            cache_bytes=2**20,
            **options,
        )
        outputs.append(run_all(engine, prompts, sampling))
    assert outputs[0] == outputs[1]
    if sampling.temperature == 0:
        assert outputs[0] == [plain_greedy(target, prompt, 14) for prompt in prompts]


def test_step_never_waits(tmp_path: Path) -> None:
    """Nothing of a chain or of a drawn one asks the device for a value."""
    path = write_tiny_dflash(tmp_path / "drafter", domino())
    verifier = paged_verifier(tiny_target(), block_size=4)
    for draft_sampling, temperature in (("greedy", 0.0), ("probabilistic", 1.0)):
        sampling = SamplingParams(max_tokens=10, temperature=temperature, seed=1)
        guarded_run(
            verifier, load_drafter(path, verifier=verifier), [[1, 2, 3]], sampling, draft_sampling
        )
