"""Attention of a drafter that goes token by token, as it is unrolled in training.

Its first step has a row for each position of whole sequences, which are made of the target's
features. Every later one has a row for each block, made of what the step before gave: it sees the
first step's rows before its anchor, and its own block's later ones.

    first step        second step         third step
    0 1 2 3 4 5 6     a b                 c d
    x x x             x                   x         rows of the block with its anchor at 3
    x x x x x           x                   x       rows of the block with its anchor at 5
"""

from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionBackend, AttentionSpec, Scoring
from specdec.attention.mla import MlaBackend, MlaRows, MlaSpec, UpProjection
from specdec.base.errors import InvalidInputError
from specdec.kv_cache import LatentLayerSpec, LayerCache


@dataclass(slots=True)
class Step:
    """The rows of one step, in place of metadata and of a plan.

    Attributes:
        num_seqs: S.
        length: T, positions of a sequence.
        index: of the step, from 0.
        anchors: int64 [S, N], of later steps.
    """

    num_seqs: int
    length: int
    index: int = 0
    anchors: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def seen(self, window: int | None, device: torch.device) -> Tensor:
        """bool [S or 1, rows, keys]: which keys, those of the first step before all later ones, a
        row sees.
        """
        if window not in self._masks:
            keys = torch.arange(self.length, device=device)
            if self.anchors is None:
                distance = (keys[:, None] - keys)[None]
                seen = distance >= 0
            else:
                first = self.anchors[..., None]
                seen, distance = keys < first, first - 1 + self.index - keys
            if window is not None:
                seen = seen & (distance < window)
            if self.anchors is not None:
                own = torch.eye(self.anchors.shape[1], dtype=torch.bool, device=device)
                near = [window is None or before < window for before in range(self.index)]
                blocks = torch.cat([own & one for one in reversed(near)], dim=1)
                seen = torch.cat([seen, blocks.expand(self.num_seqs, -1, -1)], dim=2)
            self._masks[window] = seen
        return self._masks[window]


class UnrolledAttention(AttentionBackend):
    """Attention of unrolled steps. The cache of a layer is a list of the keys and values of each
    step so far.
    """

    name, prefill_tokens, differentiable = "unrolled", 0, True

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """What is not written down here."""
        return [] if spec.chunk is None else ["attention within chunks"]

    def plan(self, metadata: Any) -> Any:
        """The step itself."""
        return metadata

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Not asked for: `run` keeps keys and values."""
        raise NotImplementedError

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any,
        plan: Step,
        **how: Unpack[Scoring],
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        return _attend(query, key, value, cache, plan, **how)


class UnrolledLatent(MlaBackend):
    """The same of latent attention, with keys and values of all heads as they are in a prompt."""

    name, prefill_tokens, differentiable = "unrolled", 0, True
    mha_backend = UnrolledAttention

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """What is not written down here."""
        return [] if spec.indexer is None else ["an indexer that selects positions"]

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """See `MlaBackend.cache_spec`."""
        return LatentLayerSpec(width=self.spec.latent_dim)

    def plan(self, metadata: Any) -> Any:
        """The step itself."""
        return metadata

    def write(self, *args: Any) -> None:
        """Not asked for: `run` keeps keys and values."""
        raise NotImplementedError

    def run(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: Any,
        plan: Step,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `MlaBackend.run`."""
        query = torch.cat([rows.query_nope, rows.query_rope], dim=-1)
        key = torch.einsum("tr,hnr->thn", rows.compressed, up.key)
        turned = rows.key_rope[:, None].expand(-1, key.shape[1], -1)
        value = torch.einsum("tr,hrv->thv", rows.compressed, up.value)
        return _attend(query, torch.cat([key, turned], dim=-1), value, cache, plan, scale=scale)


def unrolled(spec: AttentionSpec | MlaSpec) -> UnrolledAttention | UnrolledLatent:
    """The attention of layers.

    Raises:
        InvalidInputError: it is not written down here.
    """
    kind: Any = UnrolledAttention if isinstance(spec, AttentionSpec) else UnrolledLatent
    shapes = spec.each if isinstance(spec, AttentionSpec) else (spec,)
    if reasons := [reason for shape in shapes for reason in kind.unsupported_reasons(shape)]:
        what = f"the layers have {reasons[0]}, which training does not know"
        raise InvalidInputError(f"{what}; leave --init out")
    backend: UnrolledAttention | UnrolledLatent = kind(spec)
    return backend


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: Step, **how: Unpack[Scoring]
) -> Tensor:
    """What rows of a step [n, heads, D] see, [n, heads, D of values]; keeps keys and values."""
    q, *new = (x.unflatten(0, (plan.num_seqs, -1)).transpose(1, 2) for x in (query, key, value))
    cache.append(tuple(new))
    k, v = new if len(cache) == 1 else (torch.cat(x, dim=2) for x in zip(*cache, strict=True))
    plain = how.get("softcap") is None and how.get("sinks") is None
    if plain and plan.anchors is None and how.get("window") is None:
        several = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=how["scale"], enable_gqa=several
        )
        return out.transpose(1, 2).flatten(0, 1)
    # Heads that share a key head become rows, so that keys are not copied for each.
    groups, rows = q.shape[1] // k.shape[1], q.shape[2]
    folded = q.unflatten(1, (-1, groups)).flatten(2, 3)
    seen = plan.seen(how.get("window"), q.device).repeat(1, groups, 1)[:, None]
    if plain:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen, scale=how["scale"])
    else:
        out = _weigh(folded, k, v, seen, **how)
    return out.unflatten(2, (groups, rows)).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _weigh(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, **how: Unpack[Scoring]) -> Tensor:
    """Softmax attention in float32, with a softcap of the scores or with sinks."""
    scores = q.float() @ k.float().transpose(-1, -2) * how["scale"]
    if (softcap := how.get("softcap")) is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if (sinks := how.get("sinks")) is not None:
        rows = scores.shape[2] * scores.shape[1] // len(sinks)
        sink = sinks.float().view(scores.shape[1], -1).repeat_interleave(rows, dim=1)
        scores = torch.cat([scores, sink[None, :, :, None].expand(len(q), -1, -1, 1)], dim=-1)
    return (scores.softmax(dim=-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)
