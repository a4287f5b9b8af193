"""`flash_attn_varlen_func` as the backends call it: rows on packed keys, and on a context gathered
chunk by chunk.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.attention.aiter.groups import Context, Group
from specdec.attention.merge import merge
from specdec.kernels.aiter import AiterFa, AiterMla


def attend(
    ops: AiterFa | AiterMla,
    group: Group,
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key: Tensor,  # [keys, num_kv_heads, head_dim]
    value: Tensor,  # [keys, num_kv_heads, v_head_dim]
    context: Context | None = None,
    **options: Any,
) -> Any:
    """Rows on packed keys: those of `context`, or the rows' own when there is none.

    Returns:
        [num_tokens, num_heads, v_head_dim], and with `return_lse` log-denominators float32
        [num_heads, num_tokens] beside it.
    """
    return ops.flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=group.query_start_loc,
        cu_seqlens_k=context.cu_seqlens if context else group.query_start_loc,
        max_seqlen_q=group.max_query_len,
        max_seqlen_k=context.max_len if context else group.max_query_len,
        **options,
    )


def attend_in_chunks(
    ops: AiterFa | AiterMla,
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    **options: Any,
) -> Tensor:
    """Rows on their own keys, then on each chunk of the context, merged by the logarithms of their
    denominators.

    Args:
        ops, group, query, key, value, options: as in `attend`.
        read: keys and values of cache slots int64 [n].
    """
    out, lse = attend(
        ops, group, query, key, value, causal=group.causal, return_lse=True, **options
    )
    for chunk in group.context_chunks():
        part, part_lse = attend(
            ops, group, query, *read(chunk.slots), chunk, causal=False, return_lse=True, **options
        )
        out, lse = merge(out, lse, part, part_lse)
    return out.to(query.dtype)
