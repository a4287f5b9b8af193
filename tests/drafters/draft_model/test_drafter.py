"""A draft model's drafts are its own text, and the target's output is as without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.draft_model.drafter import DraftModel
from drafters.ngram import NGramDrafter
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.drafter_choice import find_drafter
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.sequential.toy import Noted, check_drafts, noted_run
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
    tiny_tokenizer,
)

K = 4


def draft_model(
    verifier: Verifier, name: str = "qwen3", *, k: int = K, seed: int = 5, **changes: Any
) -> tuple[Any, DraftModel]:
    """A tiny model in transformers, and as a drafter of `verifier`; with config `changes`."""
    model = plain_model(name, seed, **changes)
    drafter = DraftModel(paged_verifier(model), verifier, max_draft_tokens=k)
    network: Any = drafter.network

    def plain(token_ids: Tensor, features: None) -> Tensor:
        """What `check_drafts` compares with."""
        known = token_ids.where(token_ids < network.num_tokens, 0)
        logits: Tensor = model(known[None]).logits[0]
        return logits

    network.plain = plain
    return model, drafter


def check_text(model: Any, noted: list[Noted], *, every: int = 12) -> None:
    """Drafts are what `generate` of the draft model goes on with, as far as its end of text."""
    for request, length, drafts, _ in noted[::every]:
        text = request.token_ids[: length + 1]
        if len(text) > length:
            own = plain_greedy(model, text, len(drafts))
            assert drafts[: len(own)] == own


def run(
    verifier: Verifier, drafter: Drafter | None, prompts: list[list[int]], **changes: Any
) -> list[Request]:
    """All prompts in one engine; `changes` are of its config or of sampling."""
    sampling: dict[str, Any] = {
        name: changes.pop(name)
        for name in ("temperature", "top_k", "max_tokens")
        if name in changes
    }
    options = {"max_num_seqs": 3, "max_prefill_tokens": 13, "num_draft_tokens": None}
    engine = tiny_engine(verifier, drafter, **{**options, **changes})
    params: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, **sampling}
    requests = [
        engine.add_request(prompt, SamplingParams(seed=i, **params))
        for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    return requests


@pytest.fixture(scope="module")
def target() -> Verifier:
    return paged_verifier(plain_model("llama"))


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("qwen3", 0),
        ("gemma2", 1),
        ("gemma4_shared", 0),
        ("deepseek_v3", 1),
        ("ministral3", 0),
        ("llama4", 0),
    ],
)
def test_drafts_are_those_of_generate(target: Verifier, name: str, depth: int) -> None:
    """Families, batches of unlike lengths, chunks; catches shifted or missing rows."""
    model, drafter = draft_model(target, name)
    _, _, noted = noted_run(target, drafter, random_prompts(5), pipeline_depth=depth)
    check_drafts(model, drafter.network, noted[::4], least=10)
    check_text(model, noted)


def test_a_latent_target_with_an_ordinary_draft_model() -> None:
    verifier = paged_verifier(plain_model("deepseek_v3"))
    model, drafter = draft_model(verifier, "llama")
    _, _, noted = noted_run(verifier, drafter, random_prompts(3))
    check_drafts(model, drafter.network, noted[::3], least=8)


def test_preempted_requests_draft_as_before(target: Verifier) -> None:
    """A cache that holds too few blocks for all, of which those of the draft model are a part."""
    model, drafter = draft_model(target)
    specs = [*target.kv_specs, *drafter.kv_specs]
    memory = 4 * 30 * sum(spec.bytes_per_token(torch.float32) for spec in specs)
    engine, _, noted = noted_run(
        target, drafter, random_prompts(5), cache=CacheConfig(memory_bytes=memory)
    )
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.num_blocks == 30
    check_drafts(model, drafter.network, noted[::3], least=8)


@pytest.mark.parametrize("k", [0, 2, 7])
def test_output_does_not_depend_on_drafts(target: Verifier, k: int) -> None:
    """Greedy and sampled, every other request of each kind."""
    prompts = random_prompts(4)
    _, drafter = draft_model(target, k=7)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.1, "top_k": 20}):
        plain = [request.output_token_ids for request in run(target, None, prompts, **sampling)]
        drafted = run(target, drafter, prompts, num_draft_tokens=k, **sampling)
        assert [request.output_token_ids for request in drafted] == plain


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(
    target: Verifier, k: int, temperature: float
) -> None:
    """Every step gives k + 1 tokens, sampled too: drafts see the target's noise."""
    _, drafter = draft_model(target, "llama", k=k, seed=0)
    for request in run(
        target, drafter, random_prompts(4), temperature=temperature, max_tokens=1 + 3 * (k + 1)
    ):
        assert request.num_emitted == [k + 1] * 3


