"""Attention maths, written out in float32 for one request at a time."""

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    extra: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of `Sq` queries, the last positions of `Sk` keys.

    Args:
        q: [Sq, heads, D].
        k: [Sk, kv_heads, D].
        v: [Sk, kv_heads, Dv].
        scale: of the scores.
        causal: a query sees keys up to its own position.
        window: keys seen before and after the own position; -1 is all of them.
        softcap: `c` in `c * tanh(score / c)`; 0 is off.
        sinks: [heads], logits in the denominator.
        extra: added to the denominator.

    Returns:
        float32 [Sq, heads, Dv], 0 where no key is seen, and the natural logarithm of the
        denominator, [heads, Sq].
    """
    sq, sk, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own, key = (sk - sq + torch.arange(sq))[:, None], torch.arange(sk)[None]
    seen = (key <= own) if causal else torch.ones(sq, sk, dtype=torch.bool)
    if window[0] >= 0:
        seen = seen & (key >= own - window[0])
    if window[1] >= 0:
        seen = seen & (key <= own + window[1])
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None])
    if extra:
        # The kernel adds it after subtracting the row's maximum.
        top = scores.amax(-1).clamp(min=torch.finfo(torch.float32).min)
        lse = top + torch.log(torch.exp(lse - top) + extra)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    return torch.einsum("hij,jhd->ihd", weights, v), lse
