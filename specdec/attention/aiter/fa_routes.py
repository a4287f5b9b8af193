"""Which of AITER's kernels takes which rows with ordinary heads.

*Full*, on CDNA, where AITER has HIP, assembly and Triton kernels:

>>> print(table(FULL))
phase    when                                              kernel
prefill  sinks                                             unified
prefill  any                                               varlen
extend   sinks                                             unified
extend   a window                                          windowed_varlen
extend   any                                               chunked_varlen
decode   blocks and trees, 8-bit cache, our own kernel     own_kernel
decode   draft trees                                       context_and_rows
decode   several rows, causal                              unified
decode   several rows, plain layout in the model's type    kvcache
decode   several rows                                      gathered_kvcache
decode   sinks                                             unified
decode   a head or group size that the paged kernels lack  unified
decode   plain layout                                      paged_v1
decode   a window or a softcap                             unified
decode   what the assembly kernel has                      paged_common
decode   any                                               paged_rocm

*Triton-only*, on RDNA, where AITER has little else:

>>> print(table(TRITON_ONLY))
phase    when                                            kernel
packed   any                                             unified
decode   blocks and trees, 8-bit cache, our own kernel   own_kernel
decode   draft trees                                     context_and_rows
decode   causal, or one row                              unified
decode   several rows, plain layout in the model's type  kvcache
decode   several rows                                    gathered_kvcache

A single row is the last position: causal or not, it sees the same keys.
"""

import math

import torch

from specdec.attention.aiter.fa_compiled import (
    chunked_varlen,
    paged_common,
    paged_rocm,
    paged_v1,
    varlen,
    windowed_varlen,
)
from specdec.attention.aiter.fa_trees import context_and_rows
from specdec.attention.aiter.fa_triton import Layer, gathered_kvcache, kvcache, own_kernel, unified
from specdec.attention.aiter.routes import Route, always, table
from specdec.attention.backend import AttentionSpec

__all__ = ["FULL", "TRITON_ONLY", "table"]

PAGED_HEAD_DIMS = (64, 128, 256)
PAGED_MAX_GROUP = 16
ASSEMBLY_BLOCKS = 2**16
"""Most blocks of a cache: before 0.1.17 the assembly kernel cuts their numbers to 16 bits, and
after it nobody has shown that one load may reach further.
"""


def _paged_kernels_lack(spec: AttentionSpec) -> bool:
    group = spec.num_heads // spec.num_kv_heads
    return spec.head_dim not in PAGED_HEAD_DIMS or group > PAGED_MAX_GROUP


def _fits_assembly(spec: AttentionSpec, layer: Layer) -> bool:
    """For many rows `paged_common` turns to an assembly kernel with one shape and a softmax scale
    of its own.

    Groups of more than 8 in e4m3fn, gfx950's flavor, are NaN in contexts of 241 to 255 tokens.
    """
    return (
        spec.head_dim == 128
        and spec.block_size == 16
        and math.isclose(layer.scale, 128**-0.5)
        and len(layer.cache.key) <= ASSEMBLY_BLOCKS
        and (spec.kv_dtype != torch.float8_e4m3fn or spec.num_heads // spec.num_kv_heads <= 8)
    )


_OWN = Route(
    "decode",
    "blocks and trees, 8-bit cache, our own kernel",
    lambda group, model, layer: (
        model.own is not None
        and group.max_query_len > 1
        and (group.tree is not None or not group.causal)
    ),
    own_kernel,
)
_TREES = Route(
    "decode", "draft trees", lambda group, model, layer: group.tree is not None, context_and_rows
)
_IN_PLACE = Route(
    "decode",
    "several rows, plain layout in the model's type",
    lambda group, model, layer: group.max_query_len > 1 and model.reads_in_place,
    kvcache,
)
_GATHERED = Route(
    "decode", "several rows", lambda group, model, layer: group.max_query_len > 1, gathered_kvcache
)

FULL = (
    # AITER sends some of these rows to an assembly kernel that knows no sinks, and drops them.
    Route("prefill", "sinks", lambda group, model, layer: layer.sinks is not None, unified),
    Route("prefill", "", always, varlen),
    Route("extend", "sinks", lambda group, model, layer: layer.sinks is not None, unified),
    Route(
        "extend", "a window", lambda group, model, layer: layer.window is not None, windowed_varlen
    ),
    Route("extend", "", always, chunked_varlen),
    _OWN,
    _TREES,
    Route(
        "decode",
        "several rows, causal",
        lambda group, model, layer: group.max_query_len > 1 and group.causal,
        unified,
    ),
    _IN_PLACE,
    _GATHERED,
    Route("decode", "sinks", lambda group, model, layer: layer.sinks is not None, unified),
    Route(
        "decode",
        "a head or group size that the paged kernels lack",
        lambda group, model, layer: _paged_kernels_lack(model.spec),
        unified,
    ),
    Route("decode", "plain layout", lambda group, model, layer: model.layout == "plain", paged_v1),
    Route(
        "decode",
        "a window or a softcap",
        lambda group, model, layer: layer.window is not None or layer.softcap is not None,
        unified,
    ),
    Route(
        "decode",
        "what the assembly kernel has",
        lambda group, model, layer: _fits_assembly(model.spec, layer),
        paged_common,
    ),
    Route("decode", "", always, paged_rocm),
)
TRITON_ONLY = (
    Route("packed", "", always, unified),
    _OWN,
    _TREES,
    Route(
        "decode",
        "causal, or one row",
        lambda group, model, layer: group.causal or group.max_query_len == 1,
        unified,
    ),
    _IN_PLACE,
    _GATHERED,
)
