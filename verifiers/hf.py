"""Any decoder-only Hugging Face model as the target: packed forwards on our paged cache, with tapped decoder layers."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.selector import select_backend
from specdec.core import ForwardInput, VerifyOutput
from specdec.errors import CheckpointError
from specdec.kv_cache import KVLayerSpec, LayerCache
from specdec.ops.linear import Linear
from verifiers.embedded import embedded_model_path
from verifiers.fused import FusedDecoder, can_fuse
from verifiers.hf_attention import ATTENTION_NAME, PagedForward
from verifiers.support import check_supported

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""Name of the model that comes with the package."""


def load_verifier(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fuse: bool = True,
) -> tuple["HFVerifier", PreTrainedTokenizerBase]:
    """Loads a target and its tokenizer.

    Args:
        name: "embedded", a local folder, or a hub name.
        device: where the weights go.
        dtype: type of weights and activations.
        attention: name of an attention backend, or "auto".
        block_size: tokens per cache block.
        cache_dtype: type of the cache when it is not `dtype`.
        fuse: see `HFVerifier`.

    Raises:
        UnsupportedModelError: the architecture cannot run yet; said from its config, before weights are read.
        CheckpointError: nothing there, damaged files, or tensors missing.
        BackendError: no backend, or not the named one, can serve the model.
    """
    path = str(embedded_model_path()) if name == EMBEDDED else name
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise CheckpointError(f"target {name!r} is not a folder; give a folder with config.json, a hub name, or {EMBEDDED!r}")
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    config = _read(name, "config", partial(AutoConfig.from_pretrained, path))
    check_supported(name, config)
    spec = attention_spec(config, device=device, dtype=dtype, block_size=block_size)
    backend = select_backend(attention, replace(spec, cache_dtype=cache_dtype))
    model, report = _read(
        name,
        "weights",
        partial(
            AutoModelForCausalLM.from_pretrained,
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        ),
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"target {name!r} lacks {len(missing)} tensors, the first being {missing[0]!r}; fetch the whole checkpoint again"
        )
    tokenizer = _read(name, "tokenizer", partial(AutoTokenizer.from_pretrained, path))
    verifier = HFVerifier(model.to(device).eval(), name=name, backend=backend, fallback_eos=tokenizer.eos_token_id, fuse=fuse)
    return verifier, tokenizer


def _read(name: str, what: str, load: Any) -> Any:
    """Calls `load`, turning what a bad path or damaged file raises into one line."""
    try:
        return load()
    except (OSError, SafetensorError, HFValidationError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"cannot read the {what} of target {name!r}: {reason[:300]}; check the name or folder, or fetch it again"
        ) from error


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each decoder layer in tokens, None for full attention: a row sees positions less than a window away."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        active = getattr(config, "use_sliding_window", True)
        return [window if active else None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def kv_layer_spec(config: PreTrainedConfig) -> KVLayerSpec:
    """What one decoder layer caches per token."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayerSpec(num_kv_heads=getattr(config, "num_key_value_heads", None) or heads, head_dim=head_dim)


def attention_spec(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionSpec:
    """What the model asks of an attention backend."""
    kv = kv_layer_spec(config)
    return AttentionSpec(
        device=device,
        dtype=dtype,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=block_size,
        windows=frozenset(layer_windows(config)),
        sinks=config.model_type == "gpt_oss",
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the model keeps it."""
    count = model.config.num_hidden_layers
    children = dict.fromkeys([*model.base_model.children(), *model.get_decoder().children()])
    found = [m for m in children if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise RuntimeError(
            f"{type(model).__name__} has {len(found)} lists of {count} modules; one was expected, the decoder layers"
        )
    return found[0]


class HFVerifier:
    """A transformers model seen through the `Verifier` protocol.

    Args:
        model: a causal language model loaded with `attn_implementation=ATTENTION_NAME`, in eval mode on its device.
        name: how to call it in messages.
        backend: attention over the cache.
        fallback_eos: end-of-sequence id when the model's generation config names none.
        fuse: run models of the Llama family by `FusedDecoder`, after which `model` itself cannot run.
    """

    def __init__(
        self, model: PreTrainedModel, *, name: str, backend: AttentionBackend, fallback_eos: int | None = None, fuse: bool = True
    ) -> None:
        config = model.config
        self.model = model
        self.name = name
        self.attention = backend
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.max_model_len = getattr(config, "max_position_embeddings", None) or 8192
        self.kv_specs = [kv_layer_spec(config)] * config.num_hidden_layers
        self.embedding_scale = config.hidden_size**0.5 if config.model_type.startswith("gemma") else 1.0
        self.final_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.eos_token_ids = _eos_token_ids(model, fallback_eos)
        self._embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        self._head = Linear(head.weight, head.bias, pack=fuse)
        self.vocab_size = self._head.out_features
        self._windows = layer_windows(config)
        self._layers = decoder_layers(model)
        self._fused = FusedDecoder(model, self._layers, self.kv_specs[0].head_dim) if fuse and can_fuse(model) else None
        self._hooked: set[int] = set()
        self._tapped: dict[int, Tensor] = {}

    @torch.inference_mode()
    def forward(self, rows: ForwardInput, caches: Sequence[LayerCache], aux_layer_ids: Sequence[int] = ()) -> VerifyOutput:
        """Scores packed rows; see `Verifier.forward`."""
        if self._fused is not None:
            return self._forward_fused(self._fused, rows, caches, aux_layer_ids)
        self._tap(aux_layer_ids)
        paged = PagedForward(self.attention, self.attention.plan(rows.metadata), caches, self._windows)
        output = self.model(
            input_ids=rows.token_ids[None],
            position_ids=rows.position_ids[None],
            use_cache=False,
            logits_to_keep=0 if rows.logit_rows is None else rows.logit_rows,
            paged=paged,
        )
        aux = torch.cat([self._tapped[layer] for layer in aux_layer_ids], dim=-1)[0] if aux_layer_ids else None
        self._tapped.clear()
        return VerifyOutput(logits=output.logits[0], aux_hidden=aux)

    def _forward_fused(
        self, decoder: FusedDecoder, rows: ForwardInput, caches: Sequence[LayerCache], aux_layer_ids: Sequence[int]
    ) -> VerifyOutput:
        backend, plan, scale = self.attention, self.attention.plan(rows.metadata), decoder.head_dim**-0.5

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return backend.run(query, key, value, caches[layer], plan, scale=scale, window=self._windows[layer])

        hidden, tapped = decoder.forward(self.embed(rows.token_ids), rows.position_ids, attend, aux_layer_ids)
        selected = hidden if rows.logit_rows is None else hidden.index_select(0, rows.logit_rows)
        aux = torch.cat(tapped, dim=-1) if tapped else None
        return VerifyOutput(logits=self.head(decoder.final_norm(selected)), aux_hidden=aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw rows of the input embedding table, [..., H]."""
        return F.embedding(token_ids, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the output head alone, [..., V]."""
        return self._head(hidden)

    def _tap(self, layers: Sequence[int]) -> None:
        """Hooks decoder layers not hooked yet. A hook sees the raw output; `output_hidden_states` would end with a normed one."""
        for layer in layers:
            if layer not in self._hooked:
                self._layers[layer].register_forward_hook(partial(self._keep, layer))
                self._hooked.add(layer)

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped[layer] = output[0] if isinstance(output, tuple) else output


def _eos_token_ids(model: PreTrainedModel, fallback: int | None) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    eos = fallback if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
