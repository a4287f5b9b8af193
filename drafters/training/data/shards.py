"""Files of records that a stage fills, each whole or not at all, so a killed stage goes on.

Requests of all files flow through the engine without a pause, so that the batch stays full.
"""

import gzip
import hashlib
import json
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from drafters.training.data.source import Answering, Asked
from specdec.base.errors import CheckpointError, SpecDecError
from specdec.base.files import parse_json
from specdec.base.journal import Journal
from specdec.base.writing import make_folder, remove, write_atomically
from specdec.session.outputs import GenerationResult

Job = TypeVar("Job")
Record = TypeVar("Record")
Row = dict[str, Any]
Say = Callable[[str], None]

_KEPT_EVERY = 1.0
"""Seconds of answers that a kill, which cannot be noticed, may cost."""
_EVERY = 10.0
"""Seconds between lines about the progress, at most."""


def plan_shards(split: str, jobs: Sequence[Job], shard_size: int) -> dict[str, Sequence[Job]]:
    """File names and the jobs each holds.

    >>> plan_shards("train", "abc", 2)
    {'train-00000.jsonl.gz': 'ab', 'train-00001.jsonl.gz': 'c'}
    """
    starts = range(0, len(jobs), shard_size)
    return {
        f"{split}-{number:05d}.jsonl.gz": jobs[start : start + shard_size]
        for number, start in enumerate(starts)
    }


def missing_shards(
    folder: Path, shards: Mapping[str, Sequence[Job]], rank: int, world: int
) -> dict[str, Sequence[Job]]:
    """What process `rank` of `world` still has to write; each takes every `world`-th file."""
    return {
        name: jobs
        for name, jobs in list(shards.items())[rank::world]
        if not (folder / name).exists()
    }


def fill_shards(
    answer: Answering,
    folder: Path,
    shards: Mapping[str, Sequence[Job]],
    *,
    start: Callable[[Job], Asked | None],
    record: Callable[[GenerationResult, Job], tuple[list[Row], Job | None]],
    say: Say,
    title: str,
    minutes: float | None,
) -> bool:
    """Writes files as they complete, and says how far it is. What is done of a file lies in a
    journal beside it until then, so that whatever ends the run loses nothing that was finished.

    Args:
        answer: decodes.
        folder: where the files go.
        shards: file names and their jobs.
        start: prompt and sampling of a job; None leaves the job out.
        record: what a result leaves in the file, and the job that goes on from it, such as the
            next turn of a conversation; what is left by that one takes its place.
        say: told about the progress.
        title: of what is written, in these messages.
        minutes: after which to stop; None writes all.

    Returns:
        Whether all are written; False when `minutes` had passed.

    Raises:
        SpecDecError: the target fails.
        CapacityError, InvalidInputError: see `write_atomically`; what was finished before is kept.
    """
    make_folder(folder)
    journals = {name: Journal(_journal(folder, name), {}, command="train") for name in shards}
    left = {name: len(jobs) - len(journals[name]) for name, jobs in shards.items()}
    all_jobs = (
        (name, index, job) for name, jobs in shards.items() for index, job in enumerate(jobs)
    )
    fresh = (
        one for one in all_jobs if one[0] in left and journals[one[0]].get(str(one[1])) is None
    )
    unkept: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    waiting: deque[tuple[str, int, Job]] = deque()
    started: dict[int, tuple[str, int, Job]] = {}
    progress = _Progress(sum(left.values()), title, say)
    kept = sum(map(len, journals.values()))
    text = f"{title}: {progress.total:,} to write in {len(shards)} files"
    say(text + f", {kept:,} are there" * (kept > 0))

    def prompts() -> Iterator[Asked]:
        numbers = count()
        while (one := waiting.popleft() if waiting else next(fresh, None)) is not None:
            prompt = start(one[2])
            if prompt is None:
                done(one[0], one[1], [], 0)
            else:
                started[next(numbers)] = one
                yield prompt

    def done(name: str, index: int, rows: list[Row], tokens: int) -> None:
        unkept[name][str(index)] = {"rows": rows}
        left[name] -= 1
        progress.add(tokens)
        if progress.seconds_unkept >= _KEPT_EVERY:
            keep(*unkept)

    def keep(*names: str) -> None:
        """Writes to the journals, which takes a millisecond for one answer as for many."""
        for name in names:
            journals[name].add_all(unkept.pop(name, {}))
        progress.keep()

    def write_complete() -> None:
        for name in [name for name, missing in left.items() if missing == 0]:
            keep(name)
            del left[name]
            journal = journals.pop(name)
            entries = [journal.get(str(index)) for index in range(len(shards[name]))]
            rows = [row for entry in entries if entry for row in entry["rows"]]
            write_shard(folder / name, rows)
            remove(_journal(folder, name))
            progress.tell()

    going = True
    try:
        while going:  # once more for each turn that came when all others had begun
            started.clear()
            with closing(answer(prompts())) as answered:
                for number, result in answered:
                    name, index, job = started.pop(number)
                    if result.finish_reason == "error":
                        raise SpecDecError(
                            f"the target failed on record {index + 1} of {name}: {result.error}"
                        )
                    rows, following = record(result, job)
                    if following is None:
                        done(name, index, rows, len(result.token_ids))
                    else:
                        waiting.append((name, index, following))
                    write_complete()
                    if left and minutes is not None and progress.seconds >= 60 * minutes:
                        return False
            going = bool(waiting)
        write_complete()  # of which the last jobs were left out
    finally:
        keep(*unkept)
    return True


def _journal(folder: Path, name: str) -> Path:
    return folder / f"{name.removesuffix('.jsonl.gz')}.journal"


class _Progress:
    """What is said while files fill: behind each file, and every `_EVERY` seconds."""

    def __init__(self, total: int, title: str, say: Say) -> None:
        self.total, self._title, self._say = total, title, say
        self._started = self._reported = self._kept = time.monotonic()
        self._done, self._tokens = 0, 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def seconds_unkept(self) -> float:
        """Since answers were last kept."""
        return time.monotonic() - self._kept

    def keep(self) -> None:
        """Answers are kept now."""
        self._kept = time.monotonic()

    def add(self, tokens: int) -> None:
        """One job is done, with so many tokens."""
        self._done += 1
        self._tokens += tokens
        if time.monotonic() - self._reported >= _EVERY:
            self.tell()

    def tell(self) -> None:
        """Says how far it is."""
        self._reported = time.monotonic()
        seconds = max(self.seconds, 1e-9)
        left = (self.total - self._done) * seconds / max(self._done, 1) / 60
        speed = f"{self._tokens / seconds:,.0f} tokens/s"
        self._say(
            f"{self._title}: {self._done:,} of {self.total:,}, {speed}, {left:.1f} minutes left"
        )


def write_shard(path: Path, rows: Sequence[Row]) -> None:
    """Writes a file of records, whole or not at all."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    content = gzip.compress(text.encode(), compresslevel=3, mtime=0)
    write_atomically(path, partial(Path.write_bytes, data=content))


def read_shard(
    path: Path, parse: Callable[[dict[str, Any]], Record], *, stage: str
) -> list[Record]:
    """What `parse` makes of the records of a file that `stage` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with gzip.open(path, "rt") as file:
            return [parse(parse_json(line, strict=False)) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        what = f"{path} is damaged ({error})"
        raise CheckpointError(f"{what}; delete it and run the {stage} stage again") from error


def stable_seed(*parts: object) -> int:
    """A seed in [0, 2**63) of these parts, the same in every process."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
