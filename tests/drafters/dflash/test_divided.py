"""Drafters that two ranks have parts of: what they draft is what the whole one does, for every kind
of layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from drafters.attention import LatentSizes
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.divided import divide, pays, undivided
from drafters.dflash.drafter import BoundDFlash, DFlashDrafter
from drafters.dflash.dummy import dummy_config
from drafters.dflash.model import DFlashModel
from drafters.dspark.markov import MarkovConfig
from evals.bench.shapes import config_file
from specdec.base.errors import InvalidInputError
from specdec.device.meta import shapes_alone
from specdec.layers.ops import exchange
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.model.weights import Exchange
from specdec.parallel.group import Group
from specdec.sampling.params import SamplingParams
from tests.drafters.dflash.test_latent import latent_verifier
from tests.drafters.tiny import HIDDEN, TINY, FakeVerifier, Rig, tiny_model
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import plain_model, random_dflash, random_prompts, tiny_tokenizer
from verifiers.dummy import read_config
from verifiers.load import load_verifier

RANKS = 2
WINDOWS = replace(TINY, windows=(None, 6, 6), causal=(False, True, False))
KINDS: dict[str, DFlashConfig] = {
    "windows": WINDOWS,
    "biases": replace(TINY, attention_bias=True),
    "sinks, a factor of values, neighbors": replace(
        WINDOWS, attention_sinks=True, attention_value_scale=0.6, interleaved=True
    ),
    "gates of heads": replace(TINY, attention_gate="per-head", tap_norms=True, norms_context=True),
    "gates of numbers": replace(TINY, attention_gate="per-element"),
    "mixtures": replace(TINY, mixes_taps=True),
    "gemma": replace(TINY, gemma=True, keys_as_values=True),
    "latent": replace(
        TINY,
        latent=LatentSizes(query_rank=12, rank=16, nope=12, rope=4, value=8),
        num_key_value_heads=1,
    ),
    "convolutions": replace(TINY, conv_kernel_size=3, conv_group_size=8),
    "an own head that ranks do not divide": replace(TINY, draft_vocab_size=29),
    "a head": replace(TINY, sample_from_anchor=True, head=MarkovConfig(8, "vanilla")),
}
LENGTHS, ANCHORS = (13, 22), (3, 5)


class Drafted(NamedTuple):
    """By one rank, of one drafter."""

    hidden: Tensor
    logits: Tensor
    drafts: list[Tensor]  # of two steps
    weight_bytes: int
    bytes_per_token: int


def draft(group: Group | None, divides: bool) -> dict[str, Drafted]:
    """What drafters of all kinds draft for two requests, whose context comes in pieces."""
    return {
        name: _drafted(DFlashDrafter(tiny_model(config), _target(config, group), divides=divides))
        for name, config in KINDS.items()
    }


def _target(config: DFlashConfig, group: Group | None) -> Any:
    """Whole on every rank."""
    verifier: Any = FakeVerifier() if config.latent is None else latent_verifier()
    verifier.group = group
    return verifier


@torch.inference_mode()
def _drafted(drafter: DFlashDrafter) -> Drafted:
    rig, generator = Rig(drafter, drafter.verifier), torch.Generator().manual_seed(4)
    assert isinstance(rig.bound, BoundDFlash)
    width = drafter.config.feature_size
    for request, length in enumerate(LENGTHS):
        rows = torch.randn(length, width, generator=generator)
        rig.prefill(request, rows[:9], 0)
        rig.prefill(request, rows[9:], 9)
    k = drafter.max_draft_tokens
    batch = rig.batch(ANCHORS, LENGTHS, k)
    hidden = rig.bound.draft_hidden(batch)
    logits, drafts = rig.bound.logits(hidden), [rig.bound.propose(batch).token_ids]
    rows = torch.randn(2 * (k + 1), width, generator=generator)
    rig.commit(batch, torch.zeros(2, k + 1, dtype=torch.long), (2, 4), rows)
    later = rig.batch(ANCHORS, [length + 3 for length in LENGTHS], k)
    drafts.append(rig.bound.propose(later).token_ids)
    per_token = sum(spec.bytes_per_token(torch.float32) for spec in drafter.kv_specs)
    return Drafted(hidden, logits, drafts, drafter.weight_bytes, per_token)


@pytest.mark.parametrize("size", [RANKS, 4])
def test_ranks_draft_what_one_process_does(size: int) -> None:
    """Every kind in one test, since ranks take seconds to start. Of four ranks two have the same
    key and value head.
    """
    alone, ranks = draft(None, True), run_ranks(size, draft, True)
    for name, whole in alone.items():
        for made in (rank[name] for rank in ranks):
            first = ranks[0][name]
            assert torch.equal(made.hidden, first.hidden), f"{name}: ranks have other bits"
            assert torch.equal(made.logits, first.logits), f"{name}: ranks have other bits"
            for got, expected in ((made.hidden, whole.hidden), (made.logits, whole.logits)):
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, msg=name)
            for got, expected in zip(made.drafts, whole.drafts, strict=True):
                assert torch.equal(got, expected), name
            assert made.weight_bytes < 0.75 * whole.weight_bytes, name
            latent = KINDS[name].latent is not None
            assert made.bytes_per_token == whole.bytes_per_token // (1 if latent else RANKS)


class Way(NamedTuple):
    """How an engine drafts."""

    k: int | None
    tree: int | None
    temperature: float


WAYS = {
    "greedy chain": Way(4, None, 0.0),
    "sampled chain": Way(7, None, 0.8),
    "greedy tree": Way(None, 12, 0.0),
    "sampled tree": Way(None, 12, 0.8),
}


class Written(NamedTuple):
    """By one rank, in one way."""

    tokens: list[list[int]]
    accepted: list[list[int]]
    drafts: list[Tensor]  # of every step


def write(group: Group | None, folder: Path, divides: bool) -> dict[str, Written]:
    """What an engine writes whose target the ranks divide as well, one full draft layer and two
    with windows.
    """
    device = torch.device("cpu")
    options: dict[str, Any] = {"attention": "torch_ref", "block_size": 4, "group": group}
    verifier, _ = load_verifier(folder, device=device, dtype=torch.float32, **options)
    return {name: _written(verifier, way, divides) for name, way in WAYS.items()}


def _written(verifier: Any, way: Way, divides: bool) -> Written:
    drafter = random_dflash(verifier, block_size=8, divides=divides)
    assert (drafter.group is None) == (verifier.group is None or not divides)
    engine: Any = tiny_engine(
        verifier,
        drafter,
        max_num_seqs=2,
        max_prefill_tokens=13,
        num_draft_tokens="auto" if way.k is None else way.k,
        tree_nodes=way.tree,
    )
    drafts, propose = list[Tensor](), engine.runner.drafter.propose

    def noted(batch: DecodeBatch) -> DraftOutput:
        output: DraftOutput = propose(batch)
        drafts.append(output.token_ids.clone())
        return output

    engine.runner.drafter.propose = noted
    requests = [
        engine.add_request(
            prompt, SamplingParams(max_tokens=9, temperature=way.temperature, seed=number)
        )
        for number, prompt in enumerate(random_prompts(3, seed=6, longest=16))
    ]
    finish(engine)
    tokens = [list(request.output_token_ids) for request in requests]
    return Written(tokens, [list(request.num_accepted) for request in requests], drafts)


def test_an_engine_writes_what_it_does_with_a_whole_drafter(tmp_path: Path) -> None:
    plain_model("qwen3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    alone = write(None, tmp_path, False)
    for made in run_ranks(RANKS, write, tmp_path, True):
        for name, whole in alone.items():
            assert made[name].tokens == whole.tokens, name
            assert made[name].accepted == whole.accepted, name
            pairs = zip(made[name].drafts, whole.drafts, strict=True)
            assert all(torch.equal(*pair) for pair in pairs), name


def exchanged(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Drafts with other weights: of a drafter that took them over, and of the one that had them."""
    target = _target(WINDOWS, group)
    models = (tiny_model(WINDOWS, seed) for seed in (1, 2))
    kept, fresh = (DFlashDrafter(model, target, divides=True) for model in models)
    before = _drafted(kept).drafts
    Exchange(kept, fresh, "fresh").apply()
    after = _drafted(kept).drafts
    assert not all(map(torch.equal, before, after))
    return after, _drafted(fresh).drafts


