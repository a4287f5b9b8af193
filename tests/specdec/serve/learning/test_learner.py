"""A server whose drafter learns while clients ask: answers stay, tau rises, and whatever becomes of
the training, the server goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafters.training.learning.served import read_served
from specdec import CacheConfig, EngineConfig, SamplingParams, SpecDecoder
from specdec.serve.learning import learner as learner_module
from specdec.session.link.link import Ended
from tests.drafters.training.learning.kept import OPTIONS, prompts, write_kept, write_untrained
from tests.drafters.training.toy import write_target
from tests.helpers.live_server import Live, live_server
from tests.helpers.waiting import PAUSE, wait_until

pytestmark = pytest.mark.slow

KEPT = 96
LONG: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "return_token_ids": True}
FRESH = prompts(6, seed=17)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    write_target(folder / "target")
    (folder / "prompts.txt").write_text("w5\n")
    write_untrained(folder)
    write_kept(folder, KEPT)
    for name, changes in (
        ("good", {"max_steps": 30}),
        ("long", {"max_steps": 10**6}),
    ):
        lines = [f"{key} = {json.dumps(value)}" for key, value in {**OPTIONS, **changes}.items()]
        (folder / f"{name}.toml").write_text("\n".join(lines) + "\n")
    return folder


def serving(world: Path, folder: Path, options: str) -> Any:
    decoder = SpecDecoder.from_pretrained(
        world / "target",
        drafter=world / "untrained",
        device="cpu",
        dtype="float32",
        engine=EngineConfig(
            num_draft_tokens=7, max_num_seqs=8, cache=CacheConfig(memory_bytes=2**22)
        ),
    )
    return live_server(
        decoder,
        "untrained",
        learn_init=str(world / "untrained"),
        learn_from_requests=str(folder),
        learn_device="cpu",
        learn_every=KEPT * 32,
        learn_nice=0,
        learn_config=str(world / f"{options}.toml"),
    )


def ask(live: Live, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, **LONG, **more}
    answer = live.post("/v1/completions", json=body, timeout=None)
    return dict(answer.raise_for_status().json())


def fresh(live: Live) -> tuple[list[Any], float]:
    """Answers of which none is kept, and their tau."""
    answers = [ask(live, prompt, store=False) for prompt in FRESH]
    steps = sum(one["meta_info"]["spec_verify_ct"] for one in answers)
    tokens = sum(one["usage"]["completion_tokens"] - 1 for one in answers)
    return [one["choices"][0]["token_ids"] for one in answers], tokens / steps


def teach(live: Live, world: Path) -> None:
    """What many requests would leave, which take long, and one that is asked."""
    for answer in read_served(world / "kept-0"):
        prompt, tokens = list(answer.prompt_ids), list(answer.answer_ids)
        assert live.learner is not None
        live.learner.take(Ended(prompt, tokens, SamplingParams(), 3, "length", [1] * len(tokens)))
    ask(live, [5, 6, 7])


def metric(live: Live, name: str, **labels: str) -> float | None:
    text = live.get("/metrics").text
    for line in text.splitlines():
        found = re.fullmatch(rf"specdec:{name}{{(.*)}} (\S+)", line)
        if found and all(f'{label}="{value}"' in found[1] for label, value in labels.items()):
            return float(found[2])
    return None


def rounds(live: Live, outcome: str) -> int:
    told: dict[str, int] = (live.front.learned or {}).get("rounds", {})
    return told.get(outcome, 0)


def test_tau_rises_and_answers_stay(world: Path, tmp_path: Path) -> None:
    """Clients ask while the weights change: no answer of theirs changes."""
    with serving(world, tmp_path / "kept", "good") as live:
        expected, tau = fresh(live)
        ended, wrong, asked = threading.Event(), list[Any](), [0]

        def client() -> None:
            while not ended.wait(PAUSE):  # the training has its turns as well
                got = ask(live, FRESH[0], store=False)["choices"][0]["token_ids"]
                asked[0] += 1
                if got != expected[0]:
                    wrong.append(got)

        thread = threading.Thread(target=client)
        thread.start()
        try:
            teach(live, world)
            wait_until(lambda: rounds(live, "taken") == 1)
            then = asked[0]
            wait_until(lambda: asked[0] > then)
        finally:
            ended.set()
            thread.join()
        answers, tau_after = fresh(live)
        assert answers == expected and not wrong
        assert tau_after > 1.3 * tau
        assert live.get("/server_info").json()["drafter"] == "learned-0001"
        before, after = (metric(live, "learning_tau", weights=w) for w in ("before", "after"))
        assert before and after and after > 1.1 * before
        assert metric(live, "learning_rounds_total", outcome="taken") == 1
        served, now = (metric(live, "drafter_tau", weights=w) for w in ("before", "now"))
        assert served and now and now > 1.1 * served
    made = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert {path.parent.name for path in made} >= {"kept", "drafter"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)


NOT_BETTER = """import json
words = {words!r}
report = dict(tau=[2.0, 2.0], better=False, says="held-out tau stays")
with open(words[words.index("--out") + 1] + "/learned.json", "w") as file:
    json.dump(report, file)
"""


def test_weights_that_are_not_better_do_not_draft(
    world: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a training says that has come to nothing."""
    monkeypatch.setattr(learner_module, "_START", NOT_BETTER)
    with serving(world, tmp_path / "kept", "good") as live:
        teach(live, world)
        wait_until(lambda: rounds(live, "not better") == 1)
        assert live.get("/server_info").json()["drafter"] == "untrained"
        assert rounds(live, "taken") == 0
    assert "learned-0001 is not taken: held-out tau" in caplog.text


def failed(live: Live, count: int) -> bool:
    return rounds(live, "failed") == count


def test_a_training_that_ends_early_harms_nothing(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, or with nobody left to train for: requests are answered and kept as before, and the
    next training takes its turn.
    """
    with serving(world, tmp_path / "kept", "long") as live:
        expected, tau = fresh(live)
        learner: Any = live.learner
        for number, status in enumerate((-9, 1), start=1):
            teach(live, world)
            wait_until(lambda: learner._process is not None)
            process = learner._process
            if status == 1:
                process.stdin.close()  # as the system does it when the server is killed
            else:
                wait_until(lambda: (tmp_path / "kept" / "learned-0001" / "log.txt").exists())
                os.kill(process.pid, signal.SIGKILL)
            wait_until(partial(failed, live, number))
            assert process.returncode == status
            assert fresh(live) == (expected, tau)
        teach(live, world)
        wait_until(lambda: learner._process is not None)
        ending = learner._process
    assert ending.poll() == -9, "nobody trains once the server has ended"
    assert "learned-0001 " in caplog.text and "drafts from now on" not in caplog.text
