"""Beginnings of sequences by content: one digest per full block, chained, so that equal ones mean
equal tokens from the start.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(slots=True)
class PrefixCounts:
    """How much of what requests began with was found in the cache, in tokens; requests that do not
    read it count nowhere.
    """

    queried: int = 0
    found: int = 0


def prefix_root(*, rope_len: int, salt: str | None) -> bytes:
    """What the first digest is chained to: all that changes keys and values beside the tokens, and
    whose blocks they are.

    Args:
        rope_len: see `specdec.model.batch.ForwardInput.rope_lens`.
        salt: see `specdec.sampling.params.SamplingParams.cache_salt`.

    >>> prefix_root(rope_len=0, salt=None)
    b''
    >>> prefix_root(rope_len=0, salt="a") == prefix_root(rope_len=9, salt="a")
    False
    """
    return b"" if salt is None and not rope_len else _digest(repr((rope_len, salt)).encode())


def prefix_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    root: bytes = b"",
    ahead: int = 0,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """One digest per full block with `ahead` tokens behind it; a digest covers `root` and all
    tokens up to the last of those.

    Args:
        token_ids: below 2**31.
        block_size: tokens per block.
        root: of `prefix_root`.
        ahead: see `specdec.model.core.Drafter.tokens_ahead`.
        known: digests of the same sequence that were made before.

    >>> a, b = prefix_hashes([1, 2, 3, 4, 5], 2), prefix_hashes([1, 2, 3, 9], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    >>> prefix_hashes([8, 8, 3, 4], 2)[1] == a[1]
    False
    >>> prefix_hashes([1, 2], 2, root=prefix_root(rope_len=9, salt=None))[0] == a[0]
    False
    >>> a, b = (prefix_hashes([1, 2, 3, 4, last], 2, ahead=1) for last in (5, 6))
    >>> a[0] == b[0], a[1] == b[1], len(prefix_hashes([1, 2, 3, 4], 2, ahead=1))
    (True, False, 1)
    >>> prefix_hashes([1, 2, 3, 4, 5], 2, ahead=1, known=a[:1]) == a
    True
    """
    digests = list(known)
    digest = digests[-1] if digests else root
    width = block_size + ahead
    for start in range(len(digests) * block_size, len(token_ids) - width + 1, block_size):
        digest = _digest(digest + array("i", token_ids[start : start + width]).tobytes())
        digests.append(digest)
    return digests


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