def test_parts_are_replaced_as_a_whole_drafter_is() -> None:
    for got, expected in run_ranks(RANKS, exchanged):
        assert all(map(torch.equal, got, expected))


def of_ranks(size: int) -> Group:
    """One that exchanges nothing."""
    return Group(0, size, None, None)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", ["qwen3-8b", "llama3-70b"])
def test_a_wide_drafter_is_divided(shape: str, ranks: int) -> None:
    with shapes_alone():
        model = DFlashModel(dummy_config(read_config(config_file(shape))))
    whole, config = {name: one.shape for name, one in model.named_parameters()}, model.config
    assert divide(model, of_ranks(ranks), torch.bfloat16, None) is not None
    assert model.config.num_attention_heads * ranks == config.num_attention_heads
    assert model.config.num_key_value_heads * ranks == config.num_key_value_heads
    for name, parameter in model.named_parameters():
        parts = 1 if "norm" in name else ranks
        assert parameter.numel() * parts == whole[name].numel(), name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_narrow_drafter_stays_whole(ranks: int) -> None:
    """Of such a width two sums take longer than a layer."""
    config = replace(
        TINY, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with shapes_alone():
        model = DFlashModel(config)
    assert divide(model, of_ranks(ranks), torch.bfloat16, None) is None
    assert model.config == config


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 key and value heads"),
        ({"num_attention_heads": 6}, 4, "6 attention heads"),
        ({"intermediate_size": 47}, 2, "47 numbers between"),
        ({}, 3, "4 attention heads"),
    ],
)
def test_what_ranks_do_not_divide_stays_whole(
    changes: Mapping[str, Any], ranks: int, words: str
) -> None:
    config = replace(TINY, **changes)
    model, before = tiny_model(config), tiny_model(config).state_dict()
    assert divide(model, of_ranks(ranks), torch.float32, None) is None
    assert (undivided(config, ranks) or "").startswith(words)
    with pytest.raises(InvalidInputError, match=words):
        divide(model, of_ranks(ranks), torch.float32, True)
    assert model.config == config
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_one_is_left_whole_where_that_is_asked_for() -> None:
    with shapes_alone():
        model = DFlashModel(dummy_config(read_config(config_file("llama3-70b"))))
    assert divide(model, of_ranks(4), torch.bfloat16, False) is None
    assert divide(model, None, torch.bfloat16, None) is None
    assert model.config.num_attention_heads == 64


