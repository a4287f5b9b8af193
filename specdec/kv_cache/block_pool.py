"""Blocks of the KV cache: allocation, reference counts, and reuse of full prompt blocks by content."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

NULL_BLOCK = 0
"""Block that padding rows write to. No request owns it and nothing read from it is used."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens.

    >>> blocks_for(0, 16), blocks_for(16, 16), blocks_for(17, 16)
    (0, 1, 2)
    """
    return -(-num_tokens // block_size)


def prefix_hashes(token_ids: Sequence[int], block_size: int, *, kind: bytes = b"", ahead: int = 0) -> list[bytes]:
    """One digest per full block with `ahead` tokens behind it; a digest covers `kind` and all tokens up to the last of those.

    >>> a, b = prefix_hashes([1, 2, 3, 4, 5], 2), prefix_hashes([1, 2, 3, 9], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    >>> prefix_hashes([8, 8, 3, 4], 2)[1] == a[1], prefix_hashes([1, 2], 2, kind=b"long")[0] == a[0]
    (False, False)
    >>> a, b = prefix_hashes([1, 2, 3, 4, 5], 2, ahead=1), prefix_hashes([1, 2, 3, 4, 6], 2, ahead=1)
    >>> a[0] == b[0], a[1] == b[1], len(prefix_hashes([1, 2, 3, 4], 2, ahead=1))
    (True, False, 1)
    """
    digests: list[bytes] = []
    digest = kind
    width = block_size + ahead
    for start in range(0, len(token_ids) - width + 1, block_size):
        content = ",".join(map(str, token_ids[start : start + width])).encode()
        digest = blake2b(digest + content, digest_size=16).digest()
        digests.append(digest)
    return digests


class BlockPool:
    """Hands out blocks `1 .. num_blocks - 1`; block 0 is the null block.

    A block is *used* while its reference count is above 0. A free block keeps its content, and its digest if it was published,
    until `allocate` gives it to someone else; the least recently freed goes first.

    Recurrent layers can go on behind a block only where their states at its end were kept, as a *snapshot*; there are few of
    those, and the least recently used goes first.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        snapshots: rows of the state caches that snapshots may take; None where no layer is recurrent.
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
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free_rows = list(self._snapshots or ())
        self._row_of: OrderedDict[int, int] = OrderedDict()  # by block, the least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks with a reference count of 1 each and forgets their content.

        Raises:
            RuntimeError: fewer than `count` blocks are free; ask `num_free` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._ref_counts[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drops one reference of each block and returns those now free; the last block of a sequence is reused first."""
        freed = []
        for block in reversed(blocks):
            if self._ref_counts[block] <= 0:
                raise RuntimeError(f"block {block} released more often than taken")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                freed.append(block)
        return freed

    def publish(self, block: int, digest: bytes) -> None:
        """Offers a full, written block for reuse under `digest`; a second block with the same content is not offered."""
        if digest not in self._block_of and block not in self._digest_of:
            self._digest_of[block] = digest
            self._block_of[digest] = block

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Takes a reference on the blocks that hold the longest published prefix of `digests`, and returns them in order.

        With recurrent layers, the longest that ends in a snapshot.
        """
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        while self._snapshots is not None and found and found[-1] not in self._row_of:
            found.pop()
        for block in found:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
        return found

    def snapshot_at(self, block: int) -> int:
        """The row that keeps the states at the end of a block that `match` has found to end in a snapshot."""
        self._row_of.move_to_end(block)
        return self._row_of[block]

    def keep_snapshot(self, block: int) -> int | None:
        """A row for the states at the end of a block; None where it is not offered for reuse, or has its snapshot."""
        if not self._snapshots or block not in self._digest_of or block in self._row_of:
            return None
        row = self._free_rows.pop() if self._free_rows else self._row_of.popitem(last=False)[1]
        self._row_of[block] = row
        return row

    def discard(self, blocks: Sequence[int]) -> None:
        """Withdraws blocks from reuse by content, for example after their request produced non-finite values."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        if block in self._row_of:
            self._free_rows.append(self._row_of.pop(block))
