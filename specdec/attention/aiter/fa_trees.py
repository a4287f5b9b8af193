"""Rows of draft trees, for which AITER's kernels have no masks: each sees the whole context, and
what is above it.

The context goes through the kernel for bidirectional blocks, the rows among themselves through
plain torch, and the two are merged by the logarithms of their denominators. Sinks count once, with
the rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.aiter.fa_triton import Layer, Rows, Setup, blocks, gathered, in_place
from specdec.attention.aiter.groups import Group
from specdec.attention.backend import TreeRows
from specdec.attention.merge import merge
from specdec.kernels.aiter import AiterTriton


def context_and_rows(setup: Setup[AiterTriton], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Rows of every request behind its context, as blocks of equally many."""
    whole = group.padded
    if whole is not None:
        rows = type(rows)(*(side.index_select(0, whole.rows) for side in rows))
    tree = whole.tree if whole else group.tree
    assert tree is not None
    assert layer.window is None and layer.softcap is None, "refused by `tree_reasons`"
    keys = (
        in_place(group, layer)
        if setup.reads_in_place
        else gathered(setup, group, layer, rows.query.dtype)
    )
    context = group.seq_lens - group.query_start_loc.diff()
    out, log_sums = blocks(setup, group, layer, rows.query, keys, context, return_softmax_lse=True)
    parts = out.flatten(0, 1), log_sums.transpose(0, 1).flatten(1)
    own = _among_themselves(setup, tree, group.max_query_len, layer, rows)
    merged = merge(*parts, *own)[0].to(rows.query.dtype)
    return merged.index_select(0, whole.kept) if whole else merged


def _among_themselves(
    setup: Setup[AiterTriton], tree: TreeRows, width: int, layer: Layer, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Attention of `width` rows per request to each other, and to sinks: in float32, as `merge`
    takes it.
    """
    sides = (rows.key, rows.value)
    key, value = (setup.as_cached(side).unflatten(0, (-1, width)).float() for side in sides)
    query = rows.query.unflatten(0, (-1, width)).unflatten(2, (key.shape[2], -1)).float()
    scores = torch.einsum("rihgd,rjhd->rhgij", query, key) * layer.scale
    scores = scores.masked_fill(~tree.seen(width, None)[:, None, None], -torch.inf)
    if layer.sinks is not None:  # keys without values
        sinks = layer.sinks.float().view(1, key.shape[2], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, width, 1)], dim=-1)
        value = F.pad(value, (0, 0, 0, 0, 0, 1))
    out = torch.einsum("rhgij,rjhd->rihgd", scores.softmax(-1), value)
    log_sums = scores.logsumexp(-1)  # [num_reqs, kv_heads, group, width]
    return out.flatten(0, 1).flatten(1, 2), log_sums.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
