"""What one tenant can tell of another's prompts and outputs, where both have salts: nothing, by
what is answered and by what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from drafters.suffix.drafter import SuffixDrafter
from specdec import CacheConfig, EngineConfig, SpecDecoder
from specdec.engine.requests.scheduler import Chunk
from tests.helpers.live_server import Live, live_server
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer

SECRET = "the code of the safe is 4711, and nobody else may know it"
GUESSES = ("the code of the safe is 0815, and nobody else may know it", SECRET)
BODY: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def live() -> Iterator[Live]:
    """With a drafter that keeps past outputs for all."""
    verifier = paged_verifier(plain_model("llama"), 4)
    drafter = SuffixDrafter(max_draft_tokens=4)
    engine = EngineConfig(num_draft_tokens=4, max_num_seqs=2, cache=CacheConfig(memory_bytes=2**22))
    with live_server(SpecDecoder(verifier, tiny_tokenizer(), drafter, engine)) as live:
        yield live


class Work:
    """Notes what the engine computes: rows of prefills, and verify steps."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        engine: Any = live.decoder.engine
        prefill = engine._prefill

        def noted(chunks: list[Chunk], **options: Any) -> None:
            self.rows += sum(chunk.end - chunk.start for chunk in chunks)
            prefill(chunks, **options)

        monkeypatch.setattr(engine, "_prefill", noted)


def cost(live: Live, work: Work, prompt: str, salt: str | None) -> tuple[int, int, int]:
    """Rows of the prefill, cached tokens and verify steps of a request: what its time is made of,
    and what its answer says.
    """
    work.rows = 0
    body = {**BODY, "prompt": prompt} | ({} if salt is None else {"cache_salt": salt})
    answer = live.post("/v1/completions", json=body).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return work.rows, cached, answer["meta_info"]["spec_verify_ct"]


def test_a_guess_of_anothers_prompt_costs_what_it_costs_alone(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks without a salt is a tenant, too."""
    work = Work(live, monkeypatch)
    alone = [cost(live, work, guess, "before") for guess in GUESSES]
    first = cost(live, work, SECRET, "victim")
    again = cost(live, work, SECRET, "victim")
    assert again[0] < first[0] and again[1] > first[1] == 0, "the victim has its own prefix again"
    for number, salt in enumerate(["spy", "victim ", "Victim", "v", "victim\u200b", None]):
        found = [cost(live, work, guess, salt) for guess in GUESSES]
        assert found == alone, f"guesses of {salt!r} ({number})"
        assert found[0][1] == 0


def test_an_output_with_a_salt_drafts_for_nobody_else(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(live, monkeypatch)
    without = cost(live, work, SECRET, "first")[2]
    for _ in range(4):
        assert cost(live, work, SECRET, "victim")[2] == without
    steps = [cost(live, work, SECRET, None)[2] for _ in range(4)]
    assert steps[0] == without and min(steps[1:]) < without, "without a salt outputs are shared"
