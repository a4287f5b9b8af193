"""Layers that predict tokens beyond the next one (multi-token prediction, arXiv 2404.19737; as in
DeepSeek-V3, arXiv 2412.19437).

A row has the hidden state of a position of the target and the token after it, and predicts the
token after that:

    out = norm(layers(projection([embedding_norm(embedding of the token) ; hidden_norm(hidden
    state)]))) logits = head(out)

The hidden state is what the target's own head is given, behind its final norm. The row that follows
is given `out` in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionMetadata
from specdec.attention.mla import MlaBackend
from specdec.kv_cache import LayerSpec
from specdec.layers.decoder import Decoder
from specdec.layers.linear import Linear
from specdec.layers.ops.norm import Norm


@dataclass(frozen=True, slots=True, eq=False)
class ClusteredHead:
    """A head that scores the tokens of the likeliest clusters alone, as in Gemma 4's smaller
    assistants.

    Attributes:
        centroids: from a hidden state to a score of each cluster.
        cluster_of: int64 [V], the cluster of each token.
        chosen: clusters whose tokens are scored.
    """

    centroids: Linear
    cluster_of: Tensor
    chosen: int

    def mask(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """`logits` [n, V] of `hidden` [n, H], tokens in other clusters the lowest number."""
        scores = self.centroids(hidden)
        marks = torch.zeros_like(scores, dtype=torch.bool)
        likeliest = marks.scatter_(1, scores.topk(self.chosen, dim=1).indices, True)
        others = ~likeliest.index_select(1, self.cluster_of)
        return logits.masked_fill(others, torch.finfo(logits.dtype).min)


@dataclass(frozen=True, slots=True, eq=False)
class PredictionLayers:
    """The layers of one depth, which further depths reuse.

    Attributes:
        target_norm: the target's final norm.
        embedding_norm, hidden_norm: of either half of a row; None where there is none.
        projection: from both halves, the embedding's first.
        decoder: the layers, and the norm after them.
        backends: attention over their caches, one per layer.
        places: of each layer which of `kv_specs` is its own; None where it has no attention.
        kv_specs: what they cache.
        reads_target: they attend to keys and values of the target's, and have none of their own.
            All rows of a step have the position of its anchor then, and see what lies before that.
        head: of their own, without the target's softcap; None where it is the target's.
        clusters: what keeps that head from most tokens; None for nothing.
        back: from `out` to the target's width; None where the widths are the same.
    """

    target_norm: Norm
    embedding_norm: Norm | None
    hidden_norm: Norm | None
    projection: Linear
    decoder: Decoder
    backends: Sequence[AttentionBackend | MlaBackend]
    places: Sequence[int | None]
    kv_specs: Sequence[LayerSpec]
    reads_target: bool = False
    head: Linear | None = None
    clusters: ClusteredHead | None = None
    back: Linear | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a forward of many rows reads, but a head of the target's."""
        centroids = None if self.clusters is None else self.clusters.centroids
        own = [self.projection, self.head, self.back, centroids]
        return self.decoder.nbytes + sum(one.nbytes for one in own if one is not None)

    def features(self, raw: Tensor) -> Tensor:
        """Hidden states [T, Ht] as rows are given them, of raw outputs like them of the target's
        last layer.
        """
        return self.decoder.ops.norm(raw, self.target_norm)

    def __call__(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[Any],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """`out` [n, H] of the rows `wanted` int64 [n], or of all where it is None; writes the
        caches of all.

        Args:
            embeddings: [T, Ht], of the token of each row, as the target's layers are given them.
            hidden: [T, Ht], see `features` and `following`.
            position_ids: int64 [T].
            caches: one per entry of `kv_specs`.
            wanted: see above.
        """
        ops, decoder = self.decoder.ops, self.decoder
        if self.embedding_norm is not None:
            embeddings = ops.norm(embeddings, self.embedding_norm)
        if self.hidden_norm is not None:
            hidden = ops.norm(hidden, self.hidden_norm)
        joined = ops.project(self.projection, torch.cat([embeddings, hidden], dim=-1))
        plans = {backend: backend.plan(metadata) for backend in dict.fromkeys(self.backends)}
        held = [None if place is None else caches[place] for place in self.places]
        # rows before the last feed-forward sublayer
        drops = wanted is not None and decoder.layers[-1].attention is not None

        def keep(rows: Tensor) -> Tensor:
            assert wanted is not None
            return rows.index_select(0, wanted)

        angles = decoder.angles(position_ids, joined.dtype)
        own = [plans[backend] for backend in self.backends]
        out, _ = decoder(joined, angles, self.backends, held, own, keep=keep if drops else None)
        return out if wanted is None or drops else keep(out)

    def following(self, out: Tensor) -> Tensor:
        """What the rows after those of `out` [n, H] are given as hidden states: [n, Ht]."""
        return out if self.back is None else self.back(out)

    def logits(self, out: Tensor) -> Tensor:
        """Logits [n, V] of a head of their own."""
        assert self.head is not None
        logits = self.head(out)
        return logits if self.clusters is None else self.clusters.mask(out, logits)
