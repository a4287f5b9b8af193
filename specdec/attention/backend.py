"""What an attention backend is: it says what it cannot serve, makes a plan once per forward, and
runs once per layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Required, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.host import to_device
from specdec.kv_cache import LayerCache

Visibility = Literal["causal", "full", "ancestors"]
"""What of its own request a row sees; see `AttentionMetadata.visibility`."""


BY_NAME = ["it is taken by name alone"]
"""Why `auto` passes over a backend that has to be named."""


class Scoring(TypedDict, total=False):
    """How a layer scores keys: `window`, `softcap` and `sinks` as in `AttentionSpec`, or None."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [num_heads]


class HeadShape(NamedTuple):
    """Heads of one layer; queries have a multiple of those of keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # tokens within which rows attend, see `specdec.attention.chunks`; None for no such bounds
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of its attention backend.

    Layers may differ in their heads. What stands here is the first one's then, `further` has the
    others, and there is a backend object for each shape.

    Attributes:
        device: where the tensors live.
        dtype: type of query, key and value.
        num_heads, num_kv_heads, head_dim, chunk: see `HeadShape`.
        block_size: tokens per cache block.
        windows: every distinct window of the layers of this shape; None is full attention.
        sinks: layers carry a learned logit per head that joins the softmax and attends to nothing.
        softcap: bound `c` in `c * tanh(score / c)`, or None.
        non_causal: blocks whose rows see each other in both directions are needed (drafters).
        cache_dtype: type of the cache when it is not `dtype`: an 8-bit float.
        reads_others: some layers attend to what an earlier layer has cached, and have no keys and
            values of their own.
        further: shapes of other layers, each with its windows.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: frozenset[int | None] = frozenset({None})
    sinks: bool = False
    softcap: float | None = None
    non_causal: bool = False
    cache_dtype: torch.dtype | None = None
    reads_others: bool = False
    further: tuple[tuple[HeadShape, frozenset[int | None]], ...] = ()
    chunk: int | None = None

    @property
    def shape(self) -> HeadShape:
        """Heads of a layer."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.chunk)

    @property
    def each(self) -> "tuple[AttentionSpec, ...]":
        """One for every shape of the model's layers, this one's first."""
        others = (
            replace(self, **shape._asdict(), windows=windows, further=())
            for shape, windows in self.further
        )
        return (replace(self, further=()), *others)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the cache."""
        return self.cache_dtype or self.dtype


class TreeRows(NamedTuple):
    """Where the rows of draft trees stand, see `specdec.base.blocks`. The first row of a request is
    its anchor, and has zeros.
    """

    # int64 [num_tokens], of row `i` the bit `i - 1` and those of the drafts above it
    ancestors: Tensor
    depths: Tensor  # int64 [num_tokens], positions after the anchor

    def seen(self, width: int, window: int | None) -> Tensor:
        """bool [num_reqs, width, width]: which of the `width` rows of its request a row sees."""
        bits = torch.arange(width - 1, device=self.ancestors.device)
        seen = F.pad((self.ancestors.view(-1, width, 1) >> bits & 1).bool(), (1, 0), value=True)
        if window is not None:
            depths = self.depths.view(-1, width)
            seen = seen & (depths[:, :, None] - depths[:, None] < window)
        return seen

    def within(self, width: int, window: int | None) -> "TreeRows":
        """Which rows see each other within a window, for `width` rows per request: a row sees those
        of its ancestors that the window shows.
        """
        if window is None or window >= width:
            return self
        bits = torch.arange(width - 1, device=self.ancestors.device)
        seen = self.seen(width, window)[:, :, 1:]
        return self._replace(ancestors=(seen << bits).sum(-1).flatten())


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One forward's view of the paged cache, shared by all layers.

    Queries are packed without padding. The queries of a request are its last `query_len` positions:

        |<------------- seq_len ------------->|
        |<---- context ---->|<-- query_len -->|

    Attributes:
        query_start_loc: int32 [num_reqs + 1], first row of each request; the last entry is
            `num_tokens`.
        seq_lens: int32 [num_reqs], tokens in the cache once this forward has written its own.
        block_table: int32 [num_reqs, max_blocks]; entries past a request's own blocks may hold any
            valid block id.
        slot_mapping: int64 [num_tokens], `block_id * block_size + offset` of each row; padding rows
            name the null block.
        num_reqs, num_tokens, max_query_len: host counts.
        max_seq_len: host bound, at least the largest of `seq_lens`.
        visibility: "causal": a row sees positions up to its own. "full": it sees all `seq_len`
            positions. "ancestors": it sees the context, the anchor, itself and the drafts above it,
            its position being that of its depth; the lengths only the device knows then. A window
            of W always hides positions W or more away, on both sides when "full".
        min_seq_len: host bound, at most the smallest of `seq_lens`; requests that only pad a batch
            may be shorter.
        query_lens, seq_lens_host: the lengths as host lists when the host knows them exactly
            (prefill), else None, and then every request has `max_query_len` rows.
        ragged: every request has its own number of rows, up to `max_query_len`, which only the
            device knows.
        tree: of "ancestors" alone.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    visibility: Visibility = "causal"
    query_lens: list[int] | None = None
    seq_lens_host: list[int] | None = None
    min_seq_len: int = 0
    tree: TreeRows | None = None
    ragged: bool = False

    @property
    def usual_query_len(self) -> int:
        """Rows by which work is divided: the most of a request, or the mean where they differ."""
        return -(-self.num_tokens // self.num_reqs) if self.ragged else self.max_query_len

    @classmethod
    def uniform(
        cls,
        width: int,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        *,
        max_seq_len: int,
        min_seq_len: int = 0,
        starts: Tensor | None = None,
    ) -> "AttentionMetadata":
        """`width` new rows for every request, with lengths that only the device knows; `starts` if
        `query_start_loc` is there.
        """
        num_reqs = len(seq_lens)
        num_tokens = num_reqs * width
        if starts is None:
            device = seq_lens.device
            starts = torch.arange(0, num_tokens + 1, width, dtype=torch.int32, device=device)
        return cls(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=width,
            max_seq_len=max_seq_len,
            min_seq_len=min_seq_len,
        )

    @classmethod
    def packed(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> "AttentionMetadata":
        """New rows of requests whose lengths the host knows."""
        int32 = partial(to_device, dtype=torch.int32, device=block_table.device)
        return cls(
            query_start_loc=int32([0, *accumulate(query_lens)]),
            seq_lens=int32(seq_lens),
            block_table=block_table,
            slot_mapping=slot_mapping,
            num_reqs=len(query_lens),
            num_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            min_seq_len=min(seq_lens),
            query_lens=list(query_lens),
            seq_lens_host=list(seq_lens),
        )


Spec = TypeVar("Spec")


class Backend(ABC, Generic[Spec]):
    """Attention over the paged cache: a capability statement, a plan and a run.

    One object serves the layers of one shape of a model on one device. `plan` may look at every
    request of the batch; `run` should only launch kernels. Neither may make the host wait for the
    device.
    """

    name: ClassVar[str]
    captures_prefill: bool = False
    """Whether a prefill whose lengths only the device knows costs no more than another."""
    prefill_tokens: ClassVar[int]
    """Prompt tokens of a step on an accelerator, unless the user says how many. Every chunk reads
    all weights, those of all experts too, so large ones are fastest, as far as memory goes."""
    differentiable: ClassVar[bool] = False
    """Whether gradients flow through it, so that plain torch has to compute what surrounds it."""
    steady_len: int = 0
    """Tokens in the cache from which on a plan of decoding depends on no length any more; 0 where
    there is no such number.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def unsupported_reasons(cls, spec: Spec) -> list[str]:
        """All reasons why this backend cannot serve `spec`; empty when it can."""

    @classmethod
    def tree_reasons(cls, spec: Spec) -> list[str]:
        """All reasons why this backend cannot verify draft trees with `spec`, which it serves."""
        return [f"{cls.name} has no masks for them"]

    @classmethod
    def ragged_reasons(cls, spec: Spec) -> list[str]:
        """All reasons why this backend, which can serve `spec`, cannot verify fewer rows of one
        request than of another; see `AttentionMetadata.ragged`.
        """
        return [f"{cls.name} takes equally many rows of all requests"]

    @classmethod
    def reasons_against_auto(cls, spec: Spec) -> list[str]:
        """Why `auto` should pass over this backend although it can serve `spec`; by name it is
        taken all the same.
        """
        return []

    @classmethod
    def describe(cls, spec: Spec) -> list[str]:
        """What to know about how this backend would serve `spec`, for people; mostly nothing."""
        return []

    @property
    def mixes_cache_types(self) -> bool:
        """Whether some layers may have a cache in the model's own type where the spec asks for
        another.
        """
        return False

    def _has_plain_kernels(self) -> bool:
        """Whether the kernels for a cache in the model's own type are there, and right as far as
        they are checked.
        """
        spec: Any = self.spec
        plain = replace(spec, cache_dtype=None)
        against = self.reasons_against_auto(plain)
        return not self.unsupported_reasons(plain) and against in ([], BY_NAME)

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> Any:
        """Work that all layers of one forward share, such as masks and index lists."""


