"""A leaner forward for models of the Llama family: the same weights and maths as transformers' modules, in fewer operations.

On a CPU a forward of a few tokens through transformers' modules spends more time between matrix products than in them. Here the
query, key and value projections are one product, and so are gate and up; query and key are rotated together; residuals are added by
the products; weights lie in the layout that the device's kernels read. The model's own layers give up their projections.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from specdec.attention.backend import AttentionBackend
from specdec.core import ForwardInput, VerifyOutput
from specdec.kernels.linear import FourBitWeight, Linear
from specdec.kv_cache import LayerCache
from specdec.layers.fused import fuses_layers
from specdec.layers.rotary import STATIC_ROPE_TYPES, half_angles
from verifiers.shape import kv_layer_spec, layer_windows, max_model_len

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.layers.triton_decoder import TritonDecoder

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, query [T, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [T, heads, D]`."""

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose decoder layers are: norm, attention, residual, norm, gated SiLU MLP, residual."""


def can_fuse(model: "PreTrainedModel") -> bool:
    """Whether `FusedVerifier` computes what this model does: a member of the family with ordinary, unquantized layers."""
    config = model.config
    linear = [module for name, module in model.named_modules() if name.endswith("_proj")]
    return config.model_type in FAMILY and config.hidden_act == "silu" and all(type(module) is nn.Linear for module in linear)


class RMSNorm:
    """Root mean square norm over the last axis, computed in float32 as transformers does.

    Args:
        module: holds `weight` and `variance_epsilon`.
    """

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.epsilon = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=self.weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H] in the dtype of `hidden`."""
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / hidden.shape[-1]).rsqrt_()
        return torch.mul(hidden, scale, out=torch.empty_like(hidden)).mul_(self.weight)


