"""Gemma 4's assistants draft what transformers' own class makes of the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.load import load_drafter
from drafters.mtp.assistant import AssistantDrafter, BoundAssistant
from specdec.base.config import CacheConfig
from specdec.base.errors import CheckpointError
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.sequential.toy import Noted, noted_run
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_assistants import assistant_logits, gemma4_target, write_assistant
from tests.helpers.tiny_configs import CONFIGS, WINDOW
from tests.helpers.tiny_models import random_prompts
from verifiers.load import load_verifier

K = 3
TOLERANCE = 1e-4
"""Of the largest logit."""


def case(name: str, folder: Path, **options: Any) -> tuple[Any, Any, Verifier, Drafter]:
    """Target and assistant on transformers' modules and on ours."""
    target = gemma4_target(folder / "target", name)
    assistant = write_assistant(folder / "assistant", target, **options)
    verifier, _ = load_verifier(
        folder / "target", device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    return target, assistant, verifier, load_drafter(folder / "assistant", verifier=verifier)


def worst(target: Any, assistant: Any, noted: list[Noted], wrong: str = "") -> float:
    """The largest error of any draft's logits; unscored tokens count as equal."""
    errors = []
    for request, length, drafts, logits in noted:
        text = request.token_ids[: length + 1]
        if len(text) > length:
            expected = assistant_logits(target, assistant, text, drafts, wrong)
            scored = logits > torch.finfo(logits.dtype).min
            left_out = expected == expected.min(dim=-1, keepdim=True).values
            if not scored.all():
                assert wrong or scored.equal(~left_out)
            errors.append(float((logits - expected)[scored].abs().max() / expected.abs().max()))
    assert len(errors) >= 4
    return max(errors)


@pytest.mark.parametrize(
    ("name", "clusters"),
    [
        ("gemma4", False),
        ("gemma4_shared", True),
        pytest.param("gemma4_moe", False, marks=pytest.mark.slow),
        *[pytest.param("gemma4_unified", False, marks=pytest.mark.slow)]
        * ("gemma4_unified" in CONFIGS),
        pytest.param("gemma4", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_transformers(name: str, clusters: bool, tmp_path: Path) -> None:
    """In an engine, beyond the window; catches a wrong layer, and rejected rows."""
    target, assistant, verifier, drafter = case(name, tmp_path, clusters=clusters)
    assert isinstance(drafter, AssistantDrafter) and drafter.tokens_ahead == 0
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    _, _, noted = noted_run(
        verifier, drafter, random_prompts(3), num_draft_tokens=K, sampling=sampling
    )
    assert max(one.length for one in noted) > 2 * WINDOW
    assert worst(target, assistant, noted) < TOLERANCE
    wrong = {kind: worst(target, assistant, noted, kind) for kind in ("position", "order", "scale")}
    assert min(wrong.values()) > 10 * TOLERANCE, wrong


def test_trees_are_drawn(tmp_path: Path) -> None:
    """Their likeliest path is the chain; catches a hidden state of another row."""
    target, assistant, verifier, drafter = case("gemma4", tmp_path)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = random_prompts(2)
    _, requests, noted = noted_run(
        verifier, drafter, prompts, sampling=sampling, tree_nodes=40, num_draft_tokens="auto"
    )
    _, chains, _ = noted_run(verifier, drafter, prompts, sampling=sampling, num_draft_tokens=K)
    assert [one.token_ids for one in requests] == [one.token_ids for one in chains]
    assert any(count > 1 for one in requests for count in one.num_emitted)
    assert worst(target, assistant, noted) < TOLERANCE


def test_accepted_drafts_leave_their_hidden_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts right up to each depth; catches a hidden state of another row."""
    target, assistant, verifier, drafter = case("gemma4", tmp_path)
    options: dict[str, Any] = {"num_draft_tokens": K, "max_num_seqs": 1}
    _, (plain,), _ = noted_run(verifier, drafter, [[5, 9, 33]], **options)
    offered, steps = BoundAssistant._choose, [0]

    def right(
        self: BoundAssistant, batch: DecodeBatch, hidden: Tensor, first: int, count: int
    ) -> Any:
        chosen = offered(self, batch, hidden, first, count)
        steps[0] += first == 0
        position = int(batch.seq_lens) + first + 1
        if first >= steps[0] % (K + 1) or position >= len(plain.token_ids):
            return chosen
        return chosen._replace(token_ids=torch.tensor([[plain.token_ids[position]]]))

    monkeypatch.setattr(BoundAssistant, "_choose", right)
    _, (request,), noted = noted_run(verifier, drafter, [[5, 9, 33]], **options)
    assert request.token_ids == plain.token_ids and {1, 2, 3, 4} <= set(request.num_emitted)
    assert worst(target, assistant, noted) < TOLERANCE


def test_nothing_is_cached_twice(tmp_path: Path) -> None:
    """Its caches are the target's; lossless with batches, chunks and preemption."""
    _, _, verifier, drafter = case("gemma4", tmp_path)
    memory = 4 * 25 * sum(spec.bytes_per_token(torch.float32) for spec in verifier.kv_specs)
    engine, requests, _ = noted_run(
        verifier,
        drafter,
        random_prompts(4),
        num_draft_tokens=K,
        cache=CacheConfig(memory_bytes=memory),
    )
    caches: Any = engine.runner.drafter
    theirs = [cache.key.data_ptr() for cache in engine.kv_cache.layers[: len(verifier.kv_specs)]]
    assert [cache.key.data_ptr() for cache in caches.caches] == [theirs[2], theirs[2], theirs[3]]
    assert engine.scheduler.num_preemptions > 0
    plain = tiny_engine(verifier, num_draft_tokens=0)
    alone = [plain.add_request(one.prompt_token_ids, one.sampling) for one in requests]
    finish(plain)
    assert [one.token_ids for one in requests] == [one.token_ids for one in alone]


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    """By its heads, which nothing else tells apart."""
    _, _, verifier, _ = case("gemma4", tmp_path / "right")
    write_assistant(tmp_path / "wrong", gemma4_target(tmp_path / "other", "gemma4_shared"))
    with pytest.raises(
        CheckpointError, match="layer 2 reads 2 key heads of 24 of a layer of kind 'full_attention'"
    ):
        load_drafter(tmp_path / "wrong", verifier=verifier)


def test_entries_that_equal_defaults_may_be_missing(tmp_path: Path) -> None:
    """As transformers leaves them out; what its tensors tell is not asked of the config."""
    _, _, verifier, drafter = case("gemma4_shared", tmp_path, clusters=True)
    path = tmp_path / "assistant" / "config.json"
    entries = json.loads(path.read_text())
    for name in ("backbone_hidden_size", "num_centroids", "use_ordered_embeddings"):
        entries.pop(name, None)
    entries["text_config"].pop("sliding_window")
    path.write_text(json.dumps(entries))
    prompts, sampling = random_prompts(2, longest=6), SamplingParams(max_tokens=2, ignore_eos=True)
    runs = [
        noted_run(verifier, one, prompts, num_draft_tokens=1, sampling=sampling)[2]
        for one in (drafter, load_drafter(tmp_path / "assistant", verifier=verifier))
    ]
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one.logits, other.logits)


@pytest.mark.parametrize(
    "change",
    [{"text_config": None}, {"text_config": {"model_type": "gemma4_text", "layer_types": 3}}],
)
def test_a_damaged_config_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    _, _, verifier, _ = case("gemma4", tmp_path)
    path = tmp_path / "assistant" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"its config\.json describes no layers") as caught:
        load_drafter(tmp_path / "assistant", verifier=verifier)
    assert "\n" not in str(caught.value)