@pytest.mark.parametrize("vocabulary", [90, 128])
def test_vocabularies_of_unlike_sizes(target: Verifier, vocabulary: int) -> None:
    """Drafts are tokens that both have; of others a smaller model sees the place alone."""
    model, drafter = draft_model(target, vocab_size=vocabulary)
    _, requests, noted = noted_run(target, drafter, random_prompts(4))
    assert max(token for one in noted for token in one.drafts) < min(vocabulary, VOCAB)
    check_drafts(model, drafter.network, noted[::3], least=8)
    assert vocabulary > VOCAB or any(
        token >= vocabulary for request in requests for token in request.token_ids
    )
    drawn = run(target, drafter, random_prompts(3), temperature=1.0, draft_sampling="probabilistic")
    assert all(len(request.output_token_ids) == 24 for request in drawn)


def test_beyond_its_own_length_it_drafts_nothing(target: Verifier) -> None:
    """As far as the model goes it is right; from there on steps give one token."""
    _, drafter = draft_model(target, "llama", seed=0, max_position_embeddings=20)
    (plain,) = run(target, None, [[5, 6, 7]], max_tokens=40)
    (drafted,) = run(target, drafter, [[5, 6, 7]], max_tokens=40)
    assert drafted.output_token_ids == plain.output_token_ids
    # Drafts of the step at length 18 are those for positions 19 and 20: the model has positions 0
    # to 19.
    assert drafted.num_emitted == [5, 5, 5, 3, *[1] * 21]


def test_beside_another_drafter(target: Verifier) -> None:
    """Each has caches in the target's blocks; the one that is right is soon believed."""
    model = plain_model("gemma4_shared")
    verifier = paged_verifier(model)
    both = ComposedDrafter(
        [random_dflash(verifier), DraftModel(paged_verifier(model), verifier, max_draft_tokens=K)]
    )
    prompts = random_prompts(3)
    plain = run(verifier, None, prompts, max_tokens=60)
    drafted = run(verifier, both, prompts, max_tokens=60)
    assert [request.output_token_ids for request in drafted] == [
        request.output_token_ids for request in plain
    ]
    assert all(set(request.num_emitted[-4:-1]) == {K + 1} for request in drafted)
    eagle3 = random_eagle3(target, K)
    assert ComposedDrafter([NGramDrafter(), eagle3]).tokens_ahead == eagle3.tokens_ahead == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nemotron_h", "recurrent layers, whose states cannot take rejected drafts back"),
        ("phi3_long", "longer than 37 tokens"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(target: Verifier, name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        draft_model(target, name)


def save(folder: Path, name: str, seed: int) -> str:
    plain_model(name, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_from_folders(tmp_path: Path) -> None:
    """By its name alone: config.json says that it is a language model."""
    target, draft = save(tmp_path / "target", "llama", 0), save(tmp_path / "draft", "llama", 0)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "attention": "torch_ref",
        "block_size": 4,
    }
    decoder = SpecDecoder.from_pretrained(
        target, drafter=draft, engine=EngineConfig(num_draft_tokens=3), **options
    )
    drafter = decoder.engine.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter.network.num_tokens == VOCAB  # type: ignore[attr-defined]
    result = decoder.generate([5, 6, 7], max_tokens=17, ignore_eos=True)
    assert result.stats.tau == 4
    assert (
        result.token_ids
        == decoder.plain().generate([5, 6, 7], max_tokens=17, ignore_eos=True).token_ids
    )


def test_another_tokenizer_is_refused(tmp_path: Path, target: Verifier) -> None:
    folder = save(tmp_path / "draft", "llama", 0)
    target.name = save(tmp_path / "target", "llama", 0)
    vocabulary = (tmp_path / "target" / "tokenizer.json").read_text()
    (tmp_path / "target" / "tokenizer.json").write_text(
        vocabulary.replace('"a": 68', '"a": 69').replace('"b": 69', '"b": 68')
    )
    with pytest.raises(
        CheckpointError,
        match=r"2 of 97 tokens are others than the target's: 68 is 'a' here and 'b' there",
    ):
        find_drafter(folder)(target)


def test_it_needs_a_checkpoint(target: Verifier) -> None:
    with pytest.raises(InvalidInputError, match="needs a checkpoint"):
        find_drafter("draft-model")(target)
