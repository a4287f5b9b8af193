"""A pretended ROCm machine, and random histories of sparse latent attention to run on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.mla import (
    IndexerRows,
    IndexerSpec,
    MlaRows,
    MlaSpec,
    SparseMlaBackend,
    UpProjection,
)
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.kv_cache import LatentCache, PagedKVCache
from tests.helpers.attention_case import metadata_of, scattered
from tests.helpers.bounds import Float64, assert_as_exact


def spec(**changes: Any) -> MlaSpec:
    """A small shape, which selects 6 positions of each sequence."""
    values: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.float32, "num_heads": 4, "kv_lora_rank": 32,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8, "block_size": 16,
        "indexer": IndexerSpec(num_heads=16, head_dim=32, topk=6),
    }  # fmt: skip
    return MlaSpec(**{**values, **changes})


REAL: dict[str, Any] = {
    "dtype": torch.bfloat16, "num_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
    "indexer": IndexerSpec(num_heads=64, head_dim=128, topk=6),
}  # fmt: skip
"""The sizes the kernels are built for."""


def sets(selected: Tensor) -> list[set[int]]:
    """Positions of every row; no position may appear twice, and -1 stands for none."""
    assert selected.dtype == torch.int32 and (selected >= -1).all()
    rows = [[p for p in row if p >= 0] for row in selected.tolist()]
    assert all(len(set(row)) == len(row) for row in rows)
    return [set(row) for row in rows]


@dataclass
class Layer:
    """What one layer gives the backend for every token of every request, and its cache."""

    rows: list[MlaRows]
    index: list[IndexerRows]
    up: UpProjection
    cache: LatentCache


class Case:
    """Requests in scattered blocks, run forward some rows at a time.

    What the layers are given are numbers that the spec's types hold exactly, so that all types run
    on the same.

    Args:
        spec: shape.
        lengths: all tokens of each request.
        exact: index queries and keys are small whole numbers, which 8-bit floats hold exactly.
        num_layers: with different rows each.
    """

    def __init__(
        self,
        spec: MlaSpec,
        lengths: Sequence[int],
        *,
        exact: bool = True,
        num_layers: int = 1,
        seed: int = 0,
    ) -> None:
        torch.default_generator.manual_seed(seed)
        self.spec, self.lengths = spec, list(lengths)
        self.num_blocks, self.slots, table = scattered(self.lengths, spec.block_size, spare=5)
        self.table = table[:, :-3]  # rows further apart than long
        self._made = [self._layer(exact) for _ in range(num_layers)]

    def _layer(self, exact: bool) -> tuple[list[MlaRows], list[IndexerRows], UpProjection]:
        spec, indexer = self.spec, self.spec.indexer
        assert indexer is not None

        def random_rows(*shape: int, dtype: torch.dtype = spec.dtype) -> list[Tensor]:
            return [torch.randn(n, *shape).to(dtype).float() for n in self.lengths]

        def index_rows(*shape: int) -> list[Tensor]:
            return [
                torch.randint(-7, 8, (n, *shape)).float() if exact else torch.randn(n, *shape)
                for n in self.lengths
            ]

        rows = zip(
            random_rows(spec.num_heads, spec.qk_nope_head_dim),
            random_rows(spec.num_heads, spec.qk_rope_head_dim),
            random_rows(spec.kv_lora_rank, dtype=spec.kv_dtype),
            random_rows(spec.qk_rope_head_dim, dtype=spec.kv_dtype),
            strict=True,
        )
        index = zip(
            index_rows(indexer.num_heads, indexer.head_dim),
            index_rows(indexer.head_dim),
            random_rows(indexer.num_heads, dtype=torch.float32),
            strict=True,
        )
        shapes = [
            (spec.num_heads, spec.qk_nope_head_dim, spec.kv_lora_rank),
            (spec.num_heads, spec.kv_lora_rank, spec.v_head_dim),
        ]
        up = UpProjection(
            *(
                (torch.randn(shape) / spec.kv_lora_rank**0.5).to(spec.dtype).float()
                for shape in shapes
            )
        )
        return [MlaRows(*r) for r in rows], [IndexerRows(*i) for i in index], up

    def layers(self, backend: SparseMlaBackend) -> list[Layer]:
        """The layers in the backend's type, with empty caches of its own."""
        caches = PagedKVCache(
            [backend.cache_spec] * len(self._made),
            num_blocks=self.num_blocks,
            block_size=self.spec.block_size,
            dtype=backend.spec.kv_dtype,
            device=backend.spec.device,
        ).layers
        dtype = backend.spec.dtype
        return [
            Layer(
                [MlaRows(*(t.to(dtype) for t in r)) for r in rows],
                [
                    IndexerRows(
                        i.query.to(dtype),
                        i.key.to(dtype),
                        i.weights.to(torch.promote_types(dtype, torch.float32)),
                    )
                    for i in index
                ],
                UpProjection(*(t.to(dtype) for t in up)),
                cache,
            )
            for (rows, index, up), cache in zip(self._made, caches, strict=True)
        ]

    def metadata(
        self, done: Sequence[int], widths: Sequence[int], *, known: bool
    ) -> AttentionMetadata:
        """The next `widths` rows of every request after `done`; `known`: the host has the lengths,
        else not even a lower bound.
        """
        seq_lens = [d + w for d, w in zip(done, widths, strict=True)]
        slots = [own[:length] for own, length in zip(self.slots, seq_lens, strict=False)]
        where = slots, self.table, self.spec.device
        return metadata_of(seq_lens, list(widths), *where, uniform=not known, causal=True)

    def forward(
        self,
        backend: SparseMlaBackend,
        layers: list[Layer],
        done: Sequence[int],
        widths: Sequence[int],
        *,
        known: bool,
        shared: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the next rows through all layers. Returns selections and outputs."""
        return self.run(
            backend, layers, done, widths, self.metadata(done, widths, known=known), shared=shared
        )

    def run(
        self,
        backend: SparseMlaBackend,
        layers: list[Layer],
        done: Sequence[int],
        widths: Sequence[int],
        metadata: AttentionMetadata,
        *,
        shared: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same with metadata given; `shared`: the first layer selects for all."""
        parts = [slice(d, d + w) for d, w in zip(done, widths, strict=True)]

        def packed(kind: Any, sources: list[Any]) -> Any:
            return kind(
                *(
                    torch.cat([t[p] for t, p in zip(ts, parts, strict=True)])
                    for ts in zip(*sources, strict=True)
                )
            )

        plan = backend.plan(metadata)
        selections: list[Tensor] = []
        outputs = []
        for layer in layers:
            if not (shared and selections):
                selections.append(
                    backend.select(packed(IndexerRows, layer.index), layer.cache, plan)
                )
            rows = packed(MlaRows, layer.rows)
            outputs.append(
                backend.run(rows, layer.up, layer.cache, plan, scale=0.2, selected=selections[-1])
            )
        return selections, outputs

    def history(
        self, backend: SparseMlaBackend, steps: Sequence[tuple[Sequence[int], bool]], **how: Any
    ) -> list[tuple[Any, Any]]:
        """Selections and outputs of successive forwards, given as widths and whether the host knows
        the lengths.
        """
        layers, done, results = self.layers(backend), [0] * len(self.lengths), []
        for widths, known in steps:
            results.append(self.forward(backend, layers, done, widths, known=known, **how))
            done = [d + w for d, w in zip(done, widths, strict=True)]
        return results

    def reference(self, dtype: torch.dtype = torch.float32) -> TorchRefMlaBackend:
        """The oracle, in `dtype`; float64 needs `Float64`."""
        return TorchRefMlaBackend(replace(self.spec, dtype=dtype, cache_dtype=None))

    def check(
        self, backend: SparseMlaBackend, steps: Sequence[tuple[Sequence[int], bool]], **how: Any
    ) -> None:
        """`backend` selects what the oracle selects, and its outputs are as exact."""
        got, plain = (
            self.history(b, steps, **how) for b in (backend, self.reference(self.spec.dtype))
        )
        with Float64():
            exact = self.history(self.reference(torch.float64), steps, **how)
        for (selections, outputs), (_, plain_outputs), (exact_selections, exact_outputs) in zip(
            got, plain, exact, strict=True
        ):
            assert [sets(s) for s in selections] == [sets(s) for s in exact_selections]
            for runs in zip(outputs, plain_outputs, exact_outputs, strict=True):
                assert_as_exact(*runs)


def rounded(x: Tensor, fp8: torch.dtype) -> Tensor:
    """`x` as the indexer sees it: in 8 bits, each vector with the smallest power of two that makes
    it fit.
    """
    most = torch.finfo(fp8).max
    # tried one by one, independent of logarithms
    scale = torch.ldexp(torch.ones(50, 1), torch.arange(-40, 10)[:, None])
    amplitude = x.abs().amax(-1).clamp(min=1e-4)
    fits = amplitude.flatten()[None] / scale <= most
    chosen = scale[fits.int().argmax(0)].view(*amplitude.shape, 1)
    return (x / chosen).to(fp8).float() * chosen
