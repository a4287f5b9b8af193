"""Any decoder-only Hugging Face model as the target: packed forwards on our paged cache, with
tapped decoder layers.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.base.errors import UnsupportedModelError
from specdec.kv_cache import LayerSpec
from specdec.model.batch import ForwardInput
from specdec.model.core import LengthRule, RoutedExperts, Verifier, VerifyOutput
from specdec.sampling.params import SamplingDefaults
from verifiers.config.families import describe
from verifiers.config.shape import (
    context_limits,
    eos_token_ids,
    expert_counts,
    layer_kinds,
    layer_specs,
    peculiarity,
)
from verifiers.config.wrappers import is_composite, load_text, text_class
from verifiers.decoder import DecoderVerifier
from verifiers.description import Description
from verifiers.entries import declared, layer_windows
from verifiers.hf_attention import ATTENTION_NAME, PagedForward
from verifiers.weights.weights import Weights


def load_model(
    path: str, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """A model whose attention is ours, on the CPU, and the tensors that the checkpoint lacks.

    Of a composite it is the text part.
    """
    if is_composite(config):
        return load_text(path, config, dtype, ATTENTION_NAME)
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
        trust_remote_code=False,
    )
    return model, sorted(report["missing_keys"])


def model_of(
    config: PreTrainedConfig, weights: Mapping[str, Any], dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """The text model from weights that have been read, in plain numbers, so that transformers need
    not know how the checkpoint stores them.

    Raises:
        UnsupportedModelError: transformers has the text model without a head alone.
    """
    found = text_class(config)
    if found is None:
        raise UnsupportedModelError(
            f"quantized weights of type {config.model_type!r} have no causal language model in"
            f" transformers to go into; use a checkpoint in plain numbers"
        )
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    model, report = found.from_pretrained(
        None,
        config=plain,
        state_dict=dict(weights),
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    return model, sorted(report["missing_keys"])


def verifier_for(
    model: PreTrainedModel, *, name: str, backend: AttentionBackend | MlaBackend, fuse: bool = True
) -> Verifier:
    """The verifier that runs `model`: `DecoderVerifier` for the families it knows, which takes the
    weights over, else `HFVerifier`.

    Args:
        model: a causal language model with `attn_implementation=ATTENTION_NAME`, on its device.
        fuse: False runs every model through its own modules, but for latent attention and what
            `verifiers.config.shape.peculiarity` names, which they do not have on our cache.

    Raises:
        UnsupportedModelError: only our own layers could run it, and its projections are not plain.
    """
    stated = getattr(model.generation_config, "eos_token_id", None)
    ends = eos_token_ids(stated, model.config.eos_token_id)
    description = description_of(model)
    peculiar = peculiarity(model.config)
    if description is not None and (fuse or peculiar or isinstance(backend, MlaBackend)):
        return DecoderVerifier(
            model.config, description, Weights.of_model(model), name=name, backend=backend, eos=ends
        )
    if peculiar:
        raise UnsupportedModelError(
            f"target {name!r} has {peculiar}, which our own layers alone can run, and projections"
            f" in a form that these do not take; use a checkpoint in plain numbers"
        )
    assert isinstance(backend, AttentionBackend), "`verifiers.support` refuses such a model"
    return HFVerifier(model.eval(), name=name, backend=backend, eos=ends)


def description_of(model: PreTrainedModel) -> Description | None:
    """The description of a model with ordinary, unquantized layers; None where there is none."""
    projections = [module for name, module in model.named_modules() if name.endswith("_proj")]
    plain = all(type(module) in (nn.Linear, nn.Identity) for module in projections)
    return describe(model.config) if plain else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the model keeps it."""
    count = model.config.num_hidden_layers
    children = dict.fromkeys([*model.base_model.children(), *model.get_decoder().children()])
    found = [m for m in children if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        what = f"{type(model).__name__} has {len(found)} lists of {count} modules"
        raise RuntimeError(f"{what}; one was expected, the decoder layers")
    return found[0]


class HFVerifier:
    """A transformers model seen through the `Verifier` protocol.

    Args:
        model: a causal language model loaded with `attn_implementation=ATTENTION_NAME`, in eval
            mode on its device.

    Attributes:
        layers: the decoder layers, as the model holds them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        backend: AttentionBackend,
        eos: tuple[int, ...] = (),
    ) -> None:
        config = model.config
        self.model, self.config, self.name, self.attention = model, config, name, backend
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.context = context_limits(config, own=False)
        self.max_model_len = self.context.usual
        self.length_rule: LengthRule | None = None
        _keep_frequencies(model)
        self.kv_specs = layer_specs(config, backend)
        description = describe(config)
        self.embedding_scale = description.embedding_scale_in(self.dtype) if description else 1.0
        self.final_softcap: float | None = declared(config, "final_logit_softcapping")
        self.eos_token_ids = eos
        self.media_token_ids: Mapping[int, str] = {}
        self.defaults, self.random_weights = SamplingDefaults(), False
        self.weight_codes: tuple[str, ...] = ()
        self._embedding = model.get_input_embeddings().weight
        self._head: nn.Module = model.get_output_embeddings()
        self.vocab_size = self._head.weight.shape[0]
        self.windows, self._kinds = layer_windows(config), layer_kinds(config, backend)
        self.layers = decoder_layers(model)
        self._hooked: set[int] = set()
        self._tapped: dict[int, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """See `Verifier.weight_bytes`. Of embeddings only a few rows are read, unless they are the
        head's, too.
        """
        total = sum(one.nbytes for one in chain(self.model.parameters(), self.model.buffers()))
        tables = [one.weight for one in self.model.modules() if isinstance(one, nn.Embedding)]
        return total - sum(table.nbytes for table in tables if table is not self._head.weight)

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """See `Verifier.routed_experts`."""
        counts, named = expert_counts(self.config), self.model.named_parameters()
        weights = sum(parameter.nbytes for name, parameter in named if ".experts." in name)
        return RoutedExperts(*counts, weights) if counts else None

    def store(self, specs: Sequence[LayerSpec]) -> None:
        """Takes other specs of the cache."""
        self.kv_specs = list(specs)

    @torch.inference_mode()
    def forward(
        self, rows: ForwardInput, caches: Sequence[Any], aux_layer_ids: Sequence[int] = ()
    ) -> VerifyOutput:
        """Scores packed rows; see `Verifier.forward`."""
        self._tap(aux_layer_ids)
        each = self.attention.each
        plans = [backend.plan(rows.metadata) for backend in each]
        backends = [each[kind] for kind in self._kinds]
        paged = PagedForward(backends, [plans[kind] for kind in self._kinds], caches, self.windows)
        output = self.model(
            input_ids=rows.token_ids[None],
            position_ids=rows.position_ids[None],
            use_cache=False,
            logits_to_keep=0 if rows.logit_rows is None else rows.logit_rows,
            paged=paged,
        )
        taps = [self._tapped[layer] for layer in aux_layer_ids]
        aux = torch.cat(taps, dim=-1)[0] if taps else None
        self._tapped.clear()
        return VerifyOutput(logits=output.logits[0], aux_hidden=aux)

    def keep_layers(self, count: int) -> None:
        """Drops the layers from `count` on, for who wants the outputs of those before alone."""
        del self.layers[count:]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw rows of the input embedding table, [..., H]."""
        return F.embedding(token_ids, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the output head alone, [..., V]."""
        logits: Tensor = self._head(hidden)
        return logits

    def _tap(self, layers: Sequence[int]) -> None:
        """Hooks decoder layers not hooked yet. A hook sees the raw output; `output_hidden_states`
        would end with a normed one.
        """
        for layer in layers:
            if layer not in self._hooked:
                if layer == -1:
                    hooked = self.layers[0]
                    hooked.register_forward_pre_hook(self._keep_embeddings, with_kwargs=True)
                else:
                    self.layers[layer].register_forward_hook(partial(self._keep, layer))
                self._hooked.add(layer)

    def _keep_embeddings(
        self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._tapped[-1] = inputs[0] if inputs else options["hidden_states"]

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped[layer] = output[0] if isinstance(output, tuple) else output


def _keep_frequencies(model: nn.Module) -> None:
    """Makes RoPE of type "dynamic" what it is where it does not stretch; to look at positions, the
    host would wait.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            kind.update({layers: "default" for layers, one in kind.items() if one == "dynamic"})
        elif kind == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
