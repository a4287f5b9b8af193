"""What AITER's backends for latents share: how latents are stored, and how rows attend to those
that a list names.

The decode kernel takes *entries*: a few consecutive rows, causal among each other, and the list of
cached tokens that their last one sees. Maps to keys and values are absorbed into query and output.
A plan of AITER's own, made on the device, divides the entries among the compute units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.latent_check import reasons_against_latent
from specdec.attention.mla import MlaBackend, MlaRows, MlaSpec, UpProjection
from specdec.base.errors import CapacityError
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterMla
from specdec.kv_cache import LatentCache

ARCHITECTURES = ("gfx942", "gfx950")
DTYPES = (torch.bfloat16,)
LATENT_SHAPES = ((512, 64),)
"""Compressed and rotated numbers of a latent."""
MAX_HEADS = 128
HEAD_MULTIPLE = 16
"""Heads come in groups of so many; missing ones are added."""
HEAD_COUNTS = (16, 32, 64, 128)
"""Heads that every kernel for queries in 8 bits takes at once, and the merge behind it in every
version; missing ones are added.
"""
EIGHT_BIT_QUERIES_SINCE = (0, 1, 18)
"""The version from which on queries in 8 bits may have more than four rows per entry."""
MAX_ADDRESS = 2**31
"""Numbers of a layer's cache that the kernels can address with 32 bits."""
MAX_SPLIT_PER_BATCH = -1
"""Most parts that one entry's tokens are split into; -1 leaves it to AITER."""

WORK = (
    "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map",
    "reduce_partial_map",
)  # fmt: skip
"""Parts of AITER's plan, in the order of `get_mla_metadata_info_v1`, which is not that of the
planner's arguments.
"""


@dataclass(slots=True)
class Entries:
    """What the decode kernel is told about a forward, under AITER's names."""

    max_seqlen_q: int  # rows of each entry
    qo_indptr: Tensor  # int32 [num_entries + 1], first row of each entry
    kv_indptr: Tensor  # int32 [num_entries + 1], first cached token of each entry in `kv_indices`
    kv_indices: Tensor  # int32 [bound], cache slots; past the last entry's, any valid slot
    kv_last_page_lens: Tensor  # int32 [num_entries], tokens in the last page: pages hold one
    work: dict[str, Tensor]  # AITER's plan


