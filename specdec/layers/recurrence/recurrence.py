"""Recurrent layers: the rows of a forward as they see them, and plain torch for what they compute,
the oracle of our kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache.state import StateCache

CHUNK = 64
"""Rows of a prompt that are taken in at once."""

KEY_CHUNK = 16
"""The same where every key channel has a decay of its own, so that every pair of rows has a vector
of them.
"""

MAX_SERIAL = 32
"""Rows taken in one by one at most, so that a token has the same bits alone and among drafts."""


class RecurrentRows(NamedTuple):
    """Whose rows a forward has, and which of them stay.

    Rows of a request are consecutive. Those before position `starts` that its state has not taken
    in come first, from the ring.
    """

    slots: Tensor  # int64 [num_reqs]
    # int64 [num_reqs], position of the first row; a sequence that starts at 0 begins with nothing
    starts: Tensor
    # int64 [num_reqs], rows of the request itself; more up to the next request only pad
    counts: Tensor
    first_rows: Tensor  # int32 [num_reqs + 1], first row of each request, and the end
    max_rows: int  # host bound on the rows of a request, padding included
    max_pending: int  # host bound on accepted rows that a state has not taken in
    final: bool  # no row will be rejected, so the state takes them all in

    @classmethod
    def of(
        cls,
        slots: Tensor,
        metadata: AttentionMetadata,
        *,
        max_pending: int,
        final: bool,
        counts: Tensor | None = None,
    ) -> RecurrentRows:
        """The rows of a forward.

        Args:
            slots: int64 [num_reqs].
            counts: int64 [num_reqs], rows that do not pad; None for all.
        """
        first_rows = metadata.query_start_loc
        widths = (first_rows[1:] - first_rows[:-1]).long()
        starts = metadata.seq_lens.long() - widths
        lengths = widths if counts is None else counts
        return cls(slots, starts, lengths, first_rows, metadata.max_query_len, max_pending, final)

    def finish(self, lengths: Tensor) -> None:
        """Notes in `lengths` int64 [num_slots] what states have taken in, after all layers."""
        lengths.index_copy_(0, self.slots, self.starts + self.counts if self.final else self.starts)

    def pending(self, lengths: Tensor) -> Tensor:
        """int64 [num_reqs]: accepted rows that the states have not taken in."""
        waiting = (self.starts - lengths.index_select(0, self.slots)).clamp(0, self.max_pending)
        return torch.where(self.starts == 0, 0, waiting)


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """One layer's recurrence: a convolution over few rows, then a state of a matrix per value head.

    Per row and value head, with the key head that it shares: `S *= exp(g)`, then `S += k u^T` with
    `u = beta (v - S^T k)` where the rule is "delta" (Gated DeltaNet, arXiv 2412.06464) and
    `u = beta v` where it is "plain" (Mamba-2, arXiv 2405.21060), and the output is `S^T q`, with
    `skip * v` added where there is one. A decay is one number per value head, or one for each of
    its key channels, and so for each row of S (Kimi Delta Attention, arXiv 2510.26692).

    Channels of a row are queries [key heads, K], keys like them and values [value heads, V]; then
    come its gates, `b` and `a` of every value head, or `a` alone for "plain". Of a decay per key
    channel `a` is [value heads, K].

    Attributes:
        num_key_heads, num_value_heads: the second is a multiple of the first.
        key_dim, value_dim: K and V.
        kernel: [channels, taps], the last tap is the row itself.
        kernel_bias: [channels], or None.
        rate: float32 [value heads], `g = -rate * softplus(a + time_bias)`.
        time_bias: like `a`, flat.
        rule: see above. "delta" norms queries and keys (L2) and scales queries by `K ** -0.5`;
            `beta` is `beta_scale * sigmoid(b)`. "plain" has `beta = softplus(a + time_bias)`,
            clamped to `time_limits`.
        beta_scale: 2 where a state may be reflected.
        time_limits: least and largest step.
        skip: float32 [value heads], or None.
        decays_by_key: each key channel has its own decay. The rule is "delta" then.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: Tensor
    kernel_bias: Tensor | None
    rate: Tensor
    time_bias: Tensor
    rule: Literal["delta", "plain"] = "delta"
    beta_scale: float = 1.0
    time_limits: tuple[float, float] = (0.0, float("inf"))
    skip: Tensor | None = None
    decays_by_key: bool = False

    @property
    def channels(self) -> int:
        """Numbers of a row that are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers of a row that the ring keeps: channels and gates."""
        return self.channels + self.num_value_heads * (self.decays + (self.rule == "delta"))

    @property
    def decays(self) -> int:
        """Decays of a row and value head."""
        return self.key_dim if self.decays_by_key else 1

    @property
    def taps(self) -> int:
        """Rows that the convolution sees."""
        return self.kernel.shape[1]


