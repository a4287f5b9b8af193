"""Finished requests on disk, for the training of the drafter: as many bytes as allowed, the newest.

Rows are JSON lines with `prompt_ids`, `answer_ids`, `temperature` and `seed`, as `specdec train`
takes them. Files and their folder are for their owner alone.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from specdec.base.errors import InvalidInputError
from specdec.base.writing import append, claimed, make_folder, remove
from specdec.session.link.link import Ended

LEAST_BYTES = 65_536
PARTS = 8
"""Files that a full journal has; the oldest goes as a whole."""
ENDS = ("stop", "length")
"""Finish reasons of outputs that the target wrote to their end."""
LEAST_TOKENS = 2
"""Fewest tokens of an output that a draft can be trained on."""


def is_kept(request: Ended) -> bool:
    """Whether a request may be learned from: it has ended well, and does not say `store: false`. A
    `cache_salt` asks that others cannot tell by the time what was served; drafts could tell.
    """
    asked = request.sampling
    return (
        asked.store
        and asked.cache_salt is None
        and request.finish_reason in ENDS
        and len(request.output_token_ids) >= LEAST_TOKENS
    )


class RequestJournal:
    """Rows in files of a folder, of which the oldest is removed where all would be too large.

    Args:
        folder: made if it is missing; one process at a time has it.
        limit: bytes of all files together.

    Raises:
        InvalidInputError: the folder is in use or cannot be written to, or `limit` is too small.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        if limit < LEAST_BYTES:
            what = f"learn_limit is {limit:,} bytes"
            raise InvalidInputError(f"{what}; it must be at least {LEAST_BYTES:,}")
        self.folder, self._limit = make_folder(folder, private=True), limit
        self._claim = ExitStack()
        self._claim.enter_context(claimed(self.folder))
        self._sizes = {path: path.stat().st_size for path in files_of(self.folder)}
        self._shrink(0)
        self._number = max((int(path.stem.rpartition("-")[2]) for path in self._sizes), default=-1)
        self._next()  # the last file of a server that was killed may end within a line

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def add(self, request: Ended) -> bool:
        """Keeps a request that `is_kept`; whether its row is within the limit."""
        row = {
            "prompt_ids": request.prompt_token_ids,
            "answer_ids": request.output_token_ids,
            "temperature": request.sampling.temperature,
            "seed": request.seed,
        }
        line = json.dumps(row, separators=(",", ":")) + "\n"
        if len(line) > self._limit:
            return False
        if self._size and self._size + len(line) > self._limit // PARTS:
            self._next()
        self._shrink(len(line))
        append(self._path, line, private=True)
        self._sizes[self._path] = self._size + len(line)
        return True

    def close(self) -> None:
        """Lets another process have the folder."""
        self._claim.close()

    @property
    def _size(self) -> int:
        return self._sizes.get(self._path, 0)

    def _next(self) -> None:
        self._number += 1
        self._path = self.folder / f"requests-{self._number:08d}.jsonl"

    def _shrink(self, more: int) -> None:
        """Makes room for so many bytes more."""
        while self._sizes and self.num_bytes + more > self._limit:
            oldest = min(self._sizes)
            remove(oldest)
            del self._sizes[oldest]


def files_of(folder: Path) -> list[Path]:
    """Files of a journal, the oldest first."""
    return sorted(folder.glob(f"requests-{'[0-9]' * 8}.jsonl"))