class LatentKernels:
    """AITER's kernels on the latents of one model on one device.

    Args:
        spec: shape.
        eight_bit_queries: queries are rounded to the type of the cache.
    """

    def __init__(self, spec: MlaSpec, *, eight_bit_queries: bool = False) -> None:
        self.spec, self.ops = spec, aiter.load(AiterMla)
        self.query_dtype = spec.kv_dtype if eight_bit_queries else spec.dtype
        self.num_heads = -(-spec.num_heads // HEAD_MULTIPLE) * HEAD_MULTIPLE
        if eight_bit_queries:
            self.num_heads = next(count for count in HEAD_COUNTS if count >= spec.num_heads)
        self.is_fp8 = spec.kv_dtype.itemsize == 1
        self.max_tokens = MAX_ADDRESS // spec.latent_dim
        """Slots of a cache that the kernels can address."""
        self._one = torch.ones(1, dtype=torch.float32, device=spec.device)

    def write(
        self, cache: LatentCache, compressed: Tensor, key_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores the latents at `slot_mapping`, converted to the type of the cache.

        Raises:
            CapacityError: the cache is larger than the kernels can address.
        """
        num_slots = cache.latent.shape[:2].numel()
        if num_slots > self.max_tokens:
            raise CapacityError(
                f"the KV cache has {num_slots:,} tokens and AITER's latent kernels address"
                f" {self.max_tokens:,}: give it less memory"
            )
        if self.is_fp8:  # the writer converts without saturating
            most = torch.finfo(self.spec.kv_dtype).max
            compressed, key_rope = compressed.clamp(-most, most), key_rope.clamp(-most, most)
        self.ops.concat_and_cache_mla(
            kv_c=compressed.contiguous(),
            k_pe=key_rope.contiguous(),
            kv_cache=cache.latent,
            slot_mapping=slot_mapping,
            kv_cache_dtype="fp8" if self.is_fp8 else "auto",
            scale=self._one,
        )

    def attend(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: LatentCache,
        entries: Entries,
        *,
        scale: float,
        num_kv_splits: int,
    ) -> Tensor:
        """Rows [num_tokens, num_heads, v_head_dim] on the latents that `entries` lists.

        Left open, `num_kv_splits` would send some batches to a kernel that ignores the plan and
        whose lists no graph may hold.
        """
        absorbed = torch.bmm(rows.query_nope.transpose(0, 1), up.key).transpose(0, 1)
        query = pad_heads(torch.cat([absorbed, rows.query_rope], dim=-1), self.num_heads)
        output = query.new_empty(*query.shape[:2], self.spec.kv_lora_rank)
        scale_of_cache = scale_of_query = self._one if self.is_fp8 else None
        if self.query_dtype != self.spec.dtype:
            query, scale_of_query = quantized(query, self.query_dtype)
        self.ops.mla_decode_fwd(
            q=query,
            kv_buffer=cache.latent.view(-1, 1, 1, self.spec.latent_dim),
            o=output,
            qo_indptr=entries.qo_indptr,
            kv_indptr=entries.kv_indptr,
            kv_indices=entries.kv_indices,
            kv_last_page_lens=entries.kv_last_page_lens,
            max_seqlen_q=entries.max_seqlen_q,
            page_size=1,
            nhead_kv=1,
            sm_scale=scale,
            num_kv_splits=num_kv_splits,
            q_scale=scale_of_query,
            kv_scale=scale_of_cache,
            **entries.work,
        )
        # Where it folds heads, the call gives `output` new storage: no view of it may be older than
        # this line.
        return torch.bmm(output[:, : self.spec.num_heads].transpose(0, 1), up.value).transpose(0, 1)

    def work(self, num_entries: int, entry_rows: int, *, is_sparse: bool) -> dict[str, Tensor]:
        """Memory for AITER's plan of so many entries, zeros."""
        sizes = self.ops.get_mla_metadata_info_v1(
            batch_size=num_entries,
            max_seqlen_qo=entry_rows,
            num_head_qo=self.num_heads,
            q_dtype=self.query_dtype,
            kv_dtype=self.spec.kv_dtype,
            is_sparse=is_sparse,
            fast_mode=True,
        )
        work = {}
        for name, (shape, dtype) in zip(WORK, sizes, strict=True):
            # few operations know unsigned types
            signed = torch.int64 if dtype == torch.uint64 else dtype
            work[name] = torch.zeros(shape, dtype=signed, device=self.spec.device).view(dtype)
        return work

    def divide(self, entries: Entries) -> None:
        """Has AITER divide the entries among the compute units, into their `work`."""
        work = dict(entries.work)
        self.ops.get_mla_metadata_v1(
            seqlens_qo_indptr=entries.qo_indptr,
            seqlens_kv_indptr=entries.kv_indptr,
            kv_last_page_lens=entries.kv_last_page_lens,
            num_heads_per_head_k=self.num_heads,
            num_heads_k=1,
            is_causal=True,
            work_metadata_ptrs=work.pop("work_meta_data"),
            **work,
            page_size=1,
            kv_granularity=16,
            max_seqlen_qo=entries.max_seqlen_q,
            uni_seqlen_qo=entries.max_seqlen_q,
            fast_mode=True,
            max_split_per_batch=MAX_SPLIT_PER_BATCH,
            dtype_q=self.query_dtype,
            dtype_kv=self.spec.kv_dtype,
        )


class AiterLatentBackend(MlaBackend):
    """What both backends have in common: latents are written alike, and a self-check decides
    whether `auto` takes them.
    """

    def __init__(self, spec: MlaSpec, *, eight_bit_queries: bool = False) -> None:
        super().__init__(spec)
        self._kernels = LatentKernels(spec, eight_bit_queries=eight_bit_queries)

    @classmethod
    def reasons_against_auto(cls, spec: MlaSpec) -> list[str]:
        """See `Backend.reasons_against_auto`."""
        return reasons_against_latent(cls, spec)

    @cached_property
    def mixes_cache_types(self) -> bool:
        """See `Backend.mixes_cache_types`."""
        return self._has_plain_kernels()

    @property
    def query_dtype(self) -> torch.dtype:
        """See `MlaBackend.query_dtype`."""
        return self._kernels.query_dtype

    @property
    def mha_backend(self) -> type[RocmAiterFaBackend]:
        """See `MlaBackend.mha_backend`."""
        return RocmAiterFaBackend

    def write(
        self, cache: LatentCache, compressed: Tensor, key_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `MlaBackend.write`."""
        self._kernels.write(cache, compressed, key_rope, slot_mapping)


def pad_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Heads of zeros behind those of [num_tokens, heads, dim]; what they yield is cut off again."""
    if tensor.shape[1] < num_heads:
        return F.pad(tensor, (0, 0, 0, num_heads - tensor.shape[1]))
    return tensor


def quantized(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in 8-bit floats, and the factor, float32 [1], that turns them back.

    The factor comes from the largest magnitude, computed on the device and not read by the host. It
    is a power of two, so that the larger numbers of a neighbor in the batch change nothing but what
    is then too small for the type. Out of range saturates; a neighbor's NaN or infinity takes no
    part.
    """
    most = torch.finfo(dtype).max
    rows = torch.linalg.vector_norm(tensor, torch.inf, dim=-1, dtype=torch.float32)
    peak = torch.where(rows < torch.inf, rows, 0.0).amax()
    largest = peak.clamp(min=torch.finfo(torch.float16).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(largest / most)))
    return (tensor * (1 / scale).to(tensor.dtype)).clamp(-most, most).to(dtype), scale.reshape(1)


def reasons_against_eight_bit_queries(spec: MlaSpec) -> list[str]:
    """All reasons why queries of `spec` are not rounded to 8 bits on this machine; empty when they
    are. Never raises.
    """
    reasons = []
    if not spec.fp8_prefill:
        reasons.append("they are asked for in the model's own type")
    if spec.kv_dtype.itemsize != 1:
        reasons.append(f"a {spec.kv_dtype} cache (they have its type)")
    architecture = specdec.device.device.rocm_architecture(spec.device)
    if architecture != "gfx950":
        reasons.append(f"{architecture or spec.device} (the kernel is for gfx950)")
    if broken := aiter.unavailable_reasons(AiterMla):
        reasons += broken
    elif aiter.load(AiterMla).version < EIGHT_BIT_QUERIES_SINCE:
        reasons.append(f"amd-aiter is older than {aiter.dotted(EIGHT_BIT_QUERIES_SINCE)}")
    return reasons


def unsupported_reasons(
    spec: MlaSpec, families: Sequence[type[Any]], others: Sequence[str]
) -> list[str]:
    """Why the kernels cannot serve `spec`: the machine, the families of AITER's functions, the
    latents, then `others`.
    """
    architecture = specdec.device.device.rocm_architecture(spec.device)
    if architecture is None:
        return [f"{spec.device} is not a ROCm device"]
    reasons = []
    if architecture not in ARCHITECTURES:
        reasons.append(
            f"architecture {architecture} (AITER's kernels are for {' and '.join(ARCHITECTURES)})"
        )
    reasons += dict.fromkeys(
        reason for family in families for reason in aiter.unavailable_reasons(family)
    )
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype {spec.dtype} (the kernels take bfloat16)")
    fp8 = specdec.device.device.float8_dtype(spec.device)
    if spec.kv_dtype not in (spec.dtype, fp8):
        reasons.append(f"a {spec.kv_dtype} cache ({architecture} computes with {fp8})")
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) not in LATENT_SHAPES:
        known = ", ".join(f"{rank} and {rope}" for rank, rope in LATENT_SHAPES)
        reasons.append(
            f"latents of {spec.kv_lora_rank} and {spec.qk_rope_head_dim} numbers (the kernels take"
            f" {known})"
        )
    if spec.num_heads > MAX_HEADS:
        reasons.append(f"{spec.num_heads} heads (the kernels take up to {MAX_HEADS})")
    return [*reasons, *others]