class AttentionBackend(Backend[AttentionSpec]):
    """Attention with ordinary heads."""

    prefill_tokens = 8192
    fits_fused_layers: bool = False
    """Whether our Triton kernels may compute what surrounds it; the reference takes plain torch."""

    @cached_property
    def each(self) -> "tuple[AttentionBackend, ...]":
        """Backends of this kind for every shape of the model's layers, this one first."""
        return (self, *map(type(self), self.spec.each[1:]))

    @property
    def mha_backend(self) -> "type[AttentionBackend]":
        """Backend for further layers with ordinary heads, such as those of a drafter: this one."""
        return type(self)

    def run(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        cache: LayerCache,
        plan: Any,
        **how: Unpack[Scoring],
    ) -> Tensor:
        """Writes `key` and `value` to the cache, then attends to the cache.

        Returns:
            [num_tokens, num_heads, head_dim] in the dtype of `query`.
        """
        self.write(cache, key, value, plan.slot_mapping)
        return self.read(query, cache, plan, **how)

    def read(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        cache: LayerCache,
        plan: Any,
        **how: Unpack[Scoring],
    ) -> Tensor:
        """`run` for rows whose keys and values the cache holds already, which a spec that
        `reads_others` asks for.
        """
        raise NotImplementedError(f"{self.name} refuses layers that read the cache of others")

    @abstractmethod
    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores rows [num_tokens, num_kv_heads, head_dim] at int64 `slot_mapping` [num_tokens]."""
