"""The function registered with transformers' AttentionInterface: hands each layer's query, key and
value to our backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.attention.backend import AttentionBackend

ATTENTION_NAME = "specdec_paged"
"""Value of `attn_implementation`. No mask function is registered under it, so transformers builds
no masks: causality and windows are the backend's business."""


@dataclass(frozen=True, slots=True)
class PagedForward:
    """What the attention layers of one forward need, each its own; travels as the keyword argument
    `paged` of the model call.
    """

    backends: Sequence[AttentionBackend]
    plans: Sequence[Any]
    caches: Sequence[Any]
    windows: Sequence[int | None]


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: PagedForward | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the paged cache.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no attention weights.

    Raises:
        RuntimeError: the model was called outside `HFVerifier.forward`, or does not pass keyword
            arguments on to its attention.
    """
    if paged is None:
        what = f"{type(module).__name__} got no paged cache"
        raise RuntimeError(f"{what}; call the model through HFVerifier.forward")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = paged.backends[layer].run(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged.caches[layer],
        paged.plans[layer],
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=paged.windows[layer],
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
