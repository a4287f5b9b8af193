"""Files of records that a stage fills through the engine; each appears whole or not at all, so a killed stage goes on.

Requests of all files flow through the engine without a pause in between, so that the batch stays full.
"""

import gzip
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from specdec.base.errors import CheckpointError, SpecDecError
from specdec.base.files import parse_json
from specdec.base.writing import write_atomically
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from specdec.session.session import Session

Job = TypeVar("Job")
Record = TypeVar("Record")
Say = Callable[[str], None]

_EVERY = 10.0
"""Seconds between lines about the progress, at most."""


def plan_shards(split: str, jobs: Sequence[Job], shard_size: int) -> dict[str, Sequence[Job]]:
    """File names and the jobs each holds.

    >>> plan_shards("train", "abc", 2)
    {'train-00000.jsonl.gz': 'ab', 'train-00001.jsonl.gz': 'c'}
    """
    starts = range(0, len(jobs), shard_size)
    return {f"{split}-{number:05d}.jsonl.gz": jobs[start : start + shard_size] for number, start in enumerate(starts)}


def missing_shards(folder: Path, shards: Mapping[str, Sequence[Job]], rank: int, world: int) -> dict[str, Sequence[Job]]:
    """What process `rank` of `world` still has to write; each takes every `world`-th file."""
    return {name: jobs for name, jobs in list(shards.items())[rank::world] if not (folder / name).exists()}


def fill_shards(
    session: Session,
    folder: Path,
    shards: Mapping[str, Sequence[Job]],
    *,
    start: Callable[[Job], tuple[list[int], SamplingParams] | None],
    record: Callable[[GenerationResult, Job], dict[str, Any] | None],
    say: Say,
    title: str,
    minutes: float | None,
) -> bool:
    """Writes files as they complete, and says how far it is.

    Args:
        session: decodes.
        folder: where the files go.
        shards: file names and their jobs.
        start: prompt and sampling of a job; None leaves the job out.
        record: what a result leaves in the file; None leaves nothing.
        say: told about the progress.
        title: of what is written, in these messages.
        minutes: after which to stop behind the next file; None writes all.

    Returns:
        Whether all are written; False when `minutes` had passed.

    Raises:
        SpecDecError: the target fails.
        CapacityError, InvalidInputError: see `write_atomically`; files written before are kept.
    """
    records: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in shards}
    left = {name: len(jobs) for name, jobs in shards.items()}
    started: dict[int, tuple[str, int, Job]] = {}
    progress = _Progress(sum(left.values()), title, say)
    say(f"{title}: {progress.total:,} to write in {len(shards)} files")

    def prompts() -> Iterator[tuple[list[int], SamplingParams]]:
        numbers = count()
        for name, jobs in shards.items():
            for index, job in enumerate(jobs):
                prompt = start(job)
                if prompt is None:
                    left[name] -= 1
                    progress.add(0)
                else:
                    started[next(numbers)] = name, index, job
                    yield prompt

    def write_complete() -> bool:
        """Writes what is complete, and tells whether to stop."""
        written = [name for name, missing in left.items() if missing == 0]
        for name in written:
            del left[name]
            rows = [row for _, row in sorted(records.pop(name).items())]
            text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
            content = gzip.compress(text.encode(), compresslevel=3, mtime=0)
            write_atomically(folder / name, partial(Path.write_bytes, data=content))
            progress.tell()
        return bool(written and left) and minutes is not None and progress.seconds >= 60 * minutes

    with closing(session.map(prompts(), text=False)) as chunks:
        for chunk in chunks:
            result, (name, index, job) = chunk.result, started.pop(chunk.index)
            assert result is not None, "only ends are asked for"
            if result.finish_reason == "error":
                raise SpecDecError(f"the target failed on record {index + 1} of {name}: {result.error}")
            row = record(result, job)
            if row is not None:
                records[name][index] = row
            left[name] -= 1
            progress.add(len(result.token_ids))
            if write_complete():
                return False
    write_complete()  # of which the last jobs were left out
    return True


class _Progress:
    """What is said while files fill: behind each file, and every `_EVERY` seconds."""

    def __init__(self, total: int, title: str, say: Say) -> None:
        self.total, self._title, self._say = total, title, say
        self._started = self._told = time.monotonic()
        self._done, self._tokens = 0, 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def add(self, tokens: int) -> None:
        """One job is done, with so many tokens."""
        self._done += 1
        self._tokens += tokens
        if time.monotonic() - self._told >= _EVERY:
            self.tell()

    def tell(self) -> None:
        """Says how far it is."""
        self._told = time.monotonic()
        seconds = max(self.seconds, 1e-9)
        left = (self.total - self._done) * seconds / max(self._done, 1) / 60
        speed = f"{self._tokens / seconds:,.0f} tokens/s"
        self._say(f"{self._title}: {self._done:,} of {self.total:,}, {speed}, {left:.1f} minutes left")


def read_shard(path: Path, parse: Callable[[dict[str, Any]], Record], *, stage: str) -> list[Record]:
    """What `parse` makes of the records of a file that `stage` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with gzip.open(path, "rt") as file:
            return [parse(parse_json(line, strict=False)) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it and run the {stage} stage again") from error


def stable_seed(*parts: object) -> int:
    """A seed in [0, 2**63) of these parts, the same in every process."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
