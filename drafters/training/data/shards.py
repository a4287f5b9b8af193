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
from typing import Any, NamedTuple, TypeVar

from specdec.base.errors import CheckpointError, SpecDecError
from specdec.base.files import parse_json
from specdec.base.writing import write_atomically
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from specdec.session.session import Session

Job = TypeVar("Job")
Record = TypeVar("Record")
Say = Callable[[str], None]


class FinishedShard(NamedTuple):
    """A file whose last record has arrived.

    Attributes:
        name: file name.
        records: in the order of its jobs.
        num_tokens: that the target wrote for it.
    """

    name: str
    records: list[dict[str, Any]]
    num_tokens: int


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


def run_shards(
    session: Session,
    shards: Mapping[str, Sequence[Job]],
    *,
    start: Callable[[Job], tuple[list[int], SamplingParams] | None],
    record: Callable[[GenerationResult, Job], dict[str, Any] | None],
) -> Iterator[FinishedShard]:
    """Files in the order in which they complete.

    Args:
        session: decodes.
        shards: file names and their jobs.
        start: prompt and sampling of a job; None leaves the job out.
        record: what a result leaves in the file; None leaves nothing.

    Raises:
        SpecDecError: the target fails.
    """
    records: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in shards}
    tokens = dict.fromkeys(shards, 0)
    left = {name: len(jobs) for name, jobs in shards.items()}
    started: dict[int, tuple[str, int, Job]] = {}

    def prompts() -> Iterator[tuple[list[int], SamplingParams]]:
        numbers = count()
        for name, jobs in shards.items():
            for index, job in enumerate(jobs):
                prompt = start(job)
                if prompt is None:
                    left[name] -= 1
                else:
                    started[next(numbers)] = name, index, job
                    yield prompt

    def complete() -> Iterator[FinishedShard]:
        for name in [name for name, missing in left.items() if missing == 0]:
            del left[name]
            yield FinishedShard(name, [line for _, line in sorted(records.pop(name).items())], tokens.pop(name))

    with closing(session.map(prompts(), text=False)) as chunks:
        for chunk in chunks:
            result, (name, index, job) = chunk.result, started.pop(chunk.index)
            assert result is not None, "only ends are asked for"
            if result.finish_reason == "error":
                raise SpecDecError(f"the target failed on record {index + 1} of {name}: {result.error}")
            line = record(result, job)
            if line is not None:
                records[name][index] = line
            tokens[name] += len(result.token_ids)
            left[name] -= 1
            yield from complete()
    yield from complete()  # whose last jobs were left out


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[Job]],
    finished: Iterator[FinishedShard],
    say: Say,
    *,
    title: str,
    minutes: float | None,
) -> bool:
    """Writes files as they complete, and says how far it is.

    Args:
        folder: where they go.
        shards: file names and their jobs.
        finished: from `run_shards`.
        say: told about the progress.
        title: of what is written, in these messages.
        minutes: after which to stop behind the next file; None writes all.

    Returns:
        Whether all are written; False when `minutes` had passed.

    Raises:
        CapacityError, InvalidInputError: see `write_atomically`; files written before are kept.
    """
    total = sum(map(len, shards.values()))
    say(f"{title}: {total:,} to write in {len(shards)} files")
    started, done, tokens = time.monotonic(), 0, 0
    for name, records, num_tokens in finished:
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        content = gzip.compress(lines.encode(), compresslevel=3, mtime=0)
        write_atomically(folder / name, partial(Path.write_bytes, data=content))
        done += len(shards[name])
        tokens += num_tokens
        seconds = time.monotonic() - started
        left = (total - done) * seconds / done / 60
        say(f"{title}: {done:,} of {total:,}, {tokens / seconds:,.0f} tokens/s, {left:.1f} minutes left")
        if minutes is not None and seconds >= 60 * minutes and done < total:
            return False
    return True


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
