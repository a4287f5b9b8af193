"""Libraries whose kernels take rectangles, rows that see the same keys, all of them, and squares,
which are causal.

`specdec.attention.triton.context` cuts prompts for them.

| library | found by | exact for |
|---|---|---|
| flash-attention 3 | the package `flash_attn_interface` | half precision, heads of up to 256 |
| cuDNN | torch | the same |

cuDNN makes a plan for every shape, which takes the host some 50 ms, and torch keeps it; those of
packed rows it forgets, up to 2.13 at least. Flash-attention 2, which torch contains
(`varlen_attn`), is slower than our own kernel on Hopper.
"""

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.backend import AttentionSpec
from specdec.device import self_check
from specdec.device.deviation import Deviation, deviation, worst

logger = logging.getLogger(__name__)

MIN_WIDTH = 2048
"""Heads times their size from which on a rectangle takes the device longer than the host."""
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)

Rectangle = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""Attention of rows to all keys, or causal, to as many as there are rows: from query [rows,
num_heads, head_dim], key and value [keys, num_kv_heads, head_dim], the factor of the scores, and
whether it is causal, to [rows, num_heads, head_dim] and float32 [num_heads, rows], natural
logarithms of the denominators."""


@lru_cache(maxsize=64)
def library(spec: AttentionSpec) -> Rectangle | None:
    """The first library that serves `spec` and agrees with float64 on this machine; what does not
    is left out with a line.
    """
    if spec.kv_dtype != spec.dtype or spec.softcap is not None or None not in spec.windows:
        return None
    if spec.head_dim > MAX_HEAD_DIM:
        return None
    if (
        spec.dtype not in DTYPES
        or spec.num_heads * spec.head_dim < MIN_WIDTH
        or spec.head_dim % 8
        or not _is_hopper(spec.device)
    ):
        return None
    for name, rectangle in LIBRARIES.items():
        if name == "flash-attention 3" and find_spec("flash_attn_interface") is None:
            continue
        failure = self_check.run(partial(check_rectangle, rectangle, spec)).failure
        if failure is None:
            return rectangle
        logger.warning("%s is left out for long contexts: %s", name, failure)
    return None


def check_rectangle(rectangle: Rectangle, spec: AttentionSpec) -> Deviation:
    """Small ones of both kinds; the denominators may be off by as much as the output rounds."""
    deviations = [
        _deviation(rectangle, spec, 192, causal=False),
        _deviation(rectangle, spec, 64, causal=True),
    ]
    return worst(deviations)


def _deviation(
    rectangle: Rectangle, spec: AttentionSpec, num_keys: int, *, causal: bool
) -> Deviation:
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(rows, heads, spec.head_dim, generator=random).to(spec.device, spec.dtype)
        for rows, heads in (
            (64, spec.num_heads),
            (num_keys, spec.num_kv_heads),
            (num_keys, spec.num_kv_heads),
        )
    )
    scale = spec.head_dim**-0.5
    output, log_sums = rectangle(query, key, value, scale, causal)
    plain, _ = _written_out(query, key, value, scale, causal)
    exact, exact_sums = _written_out(
        query.cpu().double(), key.cpu().double(), value.cpu().double(), scale, causal
    )
    off = float((log_sums.cpu().double() - exact_sums).expm1().abs().max())
    return worst([deviation(output, plain, exact), Deviation(off, torch.finfo(spec.dtype).eps)])


def through_torch(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`Rectangle` by cuDNN, or on a CPU by torch's own kernel."""
    q, k, v = (side.transpose(0, 1)[None] for side in (query, key, value))
    if query.is_cuda:  # the public function does not return the denominators
        output, log_sums = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
    else:
        output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, scale=scale
        )
    return output[0].transpose(0, 1).contiguous(), log_sums.flatten(2)[0].contiguous()


def through_flash_attention_3(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`Rectangle` by the package `flash_attn_interface`, whose releases differ in whether they are
    asked for the denominators.
    """
    function = import_module("flash_attn_interface").flash_attn_func
    asked = {}
    if "return_attn_probs" in inspect.signature(function).parameters:
        asked = {"return_attn_probs": True}
    output, log_sums = function(
        query[None], key[None], value[None], softmax_scale=scale, causal=causal, **asked
    )[:2]
    return output[0], log_sums[0]


LIBRARIES: dict[str, Rectangle] = {
    "flash-attention 3": through_flash_attention_3,
    "cuDNN": through_torch,
}
"""The best first."""


def _is_hopper(device: torch.device) -> bool:
    """Where the libraries were measured to be faster."""
    nvidia = device.type == "cuda" and specdec.device.device.rocm_architecture(device) is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`Rectangle` in plain torch."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (
        query.transpose(0, 1),
        *(side.transpose(0, 1).repeat_interleave(group, dim=0) for side in (key, value)),
    )
    scores = q @ k.transpose(1, 2) * scale
    if causal:
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)