@dataclass(slots=True)
class FusedLayer:
    """One decoder layer with joined projections."""

    input_norm: RMSNorm
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    qkv: Linear
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class FusedVerifier:
    """A model of the Llama family seen through the `Verifier` protocol.

    Args:
        config: the model's.
        layers: decoder layers; what they hold is taken over, and they cannot run any more.
        norm: the norm before the head.
        embedding: [V, H] on the device, in the type to compute in.
        head: weight [V, H] and bias of the output head.
        rotary: `(hidden, position_ids [1, T]) -> cos, sin [1, T, head_dim / 2]` in the type of `hidden`; what follows in a row is
            not looked at, since transformers' has everything twice.
        name: how to call it in messages.
        backend: attention over the cache.
        eos: end-of-sequence ids.
    """

    embedding_scale = 1.0
    final_softcap: float | None = None

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: Iterable[Any],
        norm: Any,
        embedding: Tensor,
        head: Linear,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        *,
        name: str,
        backend: AttentionBackend,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.name, self.attention, self.eos_token_ids = name, backend, eos
        self.config = config
        self.device, self.dtype = embedding.device, embedding.dtype
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.max_model_len = max_model_len(config)
        self.vocab_size = head.out_features
        self.kv_specs = [kv_layer_spec(config)] * config.num_hidden_layers
        self.head_dim = self.kv_specs[0].head_dim
        self._windows = layer_windows(config)
        self._embedding, self._head, self._rotary = embedding.detach(), head, rotary
        self._layers = [_fused_layer(layer) for layer in layers]
        self._norm = RMSNorm(norm)
        self._triton = self._triton_decoder(backend) if fuses_layers(backend) else None

    @classmethod
    def from_model(
        cls, model: "PreTrainedModel", layers: Iterable[nn.Module], *, name: str, backend: AttentionBackend, eos: tuple[int, ...]
    ) -> "FusedVerifier":
        """Takes over a transformers model for which `can_fuse` holds, in eval mode on its device."""
        base, head = model.base_model, model.get_output_embeddings()
        rotary = base.rotary_emb
        if model.config.rope_parameters["rope_type"] in STATIC_ROPE_TYPES:
            rotary = _Rotary(rotary.inv_freq.float(), rotary.attention_scaling)
        return cls(
            model.config,
            layers,
            base.norm,
            model.get_input_embeddings().weight,
            Linear(head.weight.detach(), head.bias),
            rotary,
            name=name,
            backend=backend,
            eos=eos,
        )

    @classmethod
    def from_tensors(
        cls, config: PreTrainedConfig, tensors: dict[str, Tensor], *, name: str, backend: AttentionBackend, eos: tuple[int, ...]
    ) -> "FusedVerifier":
        """A Llama with tied embeddings and plain RoPE from its checkpoint's tensors, on their device and in their type.

        A projection may come with the fields of `FourBitWeight` beside its `weight`.
        """
        assert config.model_type == "llama" and config.tie_word_embeddings and config.rope_parameters["rope_type"] == "default"
        tree = _module_tree(tensors, config.rms_norm_eps)
        embedding = tree.model.embed_tokens.weight
        layers = [getattr(tree.model.layers, str(index)) for index in range(config.num_hidden_layers)]
        head_dim = kv_layer_spec(config).head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        rotary = _Rotary((1.0 / config.rope_parameters["rope_theta"] ** exponents).to(embedding.device))
        return cls(config, layers, tree.model.norm, embedding, Linear(embedding), rotary, name=name, backend=backend, eos=eos)

    @property
    def weight_bytes(self) -> int:
        """See `Verifier.weight_bytes`."""
        layers = sum(part.nbytes for layer in self._layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return layers + self._head.nbytes

    @torch.inference_mode()
    def forward(self, rows: ForwardInput, caches: Sequence[LayerCache], aux_layer_ids: Sequence[int] = ()) -> VerifyOutput:
        """Scores packed rows; see `Verifier.forward`."""
        if self._triton is not None:
            return self._triton_forward(self._triton, rows, caches, aux_layer_ids)
        backend, plan, scale = self.attention, self.attention.plan(rows.metadata), self.head_dim**-0.5

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return backend.run(query, key, value, caches[layer], plan, scale=scale, window=self._windows[layer])

        hidden, tapped = self._decode(self.embed(rows.token_ids), rows.position_ids, attend, aux_layer_ids)
        selected = hidden if rows.logit_rows is None else hidden.index_select(0, rows.logit_rows)
        return VerifyOutput(logits=self.head(self._norm(selected)), aux_hidden=torch.cat(tapped, dim=-1) if tapped else None)

    def _triton_forward(
        self, decoder: "TritonDecoder", rows: ForwardInput, caches: Sequence[LayerCache], taps: Sequence[int]
    ) -> VerifyOutput:
        """`forward` in few launches, where `fuses_layers` says so."""
        embeddings = self.embed(rows.token_ids)
        cos, sin = self._angles(embeddings, rows.position_ids)
        plans = [self.attention.plan(rows.metadata)] * self.num_layers
        normed, tapped = decoder(embeddings, cos, sin, caches, plans, self._windows, taps)
        selected = normed if rows.logit_rows is None else normed.index_select(0, rows.logit_rows)
        return VerifyOutput(logits=self.head(selected), aux_hidden=torch.cat(tapped, dim=-1) if tapped else None)

    def _triton_decoder(self, backend: AttentionBackend) -> "TritonDecoder":
        """The layers for Triton kernels; they share the weights."""
        from specdec.layers.triton_decoder import DecoderLayer, TritonDecoder

        layers = [
            DecoderLayer(
                input_norm=layer.input_norm.weight,
                qkv=layer.qkv,
                query_norm=None if layer.query_norm is None else layer.query_norm.weight,
                key_norm=None if layer.key_norm is None else layer.key_norm.weight,
                output=layer.output,
                mlp_norm=layer.mlp_norm.weight,
                gate_up=layer.gate_up,
                down=layer.down,
            )
            for layer in self._layers
        ]
        return TritonDecoder(layers, self._norm.weight, epsilon=self.config.rms_norm_eps, attention=backend)

    def _angles(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, head_dim / 2]."""
        cos, sin = self._rotary(hidden[None], position_ids[None])
        return cos[0, :, : self.head_dim // 2], sin[0, :, : self.head_dim // 2]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the input embedding table, [..., H]."""
        return F.embedding(token_ids, self._embedding) if self._triton is None else self._triton.embed(token_ids, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the output head alone, [..., V]."""
        return self._head(hidden)

    def _decode(self, hidden: Tensor, position_ids: Tensor, attend: Attend, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers on embeddings [T, H]; returns [T, H], not normed, and the raw outputs [T, H] of the layers in `taps`."""
        cos, sin = self._angles(hidden, position_ids)
        cos, sin = torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]  # [T, 1, head_dim]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden = self._attention(index, layer, hidden, cos, sin, attend)
            hidden = _mlp(layer, hidden)
            if index in taps:
                tapped[index] = hidden
        return hidden, [tapped[index] for index in taps]

    def _attention(self, index: int, layer: FusedLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_rows = hidden.shape[0]
        qkv = layer.qkv(layer.input_norm(hidden)).view(num_rows, -1, self.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
        num_heads = layer.output.in_features // self.head_dim
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        rotated, value = qkv.split_with_sizes([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotated.split([num_heads, num_kv_heads], dim=1)
            rotated = torch.cat([layer.query_norm(query), layer.key_norm(key)], dim=1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, dims=-1), sin)
        query, key = rotated.split_with_sizes([num_heads, num_kv_heads], dim=1)
        return layer.output(attend(index, query, key, value).reshape(num_rows, -1), hidden)


def _mlp(layer: FusedLayer, hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
    return layer.down(F.silu(gate).mul_(up), hidden)


def _fused_layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        input_norm=RMSNorm(layer.input_layernorm),
        query_norm=RMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=RMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        qkv=_take(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_take(attention.o_proj),
        mlp_norm=RMSNorm(layer.post_attention_layernorm),
        gate_up=_take(mlp.gate_proj, mlp.up_proj),
        down=_take(mlp.down_proj),
    )


@torch.no_grad()
def _take(*projections: Any) -> Linear:
    """The projections as one; they are left empty, so that nothing is stored twice."""
    weights = [projection.weight.detach() for projection in projections]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None if projections[0].bias is None else torch.cat([projection.bias.detach() for projection in projections])
    joined = Linear(weight, bias, four_bit=_join_four_bit(projections))
    for projection in projections:
        projection.weight.data = weight.new_empty(0)
    return joined


def _join_four_bit(projections: Sequence[Any]) -> FourBitWeight | None:
    """The four-bit form of joined projections; None when there is none."""
    if not hasattr(projections[0], "codes"):
        return None
    return FourBitWeight(*(torch.cat([getattr(p, field) for p in projections]) for field in ("codes", "scale", "minimum")))


@dataclass(frozen=True, slots=True)
class _Rotary:
    """Cosine and sine of positions, each once, where transformers' modules give every pair's twice in more operations."""

    frequencies: Tensor  # float32 [head_dim / 2]
    amplitude: float = 1.0

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return half_angles(position_ids, self.frequencies, hidden.dtype, amplitude=self.amplitude)


def _module_tree(tensors: dict[str, Tensor], epsilon: float) -> Any:
    """Tensors by dotted names as nested objects that look like modules to `_fused_layer`."""
    tree = SimpleNamespace()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace(bias=None, variance_epsilon=epsilon))
            node = getattr(node, part)
        setattr(node, leaf, tensor)
    return tree