class _Taken(NamedTuple):
    """What a state takes in, in float32: [num_reqs, rows, heads, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor  # [num_reqs, rows, value heads, 1 or K], the logarithm
    beta: Tensor  # [num_reqs, rows, value heads]


def recur(
    x: Tensor,
    recurrence: Recurrence,
    cache: StateCache,
    rows: RecurrentRows,
    max_serial: int = MAX_SERIAL,
) -> Tensor:
    """Runs rows through one recurrent layer, whose cache is updated but for `lengths`, see
    `RecurrentRows.finish`.

    Args:
        x: [T, at least width], inputs of the rows; further columns are left alone.
        max_serial: rows that are taken in one by one at most.

    Returns:
        [T, value heads * V].
    """
    pending = rows.pending(cache.lengths)
    count = rows.max_pending + rows.max_rows
    window = window_of(x[:, : recurrence.width], recurrence.taps, cache.inputs, rows, pending)
    live = torch.arange(count, device=x.device) < (pending + rows.counts)[:, None]
    taken = _inputs(window, recurrence, live)
    fresh = (rows.starts == 0)[:, None, None, None]
    state = torch.where(fresh, 0.0, cache.state.index_select(0, rows.slots))
    if count <= max_serial or not rows.final:
        out, end, before = _serially(state, taken, live, pending, recurrence.rule)
    else:
        out, end = _in_chunks(state, taken, recurrence.rule)
        before = end
    if recurrence.skip is not None:
        out = out + recurrence.skip[:, None] * taken.value
    cache.state.index_copy_(0, rows.slots, end if rows.final else before)
    keep_inputs(x[:, : recurrence.width], cache.inputs, rows)
    return packed_rows(out, rows, pending, len(x)).to(x.dtype).flatten(1)


def packed_rows(out: Tensor, rows: RecurrentRows, pending: Tensor, count: int) -> Tensor:
    """From one line per request [num_reqs, rows, ...] back to packed rows, those that were pending
    left out.
    """
    owners = torch.repeat_interleave(rows.first_rows.diff().long(), output_size=count)
    packed = torch.arange(count, device=out.device)
    places = pending[owners] + packed - rows.first_rows.long()[owners]
    return out[owners, places]


def window_of(x: Tensor, taps: int, ring: Tensor, rows: RecurrentRows, pending: Tensor) -> Tensor:
    """[num_reqs, taps - 1 + max_pending + max_rows, width]: inputs from where the convolution of
    the first pending row begins.
    """
    columns, device = ring.shape[1], x.device
    offsets = torch.arange(1 - taps, rows.max_pending + rows.max_rows, device=device)
    places = offsets + (rows.starts - pending)[:, None]
    new = (places - rows.starts[:, None]).clamp(0, rows.max_rows - 1)
    packed = (rows.first_rows[:-1, None] + new).clamp(max=len(x) - 1)
    old = ring[rows.slots[:, None], places % columns]
    inputs = torch.where((places < rows.starts[:, None])[..., None], old, x[packed])
    return torch.where((places < 0)[..., None], 0, inputs)


def convolved(window: Tensor, kernel: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """[num_reqs, count, channels], tap by tap: a library's convolution may add up in an order that
    depends on the rows' number.
    """
    wide = torch.promote_types(window.dtype, torch.float32)
    mixed = window.new_zeros((), dtype=wide) if bias is None else bias.to(wide)
    for tap, weight in enumerate(kernel.to(wide).unbind(1)):
        mixed = mixed + window[:, tap : tap + count].to(wide) * weight
    return mixed.to(window.dtype)


def _inputs(window: Tensor, recurrence: Recurrence, live: Tensor) -> _Taken:
    """Convolution, activation, norms and gates; rows that are not `live` take in nothing."""
    one, taps = recurrence, recurrence.taps
    mixed = convolved(window[..., : one.channels], one.kernel, one.kernel_bias, live.shape[1])
    active = torch.where(live[..., None], F.silu(mixed), 0)
    widths = [one.num_key_heads * one.key_dim] * 2 + [one.num_value_heads * one.value_dim]
    wide = torch.promote_types(window.dtype, torch.float32)
    query, key, value = (part.to(wide) for part in active.split_with_sizes(widths, dim=-1))
    query, key = (part.unflatten(-1, (one.num_key_heads, one.key_dim)) for part in (query, key))
    if one.rule == "delta":
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        query = query * one.key_dim**-0.5
    gates = window[:, taps - 1 :, one.channels :]
    # contiguous, or else its place in memory decides by which code it is computed
    a = gates[..., -one.num_value_heads * one.decays :].contiguous()
    step = F.softplus(a.to(wide) + one.time_bias)
    if one.rule == "delta":
        beta = gates[..., : one.num_value_heads].contiguous().sigmoid().to(wide) * one.beta_scale
    else:
        step = beta = step.clamp(*one.time_limits)
    decay = -one.rate[:, None] * step.unflatten(-1, (one.num_value_heads, one.decays))
    repeats = one.num_value_heads // one.num_key_heads
    return _Taken(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value.unflatten(-1, (one.num_value_heads, one.value_dim)),
        torch.where(live[..., None, None], decay, 0.0),
        torch.where(live[..., None], beta, 0.0),
    )


def _serially(
    state: Tensor, taken: _Taken, live: Tensor, pending: Tensor, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [num_reqs, rows, heads, V], and the states after all live rows and after the pending
    ones alone.
    """
    before, outputs = state, []
    for row in range(live.shape[1]):
        query, key, value, decay, beta = (part[:, row] for part in taken)
        before = torch.where((pending == row)[:, None, None, None], state, before)
        decayed = state * decay.exp()[..., None]
        v_new = value - (decayed * key[..., None]).sum(-2) if rule == "delta" else value
        moved = decayed + key[..., None] * (v_new * beta[..., None])[..., None, :]
        outputs.append((moved * query[..., None]).sum(-2))
        state = torch.where(live[:, row, None, None, None], moved, state)
    before = torch.where((pending == live.shape[1])[:, None, None, None], state, before)
    return torch.stack(outputs, dim=1), state, before


