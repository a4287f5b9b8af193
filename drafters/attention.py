"""Attention for a drafter's layers: the target's kind, for another shape."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.base.errors import BackendError
from specdec.model.core import Verifier


def attention_like(
    verifier: Verifier,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    windows: Sequence[int | None],
    non_causal: bool = False,
    sinks: bool = False,
) -> AttentionBackend:
    """Attention of the target's kind for layers with ordinary heads.

    Raises:
        BackendError: the target's attention backend cannot serve them.
    """
    shared = verifier.attention.spec
    spec = AttentionSpec(
        device=shared.device,
        dtype=shared.dtype,
        block_size=shared.block_size,
        cache_dtype=shared.cache_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=frozenset(windows),
        non_causal=non_causal,
        sinks=sinks,
    )
    backend = verifier.attention.mha_backend
    _require_served(backend.name, backend.unsupported_reasons(spec))
    return backend(spec)


class LatentSizes(NamedTuple):
    """Latent attention (MLA) of draft layers, see `specdec.attention.mla`.

    Attributes:
        query_rank: of compressed queries; None where they are not compressed.
        rank: of the compressed key and value.
        nope, rope: unrotated and rotated numbers of a query head.
        value: numbers of a value head.
        interleaved: RoPE turns neighboring numbers instead of halves.
    """

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True


def latent_like(
    verifier: Verifier, num_heads: int, sizes: LatentSizes, *, non_causal: bool = False
) -> MlaBackend:
    """Latent attention of the target's kind, for layers of these sizes.

    Raises:
        BackendError: the target has no latent attention, or its backend cannot serve the layers.
    """
    attention = verifier.attention
    if not isinstance(attention, MlaBackend):
        raise BackendError(
            f"this drafter has latent attention, and the target's backend {attention.name!r} serves"
            " other attention; choose a drafter that was made for this target"
        )
    shared = attention.spec
    spec = MlaSpec(
        device=shared.device,
        dtype=shared.dtype,
        num_heads=num_heads,
        kv_lora_rank=sizes.rank,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        block_size=shared.block_size,
        non_causal=non_causal,
        cache_dtype=shared.cache_dtype,
    )
    backend = type(attention)
    _require_served(backend.name, backend.unsupported_reasons(spec))
    return backend(spec)


def _require_served(backend: str, reasons: Sequence[str]) -> None:
    if reasons:
        what = f"attention backend {backend!r} cannot serve this drafter: {'; '.join(reasons)}"
        raise BackendError(f"{what}; choose another")
