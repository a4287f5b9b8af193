"""Weights of a drafter replaced while it drafts: nothing is lost, and nothing of the old ones is
used again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.composed.drafter import ComposedDrafter
from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.dflash.coupling import Coupling
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from drafters.eagle3.config import parse_config
from drafters.eagle3.drafter import eagle3_drafter
from drafters.ngram import NGramDrafter
from specdec import CacheConfig, EngineConfig, SamplingParams, SpecDecoder
from specdec.base.errors import SpecDecError
from specdec.model.core import Drafter, Verifier
from specdec.model.weights import Exchange
from specdec.session.outputs import GenerationResult
from tests.drafters.draft_model.test_drafter import draft_model
from tests.drafters.eagle3.heads import SPECULATORS, head_tensors
from tests.evals.tiny import save_tiny
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_model,
    random_dflash,
    random_prompts,
    tiny_tokenizer,
)
from tests.helpers.waiting import in_time
from verifiers.load import load_verifier

PROMPTS = random_prompts(5, seed=1, longest=40)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
}
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


def eagle3(verifier: Verifier, seed: int) -> Drafter:
    raw = {**SPECULATORS, "target_hidden_size": verifier.hidden_size, "embed_requires_grad": True}
    tensors = {
        name: t if t.dtype == torch.int64 else t * (1 + seed)
        for name, t in head_tensors(raw).items()
    }
    drafter = eagle3_drafter(parse_config(raw), tensors, verifier)
    drafter.max_draft_tokens = 3
    return drafter


def coupled(verifier: Verifier, seed: int) -> Drafter:
    config = random_dflash(verifier).config
    a, b = (((value,) * config.max_draft_tokens,) for value in (0.2 + 0.7 * seed, 1.0))
    torch.manual_seed(0)
    return DFlashDrafter(DFlashModel(replace(config, coupling=Coupling((1.0,), a, b))), verifier)


KINDS: dict[str, Callable[[Verifier, int], Drafter]] = {
    "dflash": lambda verifier, seed: random_dflash(verifier, seed=seed),
    "coupling": coupled,
    "eagle3": eagle3,
    "draft-model": lambda verifier, seed: draft_model(verifier, seed=seed)[1],
}


def decoder_of(kind: str = "dflash", seed: int = 0, **config: Any) -> SpecDecoder:
    """Two of these have the same target, and drafters with other weights where the seed differs."""
    verifier = paged_verifier(plain_model("llama"), 4)
    about = {
        "num_draft_tokens": 3,
        "max_num_seqs": 3,
        "cache": CacheConfig(memory_bytes=2**22),
        **config,
    }
    drafter = KINDS[kind](verifier, seed)
    return SpecDecoder(verifier, tiny_tokenizer(), drafter, EngineConfig(**about))


def written(results: list[GenerationResult]) -> list[tuple[list[int], str]]:
    return [(result.token_ids, result.finish_reason) for result in results]


def one_by_one(decoder: SpecDecoder, **sampling: Any) -> list[Any]:
    """What each prompt is given alone, and the fate of every draft."""
    made = [decoder.generate(prompt, **LONG, **sampling) for prompt in PROMPTS[:3]]
    return [(result.token_ids, result.stats) for result in made]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("dflash", "greedy"),
        ("coupling", "sampled"),  # it has no noise otherwise
        ("eagle3", "sampled"),
        ("draft-model", "greedy"),
    ],
)
def test_drafts_are_those_of_the_new_weights_alone(kind: str, way: str) -> None:
    """Also behind prefixes that were cached before, and of features that were put off."""
    sampling = WAYS[way]
    decoder, new = decoder_of(kind), decoder_of(kind, 1)
    old, expected = one_by_one(decoder, **sampling), one_by_one(new, **sampling)
    assert [one[0] for one in old] == [one[0] for one in expected]
    assert old != expected
    decoder.generate(PROMPTS[:3], **LONG, **sampling, num_draft_tokens=0)
    decoder.update_drafter(KINDS[kind](decoder.verifier, 1))
    assert one_by_one(decoder, **sampling) == expected
    assert decoder.engine.prefix_counts.found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 1])
def test_requests_under_way_go_on(way: str, depth: int) -> None:
    """More than are decoded at once, in chunks, with unread steps. The new weights are those of the
    target, so from then on all drafts are right, unless they see what the old ones have written.
    """
    sampling = SamplingParams(**LONG, **WAYS[way])
    plain = decoder_of().plain().generate(PROMPTS, sampling)
    verifier = paged_verifier(plain_model("llama"), 4)
    old, new = (draft_model(verifier, "llama", seed=seed)[1] for seed in (5, 0))
    config = EngineConfig(
        num_draft_tokens=3, max_num_seqs=3, pipeline_depth=depth, max_prefill_tokens=16
    )
    decoder = SpecDecoder(verifier, tiny_tokenizer(), old, config)
    session, steps = decoder.session, 0
    handles = [session.submit(prompt, sampling) for prompt in PROMPTS]
    known: list[list[int]] = []
    while not session.idle:
        if steps == 8:
            decoder.update_drafter(new)
            known = [handle.request.num_accepted for handle in handles]
        session.step()
        steps += 1
    results = [handle.result() for handle in handles]
    assert written(results) == written(plain)
    under_way = 0
    for result, before in zip(results, known, strict=True):
        after = result.stats.num_accepted[len(before) :]
        under_way += bool(before and len(after) > 2)
        assert set(after[:-1]) <= {3} and (not before or sum(before) < 3 * len(before))
    assert under_way, "no request was under way"


def test_threads_that_decode_wait_for_nothing() -> None:
    """One thread decodes while others replace weights again and again."""
    decoder, rounds = decoder_of(num_draft_tokens="auto"), 6
    plain = written(decoder.plain().generate(PROMPTS * 4, **LONG))
    ended = threading.Event()

    def update(seed: int) -> None:
        for number in range(rounds):
            decoder.update_drafter(random_dflash(decoder.verifier, seed=seed + number))
        if seed:
            ended.set()

    threads = [threading.Thread(target=update, args=(seed,)) for seed in (0, 20)]
    for thread in threads:
        thread.start()
    while not ended.is_set():
        assert written(in_time(lambda: decoder.generate(PROMPTS * 4, **LONG))) == plain
    for thread in threads:
        thread.join()
    assert one_by_one(decoder)[0][0] == plain[0][0]


def test_captured_steps_find_the_new_weights_where_the_old_ones_were() -> None:
    decoder = decoder_of()
    kept: Any = decoder.engine.drafter
    before = {name: one.data_ptr() for name, one in kept.model.state_dict().items()}
    fresh = random_dflash(decoder.verifier, seed=1)
    decoder.update_drafter(fresh)
    assert id(decoder.engine.drafter) == id(kept) and decoder.engine.staged is None
    for name, one in kept.model.state_dict().items():
        assert one.data_ptr() == before[name]
        assert torch.equal(one, fresh.model.state_dict()[name])


def test_a_part_of_a_composition_is_replaced() -> None:
    decoder, new = (
        SpecDecoder(
            (verifier := paged_verifier(plain_model("llama"), 4)),
            tiny_tokenizer(),
            ComposedDrafter([NGramDrafter(), random_dflash(verifier, seed=seed)]),
            EngineConfig(num_draft_tokens=3, max_num_seqs=1),
        )
        for seed in (0, 1)
    )
    decoder.update_drafter(random_dflash(decoder.verifier, seed=1))
    kept: Any = decoder.engine.drafter
    alike: Any = new.engine.drafter
    for name, one in kept.parts[1].model.state_dict().items():
        assert torch.equal(one, alike.parts[1].model.state_dict()[name])


def test_what_does_not_fit_is_refused_and_the_old_weights_stay(tmp_path: Path) -> None:
    decoder = decoder_of()
    before = one_by_one(decoder)
    wider = random_dflash(decoder.verifier, head_dim=16)
    fewer = random_dflash(decoder.verifier, block_size=4)
    empty = tmp_path / "empty"
    empty.mkdir()
    for drafter, line in (
        (wider, "config.head_dim is 16, not 8; give one of the same config.json"),
        (fewer, "config.block_size is 4, not 5"),
        (eagle3(decoder.verifier, 0), "it is a SequentialDrafter, not a DFlashDrafter"),
        ("ngram", "it is a NGramDrafter"),
        (empty, "config.json"),
        (tmp_path / "nothing", "nothing"),
        ("unheard", "unknown drafter 'unheard'"),
        (None, "has no weights"),
    ):
        with pytest.raises(SpecDecError, match=line) as caught:
            decoder.update_drafter(drafter)
        assert "\n" not in str(caught.value)
    assert one_by_one(decoder) == before
    with pytest.raises(SpecDecError, match="nothing drafts"):
        decoder.plain().update_drafter(wider)
    copying = decoder.variant(NGramDrafter(), decoder.engine.config)
    with pytest.raises(SpecDecError, match="has no weights, so none can replace them"):
        copying.update_drafter("ngram")


def test_what_was_made_late_is_made_of_the_new_weights_as_well() -> None:
    """Layers make some tensors at their first use."""
    from functools import cached_property

    class Layer:
        def __init__(self, number: float) -> None:
            self.weight = torch.full((2,), number)

        @cached_property
        def doubled(self) -> torch.Tensor:
            return self.weight * 2

    kept: Any = Layer(1.0)
    fresh: Any = Layer(3.0)
    assert kept.doubled[0] == 2
    Exchange(kept, fresh, "other").apply()
    assert kept.weight.tolist() == [3, 3] and kept.doubled.tolist() == [6, 6]


@pytest.mark.parametrize("fresh_is_kept", [False, True])
@pytest.mark.parametrize("kept_is_kept", [False, True])
def test_configs_are_compared_by_what_they_say(
    kept_is_kept: bool, fresh_is_kept: bool, tmp_path: Path
) -> None:
    """Whether transformers' class or an earlier start tells it; each of several that follow."""

    def model(config: Any) -> Any:
        return SimpleNamespace(first=deepcopy(config), second=config, weight=torch.ones(2))

    configs = []
    for number, epsilon in enumerate((1e-5, 1e-5, 1e-3)):
        folder = tmp_path / str(number)
        save_tiny(folder)
        about = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": epsilon}
        (folder / "config.json").write_text(json.dumps(about))
        options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
        loaded: list[Any] = [load_verifier(folder, **options)[0] for _ in range(2)]
        configs.append([verifier.config for verifier in loaded])
    kept, alike, other = (
        one[which]
        for one, which in zip(configs, (kept_is_kept, fresh_is_kept, fresh_is_kept), strict=True)
    )
    Exchange(model(kept), model(alike), "alike")
    with pytest.raises(SpecDecError, match=r"first\.rms_norm_eps is 0\.001, not 1e-05"):
        Exchange(model(kept), model(other), "other")


