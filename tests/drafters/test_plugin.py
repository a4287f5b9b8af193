"""The drafter that docs/drafters.md shows, as a reader would run it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base import registry
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import pooled
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.drafter_choice import find_drafter
from tests.drafters.tiny import FakeVerifier, Rig
from tests.helpers.guards import no_host_sync
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts, tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """What the page's code defines, with its name in the registry until the test ends."""
    code = "\n\n".join(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    yield names
    del registry.DRAFTERS["bigrams"]


@pytest.mark.parametrize("by_name", [True, False])
def test_the_page_drafts_and_changes_no_output(page: dict[str, Any], by_name: bool) -> None:
    """By its registered name and as an object: plain outputs, and accepted drafts."""
    verifier, tokenizer = paged_verifier(plain_model("llama")), tiny_tokenizer()
    drafter = find_drafter("bigrams" if by_name else page["Bigrams"]())(verifier)
    config = EngineConfig(
        max_num_seqs=3, max_model_len=128, num_draft_tokens=4, cache=CacheConfig(memory_bytes=2**22)
    )
    drafted = SpecDecoder(verifier, tokenizer, drafter, config)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = random_prompts(5)
    plain, found = drafted.plain().generate(prompts, sampling), drafted.generate(prompts, sampling)
    assert isinstance(plain, list)
    assert isinstance(found, list)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert pooled(result.stats for result in found).tau > 1.1


def test_ten_lines_are_enough(page: dict[str, Any]) -> None:
    """The smallest drafter of the page drafts in every step and changes no output."""
    verifier, tokenizer = paged_verifier(plain_model("llama")), tiny_tokenizer()
    config = EngineConfig(
        max_num_seqs=3, max_model_len=128, num_draft_tokens=4, cache=CacheConfig(memory_bytes=2**22)
    )
    drafted = SpecDecoder(verifier, tokenizer, page["Repeat"](), config)
    prompts = random_prompts(5)
    plain, found = (
        one.generate(prompts, max_tokens=30, ignore_eos=True) for one in (drafted.plain(), drafted)
    )
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert all(result.stats.num_drafted[0] == 4 for result in found)


def test_the_page_keeps_its_own_rule(page: dict[str, Any]) -> None:
    """No method of a step waits for the device."""
    rig = Rig(page["Bigrams"](), FakeVerifier())
    rig.bound.begin(0, [1, 2, 1])
    batch, accepted = rig.batch([1, 3], [2, 2], 4), torch.tensor([1, 0])
    with no_host_sync():
        draft = rig.bound.propose(batch)
        rig.commit_tensors(
            batch, torch.cat([batch.anchors[:, None], draft.token_ids], dim=1), accepted
        )
    assert draft.token_ids[0].tolist() == [2, 1, 2, 1]


def test_the_page_draws_trees(page: dict[str, Any]) -> None:
    """Whole engines output plain text, whatever is chosen; nothing waits."""
    verifier, tokenizer = paged_verifier(plain_model("llama")), tiny_tokenizer()
    prompts = random_prompts(5)
    for shape in ({"tree_nodes": 12}, {"num_draft_tokens": "auto"}):
        config = EngineConfig(
            max_num_seqs=3, max_model_len=128, cache=CacheConfig(memory_bytes=2**22), **shape
        )
        drafted = SpecDecoder(verifier, tokenizer, page["Frequent"](), config)
        plain, found = (
            one.generate(prompts, max_tokens=30, ignore_eos=True)
            for one in (drafted.plain(), drafted)
        )
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        if "tree_nodes" in shape:  # what is chosen depends on how long steps take
            stats = pooled(result.stats for result in found)
            assert any("tree" in name for name in stats.steps_by_shape)
            assert sum(stats.num_by_rank) > 0
    rig = Rig(page["Frequent"](), FakeVerifier())
    rig.bound.begin(0, [1, 2, 1])
    batch = replace(rig.batch([1, 3], [2, 2], 6), shape=BlockShape(6, 3))
    with no_host_sync():
        draft = rig.bound.propose(batch)
    assert draft.tree is not None and [
        int(x[0, 0]) for x in (draft.token_ids, draft.tree.depths)
    ] == [1, 1]


LIES: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("a NoneType; propose must give a DraftOutput", lambda ids: None),
    (
        "token_ids of list; they must be int64 [2, 3]",
        lambda ids: DraftOutput(ids.tolist()),  # type: ignore[arg-type]
    ),
    ("token_ids of int64 [2, 2] on cpu; they must", lambda ids: DraftOutput(ids[:, :2])),
    ("token_ids of int64 [2] on cpu; they must", lambda ids: DraftOutput(ids[:, 0])),
    ("token_ids of float32 [2, 3] on cpu; they must", lambda ids: DraftOutput(ids.float())),
    ("token_ids of int64 [2, 3] on meta; they must", lambda ids: DraftOutput(ids.to("meta"))),
    (
        "num_drafts of int64 [3] on cpu; they must be int64 [2]",
        lambda ids: DraftOutput(ids, ids[0]),
    ),
    (
        "probs of float32 [2, 3, 9] on cpu; they must be float32 [2, 3, 97]",
        lambda ids: DraftOutput(ids, probs=torch.ones(2, 3, 9)),
    ),
    (
        "probs of float32 [2, 3, 97] on cpu; they must be float32 [2, 3, 1]",
        lambda ids: DraftOutput(ids, probs=torch.ones(2, 3, 97), candidate_ids=ids[..., None]),
    ),
    (
        "candidate_ids of int64 [2, 3] on cpu; they must be int64 [2, 3, 3]",
        lambda ids: DraftOutput(ids, probs=torch.ones(2, 3, 3), candidate_ids=ids),
    ),
]


@pytest.mark.parametrize(("said", "lie"), LIES, ids=lambda one: str(one)[:24])
def test_drafts_of_another_form_are_named(
    said: str, lie: Callable[[Tensor], Any], page: dict[str, Any]
) -> None:
    """Before they reach the target; whoever comes next is served."""
    lies, plain = [lie], page["Repeat"]

    class Liar(plain):  # type: ignore[misc, valid-type]
        def propose(self, batch: DecodeBatch) -> Any:
            draft = super().propose(batch)
            return lies.pop()(draft.token_ids) if lies else draft

    config = EngineConfig(
        max_num_seqs=2, max_model_len=64, num_draft_tokens=3, cache=CacheConfig(memory_bytes=2**21)
    )
    decoder = SpecDecoder(paged_verifier(plain_model("llama")), tiny_tokenizer(), Liar(), config)
    with pytest.raises(InvalidInputError, match=re.escape(f"the drafter gave {said}")):
        decoder.generate([[1, 2], [3, 4]], max_tokens=8, ignore_eos=True)
    assert len(decoder.generate([1, 2], max_tokens=8, ignore_eos=True).token_ids) == 8
    assert decoder.engine.pool.num_used == 0
