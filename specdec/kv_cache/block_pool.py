"""Blocks of the KV cache: allocation, reference counts, and reuse of full blocks by content."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

NULL_BLOCK = 0
"""Block that padding rows write to. No request owns it and nothing read from it is used."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens.

    >>> blocks_for(0, 16), blocks_for(16, 16), blocks_for(17, 16)
    (0, 1, 2)
    """
    return -(-num_tokens // block_size)


class Snapshot(NamedTuple):
    """Recurrent states from which a sequence goes on behind a block.

    Attributes:
        row: of the state caches.
        pending: tokens before the block's end that the states have not taken in; their inputs lie
            in the row's ring.
    """

    row: int
    pending: int = 0


class BlockPool:
    """Hands out blocks `1 .. num_blocks - 1`; block 0 is the null block.

    A block is *used* while its reference count is above 0. A free block keeps its content, and its
    digest if it was published, until `allocate` gives it to someone else: first those that nobody
    can find, then the least recently freed.

    Recurrent layers can go on behind a block only where their states at its end were kept, as a
    *snapshot*; there are few of those, and the least recently used goes first.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        snapshots: rows of the state caches that snapshots may take; None without recurrent layers.

    Attributes:
        unread: blocks in which the drafter has not written its own part.
    """

    def __init__(self, num_blocks: int, snapshots: Sequence[int] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs a null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self._snapshots = snapshots
        self.reset()

    def reset(self) -> None:
        """Takes all blocks back and forgets what they hold."""
        num_blocks = self.num_blocks
        self._ref_counts = [0] * num_blocks
        # free ones
        blocks = range(1, num_blocks)
        self._unpublished: OrderedDict[int, None] = OrderedDict((block, None) for block in blocks)
        # free ones, the least recently freed first
        self._published: OrderedDict[int, None] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free_rows = list(self._snapshots or ())
        # by block, the least recently used first
        self._snapshot_of: OrderedDict[int, Snapshot] = OrderedDict()
        self.unread: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._unpublished) + len(self._published)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks with a reference count of 1 each and forgets their content.

        Raises:
            RuntimeError: fewer than `count` blocks are free; ask `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        taken = [
            (self._unpublished or self._published).popitem(last=False)[0] for _ in range(count)
        ]
        for block in taken:
            self._forget(block)
            self._ref_counts[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drops one reference of each block and returns those now free; the last block of a
        sequence is reused first.
        """
        freed = []
        for block in reversed(blocks):
            if self._ref_counts[block] <= 0:
                raise RuntimeError(f"block {block} released more often than taken")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                (self._published if block in self._digest_of else self._unpublished)[block] = None
                freed.append(block)
        return freed

    def publish(self, block: int, digest: bytes) -> None:
        """Offers a full, written block in use for reuse under `digest`; a second block with the
        same content is not offered.
        """
        if digest not in self._block_of and block not in self._digest_of:
            self._digest_of[block] = digest
            self._block_of[digest] = block

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Takes a reference on the blocks that hold the longest published prefix of `digests`, and
        returns them in order.

        With recurrent layers, the longest that ends in a snapshot.
        """
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        while self._snapshots is not None and found and found[-1] not in self._snapshot_of:
            found.pop()
        for block in found:
            self._published.pop(block, None)
            self._ref_counts[block] += 1
        return found

    def num_known(self, digests: Sequence[bytes], first: int = 0) -> int:
        """How many of the first `digests` are published; those before `first` are."""
        count = first
        while count < len(digests) and digests[count] in self._block_of:
            count += 1
        return count

    def published(self, digest: bytes) -> int | None:
        """The block that is offered under a digest."""
        return self._block_of.get(digest)

    def snapshot_at(self, block: int) -> Snapshot:
        """The states at the end of a block that `match` has found to end in a snapshot."""
        self._snapshot_of.move_to_end(block)
        return self._snapshot_of[block]

    def takes_snapshot(self, block: int) -> bool:
        """Whether a block is offered for reuse and has no snapshot yet."""
        return block in self._digest_of and block not in self._snapshot_of

    @property
    def has_free_row(self) -> bool:
        """Whether `take_row` gives a row without taking it from a snapshot."""
        return bool(self._free_rows)

    def take_row(self) -> int | None:
        """A row for a snapshot, that of the least recently used one if there is no other; None
        where all are taken.
        """
        if self._free_rows:
            return self._free_rows.pop()
        return self._snapshot_of.popitem(last=False)[1].row if self._snapshot_of else None

    def return_row(self, row: int) -> None:
        """Takes back a row of `take_row` that became no snapshot."""
        self._free_rows.append(row)

    def keep_snapshot(self, block: int, snapshot: Snapshot) -> None:
        """Keeps the states at the end of a block that `takes_snapshot`, in a row of `take_row`."""
        self._snapshot_of[block] = snapshot

    def demote_snapshot(self, block: int) -> None:
        """Lets a block's snapshot, if it has one, be the next to go."""
        if block in self._snapshot_of:
            self._snapshot_of.move_to_end(block, last=False)

    def drop_snapshot(self, block: int) -> None:
        """Takes back the row of a block's snapshot, if it has one."""
        if block in self._snapshot_of:
            self._free_rows.append(self._snapshot_of.pop(block).row)

    def discard(self, blocks: Sequence[int]) -> None:
        """Withdraws blocks from reuse by content, such as when their values were not finite."""
        for block in blocks:
            self._forget(block)
            if block in self._published:
                self._unpublished[block] = self._published.pop(block)

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        self.unread.discard(block)
        self.drop_snapshot(block)
