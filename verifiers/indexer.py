"""The indexer of DeepSeek sparse attention: small queries and keys beside a layer's attention, which score positions for it."""

from typing import Any

from torch import Tensor, nn

from specdec.attention.mla import IndexerRows
from verifiers.rotary import Angles, rotate_first


class Indexer(nn.Module):
    """Rows of one layer's indexer (DeepSeek-V3.2, arXiv 2512.02556), from the modules of transformers' own.

    The paper's kernels also turn both by a Hadamard matrix, to lose less in 8-bit floats; products, and so scores, stay the same.

    Args:
        source: transformers' indexer, whose modules are taken over.
        interleaved: RoPE turns neighboring numbers instead of halves; the models differ in it.
    """

    def __init__(self, source: Any, *, interleaved: bool) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm, self.weights_proj = source.wq_b, source.wk, source.k_norm, source.weights_proj
        self.interleaved = interleaved
        self.num_heads: int = source.n_heads
        self.head_dim: int = source.head_dim
        self.rope_dim: int = source.qk_rope_head_dim

    def forward(self, hidden: Tensor, query_residual: Tensor, angles: Angles) -> IndexerRows:
        """Queries, keys and weights, RoPE applied.

        Args:
            hidden: [num_tokens, H], input of the layer's attention.
            query_residual: [num_tokens, q_lora_rank], the compressed query of the layer's attention.
            angles: of the rows' positions.
        """
        query = self.wq_b(query_residual).unflatten(-1, (self.num_heads, self.head_dim))
        key = self.k_norm(self.wk(hidden))[:, None]
        # Its type may differ: in a float16 model transformers keeps this projection in float32.
        weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float()
        return IndexerRows(
            query=rotate_first(query, self.rope_dim, angles, interleaved=self.interleaved),
            key=rotate_first(key, self.rope_dim, angles, interleaved=self.interleaved)[:, 0],
            weights=weights * (self.num_heads**-0.5 * self.head_dim**-0.5),
        )
