"""Real engines of a real cluster on this machine: two at a time, and each thing that may go wrong
with them.

Ray takes seconds to start, and every engine is a process that imports torch. So one cluster serves
all of it, each part shows several things, and it is one test, because pytest-xdist would give
several tests to several workers, each with a cluster.
"""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.base.errors import SpecDecError
from specdec.base.metrics import pooled
from specdec.cli.main import main
from specdec.cluster.config import ClusterConfig, EngineSpec
from specdec.cluster.journal import ClusterJournal
from specdec.cluster.pool import Pool
from specdec.cluster.rows import Row
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.evals.tiny import save_tiny
from tests.helpers.cluster_drafter import HOME, begun
from tests.helpers.waiting import HANG, wait_until
from verifiers.config import recalled

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[3]
TWO = ClusterConfig(engines=2, gpus_per_engine=0, cpus_per_engine=0.5)
LOAD = LoadConfig(device="cpu", dtype="float32")
PROMPTS = ["abcabcab" * (1 + index % 3) + "xyz"[index % 3] * (index // 3) for index in range(12)]


def engine(max_num_seqs: int) -> EngineConfig:
    """Small, with a fixed number of drafts."""
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=128,
        num_draft_tokens=4,
        cache=CacheConfig(memory_bytes=2**22),
    )


def sampling(index: int) -> SamplingParams:
    """Sampled, so that a wrong seed shows."""
    return SamplingParams(max_tokens=24, temperature=0.7, seed=3 + index, ignore_eos=True)


@pytest.mark.slow
def test_engines_of_a_cluster(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may go wrong with them, and what becomes of the run. All load one target, of which the
    first start tells the others: without the classes of its model they start in half the time.
    """
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recalled, "cache_folder", lambda: tmp_path / "cache")
    context = ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
    )
    try:
        alone = SpecDecoder.from_pretrained(
            save_tiny(tmp_path / "target"),
            drafter="ngram",
            device="cpu",
            dtype="float32",
            engine=engine(2),
        )
        for part in (killed_driver, prompt_that_kills, unlike_engines):
            (tmp_path / part.__name__).mkdir()
            with subtests.test(part.__name__):
                part(context.address_info["gcs_address"], alone, tmp_path / part.__name__)
    finally:
        for thread in filter(of_ray_data, threading.enumerate()):
            thread.join(HANG)
        ray.shutdown()


def of_ray_data(thread: threading.Thread) -> bool:
    """Whether Ray Data has started it and it ends; one that found Ray gone would end this process.

    Ray stops its prefetcher after the last row alone; else it is parked for good.
    """
    started_by = getattr(thread, "_target", None), type(thread)
    return thread.name != "Prefetcher" and any(
        str(getattr(one, "__module__", "")).startswith("ray.data") for one in started_by
    )


def plan(alone: SpecDecoder, folder: Path, **given: object) -> str:
    """Says what will happen with engines of the same target, which is returned."""
    target = Path(alone.verifier.name)
    (target / "plan").write_text(json.dumps({"folder": str(folder), **given}))
    return str(target)


def same(found: list[GenerationResult], expected: list[GenerationResult]) -> None:
    """Outputs, accepted and emitted counts, and what is pooled of them."""
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.stats.num_accepted for one in found] == [one.stats.num_accepted for one in expected]
    assert [one.stats.num_emitted for one in found] == [one.stats.num_emitted for one in expected]
    one, other = (pooled(result.stats for result in results) for results in (found, expected))
    assert (one.tau, one.mean_accepted, one.histogram) == (
        other.tau,
        other.mean_accepted,
        other.histogram,
    )
    assert one.tau > 1, "drafts were accepted"


def killed_driver(address: str, alone: SpecDecoder, folder: Path) -> None:
    """`kill -9`, then the same command: what was kept is not computed again, nothing is lost,
    figures are those of one engine.
    """
    target = plan(alone, folder, most=6)
    prompts, kept = folder / "prompts.txt", folder / "kept.jsonl"
    prompts.write_text("\n".join(PROMPTS))
    line = (
        f"generate --file {prompts} --raw --json --out {kept} --model {target} --drafter {HOME}"
        " --device cpu --dtype float32 --max-num-seqs 1 --max-model-len 128 -k 4 --kv-memory 4M"
        " --max-tokens 24 --ignore-eos --temperature 0.7 --seed 3 --engines 2"
        f" --cpus-per-engine 0.5 --ray {address}"
    )
    command = [sys.executable, "-m", "specdec", *line.split()]
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_until(
        lambda: (
            first.poll() is not None or (kept.exists() and len(kept.read_text().splitlines()) >= 3)
        )
    )
    assert first.poll() is None, first.stderr and first.stderr.read()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    (folder / "go_on").touch()
    lines = kept.read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    assert 1 + 2 <= len(whole) < 1 + len(PROMPTS), "killed in the middle"
    earlier = {pid for pid, _ in begun(folder)}
    assert len(earlier) == 2, "both engines worked"

    shown = io.StringIO()
    with redirect_stdout(shown):
        # a run may go on with another number of them
        assert main([*command[3:], "--engines", "1"]) == 0
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert records[: len(whole)] == whole, "what was kept stays"
    assert len({record["key"] for record in records[1:]}) == len(records) - 1 == len(PROMPTS)
    later = [prompt for pid, prompt in begun(folder) if pid not in earlier]
    assert len(later) == len(PROMPTS) - (len(whole) - 1), "only what was missing is computed"

    expected = [alone.generate(prompt, sampling(0)) for prompt in PROMPTS]
    printed = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert [one["token_ids"] for one in printed] == [one.token_ids for one in expected]
    results = [GenerationResult.from_dict(record["results"][0]) for record in records[1:]]
    of_prompt = {tuple(result.prompt_token_ids): result for result in results}
    same([of_prompt[tuple(result.prompt_token_ids)] for result in expected], expected)


def prompt_that_kills(address: str, alone: SpecDecoder, folder: Path) -> None:
    """Rows of a killed engine run again, finished ones do not, and who kills an engine alone gets
    an error.
    """
    tokens = [alone.tokenize(prompt) for prompt in PROMPTS]
    too_long = list(range(10, 90)) * 2
    target = plan(alone, folder, poison=tokens[4], prompts=tokens)
    rows = [Row(str(index), prompt, sampling(index)) for index, prompt in enumerate(PROMPTS)]
    rows.append(Row("too long", too_long, sampling(0)))
    journal = ClusterJournal(folder / "kept.jsonl", {"k": 4}, command="bench")
    answers = {
        answer.key: answer
        for answer in journal.run(
            Pool.of(address, TWO, EngineSpec(target, HOME, LOAD, engine(2))), rows
        )
    }

    assert answers.keys() == {row.key for row in rows}
    assert {key for key, answer in answers.items() if answer.error} == {"4", "too long"}
    assert "alone" in str(answers["4"].error)
    assert "limit is 128" in str(answers["too long"].error)
    served = [index for index in range(len(PROMPTS)) if index != 4]
    same(
        [answers[str(index)].results[0] for index in served],
        [alone.generate(PROMPTS[index], sampling(index)) for index in served],
    )
    beginnings = [prompt for _, prompt in begun(folder)]
    assert beginnings.count(tokens[4]) == 2, "once among others, once alone"
    # Of the others only those in the other slots of the two engines that died.
    assert len(beginnings) - 2 - len(served) <= 2
    again = ClusterJournal(folder / "kept.jsonl", {"k": 4}, command="bench")
    assert [again.get(row.key) is not None for row in rows] == [
        index in served for index in range(len(rows))
    ]


def unlike_engines(address: str, alone: SpecDecoder, folder: Path) -> None:
    """The answer of a machine with another GPU ends the run with one line, and is not kept."""
    target = plan(alone, folder, other_device=True)
    pool = Pool.of(address, TWO, EngineSpec(target, HOME, LOAD, engine(1)))
    journal = ClusterJournal(folder / "kept.jsonl", {"k": 4}, command="bench")
    rows = [Row(str(index), prompt, sampling(index)) for index, prompt in enumerate(PROMPTS)]
    with pytest.raises(
        SpecDecError,
        match=r"^the engine on .* has device .* and the run has .* machines that are alike$",
    ) as raised:
        list(journal.run(pool, rows))
    assert "another GPU" in str(raised.value)
    # Threads that hand rows over end while the error is held.
    threads = list(filter(of_ray_data, threading.enumerate()))
    for thread in threads:
        thread.join(HANG)
    assert not [thread.name for thread in threads if thread.is_alive()]
    assert all(
        json.loads(line).get("key") != None  # noqa: E711
        for line in (folder / "kept.jsonl").read_text().splitlines()[1:]
    )