def test_two_ranks_go_on_with_the_same_weights(tmp_path: Path) -> None:
    folder, verifier = save_tiny(tmp_path / "target"), paged_verifier(plain_model("llama"), 4)
    folders = []
    for seed in (0, 1):
        drafter = random_dflash(verifier, seed=seed, causal=(False, False, False))
        folders.append(tmp_path / f"drafter{seed}")
        write_checkpoint(folders[-1], drafter.config, drafter.model.state_dict())
    (tmp_path / "broken").mkdir()
    about: dict[str, Any] = {"device": "cpu", "dtype": "float32", "drafter": folders[0]}
    engine = EngineConfig(num_draft_tokens=3, max_num_seqs=3)
    one, two = (
        SpecDecoder.from_pretrained(folder, **about, engine=engine, tensor_parallel=count)
        for count in (None, 2)
    )
    sampling, outputs = SamplingParams(**LONG, temperature=0.7, seed=1), []
    for decoder in (one, two):
        session, steps = decoder.session, 0
        handles = [session.submit(prompt, sampling) for prompt in PROMPTS]
        while not session.idle:
            if steps == 6:
                with pytest.raises(SpecDecError, match="config"):
                    decoder.update_drafter(tmp_path / "broken")
                decoder.update_drafter(folders[1])
            session.step()
            steps += 1
        results = [handle.result() for handle in handles]
        outputs.append((written(results), [result.stats for result in results]))
        outputs[-1] = (*outputs[-1], one_by_one(decoder))  # type: ignore[assignment]
    assert outputs[0] == outputs[1]
    two.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_captured_steps_draft_with_the_new_weights() -> None:
    """The same decoder on a GPU, whose steps are graphs by then."""

    def on_gpu(seed: int) -> SpecDecoder:
        verifier = paged_verifier(plain_model("llama"), 16, device="cuda")
        engine = EngineConfig(num_draft_tokens=3, max_num_seqs=2, graphs=True)
        return SpecDecoder(verifier, tiny_tokenizer(), random_dflash(verifier, seed=seed), engine)

    decoder, expected = on_gpu(0), one_by_one(on_gpu(1))
    old = one_by_one(decoder)
    assert decoder.engine.runner.graphs is not None and decoder.engine.runner.graphs.num_captured
    decoder.update_drafter(random_dflash(decoder.verifier, seed=1))
    assert old != expected and one_by_one(decoder) == expected
