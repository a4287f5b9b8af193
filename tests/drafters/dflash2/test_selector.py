"""DFlash 2's selector against the public `dflash` package."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash.edges import edges_of
from drafters.dflash2.selector import CandidateSelector, SelectorConfig
from specdec.sampling.noise import Purpose, gumbel, of_step, stream
from tests.drafters.heads import ANCHORS, LENGTHS, headed, with_head
from tests.drafters.tiny import FakeVerifier
from tests.helpers.speculators_reference import speculators

reference: Any = pytest.importorskip("dflash.model")

CONFIG = with_head(SelectorConfig(8, 6), windows=(6,) * 3, conv_kernel_size=2, conv_group_size=4)
K = CONFIG.max_draft_tokens


def public(path: Path) -> Any:
    """The public class on our checkpoint."""
    return reference.DFlash2DraftModel.from_pretrained(path, dtype=torch.float32).eval()


def test_drafts_are_the_authors(tmp_path: Path) -> None:
    """Read by name, the public selector takes the same path, unlike the best tokens."""
    drafter, rig = headed(tmp_path / "drafter", CONFIG)
    theirs, lm_head = public(tmp_path / "drafter"), FakeVerifier().head
    batch = rig.batch(ANCHORS, LENGTHS, K)
    hidden = drafter.draft_hidden(batch)
    path, _, _ = theirs.propose(hidden, batch.anchors, lm_head, 0.0)
    assert drafter.propose(batch).token_ids.tolist() == path.tolist()
    assert not torch.equal(path, lm_head(hidden).argmax(-1)), "the selector decides nothing here"
    short = rig.batch(ANCHORS, LENGTHS, 3)
    assert drafter.propose(short).token_ids.tolist() == path[:, :3].tolist()


def test_probabilities_are_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along our path, the public selector draws from the same probabilities."""
    drafter, rig = headed(tmp_path / "drafter", CONFIG, draft_sampling="probabilistic")
    theirs, lm_head = public(tmp_path / "drafter"), FakeVerifier().head
    batch = rig.batch(ANCHORS, LENGTHS, K, temperature=40.0)
    draft, hidden = drafter.propose(batch), drafter.draft_hidden(batch)
    assert draft.probs is not None and draft.candidate_ids is not None
    # as the public selector finds them
    _, candidates = torch.topk(lm_head(hidden), 6, dim=-1, sorted=False)
    ours = (candidates == draft.token_ids[..., None]).long().argmax(-1)
    slots = iter(range(K))
    monkeypatch.setattr(reference, "_sample_probs", lambda q: ours[:, next(slots)])
    path, candidate_ids, q = theirs.propose(hidden, batch.anchors, lm_head, 40.0)
    assert torch.equal(path, draft.token_ids)
    dense = torch.zeros(2, K, CONFIG.vocab_size)
    torch.testing.assert_close(
        dense.scatter(-1, draft.candidate_ids, draft.probs),
        dense.scatter(-1, candidate_ids, q),
        atol=1e-4,
        rtol=1e-4,
    )
    noise = gumbel(
        stream(batch.sampling.seeds, of_step(batch.seq_lens, K), Purpose.DRAFT), CONFIG.vocab_size
    )
    drawn = (draft.probs.log() + noise.gather(-1, draft.candidate_ids)).argmax(-1, keepdim=True)
    assert torch.equal(draft.candidate_ids.gather(-1, drawn).squeeze(-1), draft.token_ids), (
        "drawn by numbers of the step"
    )
    assert drafter.propose(rig.batch(ANCHORS, LENGTHS, K)).probs is None, (
        "greedy requests alone need no distribution"
    )


def test_edges_are_those_of_speculators(tmp_path: Path) -> None:
    """Their selector takes our weights by name, and scores candidates as we do."""
    public = speculators("models.dflash2.model_definitions")
    drafter, rig = headed(tmp_path / "drafter", CONFIG)
    model = drafter.drafter.model
    theirs = public.CandidateSelector(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        rank=8,
        top_k=6,
        initializer_range=0.02,
    )
    theirs.load_state_dict(model.get_submodule("candidate_selector").state_dict())
    hidden = drafter.draft_hidden(rig.batch(ANCHORS, LENGTHS, K))
    logits = FakeVerifier().head(hidden)
    candidates = logits.topk(6).indices
    before = torch.cat(
        [torch.tensor(ANCHORS)[:, None, None].expand(-1, 1, 6), candidates[:, :-1]], dim=1
    )
    head = drafter.drafter.head
    assert isinstance(head, CandidateSelector)
    ours = edges_of(
        head,
        hidden,
        torch.tensor(ANCHORS),
        candidates,
        candidates,
        logits.log_softmax(-1).gather(-1, candidates),
        None,
    )
    for rank in range(6):
        scores = theirs.score_candidates(logits, hidden, before[..., rank], candidates).softmax(-1)
        torch.testing.assert_close(ours[:, :, rank].softmax(-1), scores, atol=1e-4, rtol=1e-4)