def _in_chunks(state: Tensor, taken: _Taken, rule: str) -> tuple[Tensor, Tensor]:
    """Outputs [num_reqs, rows, heads, V] and the state after all rows, some at once (WY form, arXiv
    2412.06464, section 3.3).
    """
    outputs, size = [], CHUNK if taken.decay.shape[-1] == 1 else KEY_CHUNK
    for start in range(0, taken.key.shape[1], size):
        query, key, value, decay, beta = (x[:, start : start + size].transpose(1, 2) for x in taken)
        # [num_reqs, heads, rows, 1 or K], the logarithm from the chunk's beginning
        total = decay.cumsum(-2)
        v_new = value
        if rule == "delta":
            v_new = value - (key * total.exp()) @ state
        v_new = v_new * beta[..., None]
        # what a row tells the state depends on what the rows before it in the chunk have told
        if rule == "delta":
            system = _scores(key, key, total) * beta[..., None]
            v_new = torch.linalg.solve_triangular(system, v_new, upper=False, unitriangular=True)
        out = (query * total.exp()) @ state + _scores(query, key, total) @ v_new
        left = (total[..., -1:, :] - total).exp()
        state = state * total[..., -1, :, None].exp() + (key * left).mT @ v_new
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1), state


def _scores(readers: Tensor, key: Tensor, total: Tensor) -> Tensor:
    """[num_reqs, heads, rows, rows]: what each of `readers` has of the keys before it and its own,
    decayed since then.
    """
    later = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).triu(1)
    differences = total[..., :, None, :] - total[..., None, :, :]
    between = differences.masked_fill(later[..., None], float("-inf")).exp()
    if between.shape[-1] == 1:
        return (readers @ key.mT) * between[..., 0]
    return (readers[..., :, None, :] * key[..., None, :, :] * between).sum(-1)


def keep_inputs(x: Tensor, ring: Tensor, rows: RecurrentRows) -> None:
    """Puts inputs where the next step looks for them: of a long piece the last rows."""
    columns = ring.shape[1]
    kept = min(rows.max_rows, columns)
    places = (rows.starts + rows.counts)[:, None] - torch.arange(kept, 0, -1, device=x.device)
    packed = (places - rows.starts[:, None] + rows.first_rows[:-1, None]).clamp(0, len(x) - 1)
    cells = rows.slots[:, None] * columns + places % columns
    new = (places >= rows.starts[:, None])[..., None]
    flat = ring.view(-1, ring.shape[-1])
    flat[cells] = torch.where(new, x[packed], flat[cells])