def test_a_division_pays_from_some_bytes_on() -> None:
    """10 exchanges of 7 microseconds are 210 MB at 3 TB/s."""
    assert pays(422 * 10**6, 211 * 10**6, 10)
    assert not pays(418 * 10**6, 209 * 10**6, 10)


def test_a_width_whose_taps_ranks_do_not_divide() -> None:
    """Three ranks divide the heads and the sublayers, and not the width of the model."""
    config = replace(TINY, num_attention_heads=6, num_key_value_heads=3)
    model = tiny_model(config)
    assert model.fc is not None and HIDDEN % 3
    assert divide(model, of_ranks(3), torch.float32, True) is not None
    assert len(model.fc.weight) == HIDDEN
    assert model.config.num_key_value_heads == 1


def test_layers_of_a_width_share_the_memory_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and drafter of a group; new weights of the drafter are not written over flags."""
    monkeypatch.setattr(exchange, "made_by_all", lambda *_: object())
    one_shot: Any = object()
    group, device = replace(of_ranks(2), one_shot=one_shot), torch.device("cpu")
    kinds = ((64, torch.float32), (64, torch.float32), (64, torch.bfloat16), (32, torch.float32))
    first, again, *others = [
        exchange.shared_rows(group, width, device, dtype) for width, dtype in kinds
    ]
    assert first is again
    assert len({id(one) for one in (first, *others)}) == 3


@pytest.mark.parametrize(("own", "head"), [(29, 0), (None, 31 * HIDDEN * 4)])
def test_bytes_of_a_rank(own: int | None, head: int) -> None:
    """Its parts of an own head, or of the target's, which has 61 tokens."""
    config = replace(TINY, draft_vocab_size=own)
    model = tiny_model(config)
    drafter = DFlashDrafter(model, _target(config, of_ranks(2)), divides=True)
    assert drafter.weight_bytes == head + sum(one.nbytes for one in model.parameters())
