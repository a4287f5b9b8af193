"""Reference attention in plain torch: the oracle for every other backend, and the CPU path.

Kernel: gathers a request's blocks and calls `scaled_dot_product_attention`; with sinks or a softcap, which that function does
not have, the same maths is written out in float32. Shapes: any head size, any group size, any block size. Layout: plain. Host:
never waits for the device. Known gap: the gather copies the context once per layer, so on an accelerator it is right, not fast.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.kv_cache import LayerCache, blocks_for


@dataclass(slots=True)
class _Segment:
    """Requests with equally many query rows, attended to in one call."""

    start: int  # first packed row
    num_reqs: int
    width: int  # query rows per request
    num_keys: int  # keys gathered per request, at least the longest sequence
    seq_lens: Tensor  # [num_reqs]
    blocks: Tensor  # int32 [num_reqs * blocks per request]
    causal: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [num_reqs, 1, width, num_keys], 0 where a key is seen; made once per window.

        Causal, and the same with a window of 3, for 2 rows on 4 tokens; a bidirectional block sees all 4:

            1 1 1 0      0 1 1 0
            1 1 1 1      0 1 1 1
        """
        if window not in self.masks:
            device = self.seq_lens.device
            keys = torch.arange(self.num_keys, device=device)
            queries = (self.seq_lens[:, None] - self.width + torch.arange(self.width, device=device))[:, :, None]
            seen = keys <= queries if self.causal else keys < self.seq_lens[:, None, None]
            if window is not None:
                seen = seen & (queries - keys < window)
                if not self.causal:
                    seen = seen & (keys - queries < window)
            self.masks[window] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]
        return self.masks[window]


@dataclass(slots=True)
class TorchRefPlan:
    """Segments of the packed rows, and where their keys and values go."""

    segments: list[_Segment]
    slot_mapping: Tensor


class TorchRefBackend(AttentionBackend):
    """Plain torch on any device."""

    name = "torch_ref"

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why plain torch cannot serve `spec`; empty when it can."""
        reasons = []
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            reasons.append(f"dtype {spec.dtype} (it takes float32, bfloat16 and float16)")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly")
        return reasons

    def plan(self, metadata: AttentionMetadata) -> TorchRefPlan:
        """One segment when all requests have equally many rows, else one segment per request."""
        if metadata.query_lens is None or metadata.seq_lens_host is None:
            shapes = [(0, metadata.num_reqs, metadata.max_query_len, metadata.max_seq_len)]
        else:
            shapes = [
                (i, 1, n, length) for i, (n, length) in enumerate(zip(metadata.query_lens, metadata.seq_lens_host, strict=True))
            ]
        segments, start = [], 0
        for first, num_reqs, width, num_keys in shapes:
            table = metadata.block_table[first : first + num_reqs, : blocks_for(num_keys, self.spec.block_size)]
            segments.append(
                _Segment(
                    start=start,
                    num_reqs=num_reqs,
                    width=width,
                    num_keys=num_keys,
                    seq_lens=metadata.seq_lens[first : first + num_reqs],
                    blocks=table.reshape(-1),
                    causal=metadata.causal,
                )
            )
            start += num_reqs * width
        return TorchRefPlan(segments=segments, slot_mapping=metadata.slot_mapping)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        plan: TorchRefPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        self.write(cache, key, value, plan.slot_mapping)
        outputs = []
        for segment in plan.segments:
            rows = query[segment.start : segment.start + segment.num_reqs * segment.width]
            q = rows.view(segment.num_reqs, segment.width, *rows.shape[1:]).transpose(1, 2)  # [num_reqs, heads, width, D]
            k, v = (self._gather(tensor, segment) for tensor in cache)
            mask = segment.mask(window, query.dtype)
            if sinks is None and softcap is None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            else:
                out = _attend(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
            outputs.append(out.transpose(1, 2).reshape(rows.shape))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`."""
        cache.key.flatten(0, 1).index_copy_(0, slot_mapping, key)
        cache.value.flatten(0, 1).index_copy_(0, slot_mapping, value)

    def _gather(self, tensor: Tensor, segment: _Segment) -> Tensor:
        """Keys or values of a segment, [num_reqs, num_kv_heads, num_keys, head_dim]."""
        rows = tensor.index_select(0, segment.blocks).view(segment.num_reqs, -1, *tensor.shape[2:])
        return rows[:, : segment.num_keys].transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax attention in float32 with a softcap on the scores and a sink logit per head in the denominator."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1).float(), v.repeat_interleave(groups, dim=1).float()
    scores = q.float() @ k.transpose(-1, -2) * scale  # [num_reqs, heads, width, num_keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.float()
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v).to(q.dtype)
