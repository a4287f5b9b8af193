"""Building a target's layers for multi-token prediction, from its own checkpoint or from one that
was made for it.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.base.checkpoint.hub import json_file
from specdec.base.errors import BackendError, CheckpointError, one_line
from specdec.kv_cache import LayerSpec, SharedLayerSpec
from specdec.layers.decoder import Decoder
from specdec.layers.ops.choice import ops_for
from specdec.layers.prediction import ClusteredHead, PredictionLayers
from specdec.model.core import Verifier
from verifiers.building.builder import LayerBuilder
from verifiers.config.families import describe, family_of
from verifiers.config.names import prediction_name
from verifiers.config.shape import (
    backend_spec,
    cache_layers,
    head_shape,
    layer_caches,
    layer_kinds,
    layer_specs,
)
from verifiers.config.wrappers import config_of, shapes_of
from verifiers.decoder import DecoderVerifier
from verifiers.family import Prediction
from verifiers.weights.checkpoint import read_named
from verifiers.weights.complete import check_shapes
from verifiers.weights.weights import Weights

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of Gemma 4's assistants."""


SPECULATORS = Prediction(
    (
        (r"^(?:model\.)?mtp_layers\.0\.input_proj\.", "projection."),
        (r"^(?:model\.)?mtp_layers\.0\.token_layernorm\.", "embedding_norm."),
        (r"^(?:model\.)?mtp_layers\.0\.hidden_layernorm\.", "hidden_norm."),
        (r"^(?:model\.)?mtp_layers\.0\.final_layernorm\.", "norm."),
        (r"^(?:model\.)?mtp_layers\.0\.", "model.layers.0."),
    )
)
"""In a checkpoint of their own, in the layout of speculators."""

ASSISTANT = Prediction(
    (
        (r"^pre_projection\.", "projection."),
        (r"^post_projection\.", "back."),
        (r"^masked_embedding\.", "masked_embedding."),
        (r"^(?:lm_head|model\.embed_tokens)\.", "head."),
        (r"^model\.norm\.", "norm."),
        (r"^model\.layers\.", "model.layers."),
    )
)
"""Gemma 4's assistants, which are checkpoints of their own."""


class Source(NamedTuple):
    """Where layers are: the folder of a checkpoint, the config of a model that has such layers,
    and what they are called.
    """

    folder: Path
    config: Any
    layers: Prediction


def read_prediction(verifier: Verifier, folder: Path | None = None) -> PredictionLayers:
    """The layers that predict further tokens for a target.

    Args:
        folder: of their checkpoint, in the layout of speculators or of Gemma 4's assistants; None
            where they are in the target's.

    Raises:
        CheckpointError: there are none, some of their tensors are missing, or they belong to
            another target.
        BackendError: the target's attention backend cannot serve them.
    """
    found = source_of(verifier, folder)
    assert isinstance(verifier, DecoderVerifier)
    if not isinstance(found, Source):
        return _assistant(verifier, *found)
    own = layers_config(found.config, found.layers)
    stored = verifier.checkpoint is not None and verifier.checkpoint.as_stored
    backend = _backend(verifier, own)
    weights = Weights(read_layers(verifier, found, own, as_stored=stored))
    return layers_of(verifier, own, backend, builder_of(own, backend, weights), weights)


def source_of(verifier: Verifier, folder: Path | None) -> Source | tuple[Path, Mapping[str, Any]]:
    """Where the layers are; of an assistant the folder, and what its `config.json` says.

    Raises:
        CheckpointError: see `read_prediction`.
    """
    if not isinstance(verifier, DecoderVerifier):
        raise CheckpointError(
            f"target {verifier.name!r} runs on transformers' modules, which have no layers for"
            f" multi-token prediction; use another drafter"
        )
    if folder is not None:
        entries = json_file(str(folder), "config.json", what="drafter") or {}
        if entries.get("model_type") in ASSISTANTS:
            return folder, entries
        return Source(folder, _of_speculators(verifier, entries), SPECULATORS)
    layers = family_of(verifier.config).prediction
    if layers is None or verifier.checkpoint is None:
        raise CheckpointError(
            f"target {verifier.name!r} of type {verifier.config.model_type!r} has no layers for"
            f" multi-token prediction of its own; use another drafter"
        )
    return Source(verifier.checkpoint.folder, verifier.config, layers)


def _of_speculators(verifier: DecoderVerifier, entries: Mapping[str, Any]) -> Any:
    """The config that a checkpoint's `config.json` states."""
    stated = entries.get("transformer_layer_config")
    if not isinstance(stated, Mapping) or entries.get("num_nextn_predict_layers", 1) != 1:
        raise CheckpointError(
            "config.json describes no single layer (transformer_layer_config,"
            " num_nextn_predict_layers 1)"
        )
    config = _config(stated)
    for name in ("hidden_size", "vocab_size"):
        found, wanted = getattr(config, name), getattr(verifier, name)
        if found != wanted:
            what = f"it was made for a target whose {name} is {found}"
            raise CheckpointError(f"{what}; that of {verifier.name!r} is {wanted}")
    return config


def layers_config(config: Any, layers: Prediction) -> Any:
    """The config of a model that has the layers of one depth alone, from that of its target."""
    kinds = list(layers.kinds(config))
    own = copy.deepcopy(config)
    own.num_hidden_layers = len(kinds)
    entries = {
        "layer_types": kinds,
        "mlp_layer_types": [layers.feed_forward] * len(kinds),
        "indexer_types": ["full"] * len(kinds),
        "first_k_dense_replace": 0,
        "moe_layer_start_index": len(kinds) if layers.feed_forward == "dense" else 0,
    }
    for name, value in entries.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    return own


def read_layers(
    verifier: DecoderVerifier, source: Source, own: Any, *, as_stored: bool
) -> dict[str, Any]:
    """Tensors of layers with the config `own`, by the names of this file; see `read_named`."""
    width = verifier.hidden_size
    extra = {"embedding_norm": [width], "hidden_norm": [width], "projection": [width, 2 * width]}
    extra |= {"norm": [width]} if source.layers.has_norm else {}
    return _read(verifier, source, own, shapes_of(own), extra, as_stored=as_stored)


def layers_of(
    verifier: DecoderVerifier,
    own: Any,
    backend: AttentionBackend | MlaBackend,
    builder: LayerBuilder,
    weights: Weights,
) -> PredictionLayers:
    """The layers with the config `own` that `weights` make."""
    return PredictionLayers(
        embedding_norm=builder.norm(weights, "embedding_norm"),
        hidden_norm=builder.norm(weights, "hidden_norm"),
        **_common(verifier, own, backend, builder, weights),
        kv_specs=layer_specs(own, backend),
    )


def _assistant(
    verifier: DecoderVerifier, folder: Path, entries: Mapping[str, Any]
) -> PredictionLayers:
    if verifier.group is not None:
        raise CheckpointError(
            f"it reads keys and values of {verifier.name!r}, of which each of {verifier.group.size}"
            f" ranks has those of some heads; start one process, or choose another drafter"
        )
    # What equals a default of transformers is missing in the file.
    text = _config(entries.get("text_config"))
    shared = {"num_kv_shared_layers": text.num_hidden_layers}
    # What lies exactly a window away is seen, as transformers has it.
    config = _config(entries.get("text_config"), **shared, sliding_window=text.sliding_window + 1)
    width, hidden, vocabulary = verifier.hidden_size, config.hidden_size, verifier.vocab_size
    if config.vocab_size != vocabulary:
        what = f"it was made for a target of {config.vocab_size} tokens"
        raise CheckpointError(f"{what}; {verifier.name!r} has {vocabulary}")
    backend = _backend(verifier, config)
    extra = {
        "projection": [hidden, 2 * width],
        "back": [width, hidden],
        "norm": [hidden],
        "head": [vocabulary, hidden],
    }
    # transformers may refuse to make a model whose layers all read the keys of others.
    whole = shapes_of(_config(entries.get("text_config"), num_kv_shared_layers=0))
    absent = re.compile(r"\.(k_proj|v_proj|k_norm|v_norm)\.")
    shapes = {name: shape for name, shape in whole.items() if not absent.search(name)}
    stored = verifier.checkpoint is not None and verifier.checkpoint.as_stored
    source = Source(folder, config, ASSISTANT)
    weights = Weights(_read(verifier, source, config, shapes, extra, as_stored=stored))
    builder = builder_of(config, backend, weights)
    return PredictionLayers(
        embedding_norm=None,
        hidden_norm=None,
        head=weights.linear("head"),
        back=weights.linear("back"),
        clusters=_clusters(weights.under("masked_embedding."), entries),
        reads_target=True,
        **_common(verifier, config, backend, builder, weights),
        kv_specs=_of_target(verifier, config),
    )


def _config(stated: Any, **changes: Any) -> Any:
    """The config of a text model that the entries of a nested one make, with `changes`."""
    try:
        return config_of({**stated, **changes})
    except Exception as error:  # transformers believes what files say, and ends in any kind
        what = f"its config.json describes no layers ({one_line(error)})"
        raise CheckpointError(f"{what}; fetch it again") from error


def _clusters(weights: Weights, entries: Mapping[str, Any]) -> ClusteredHead | None:
    if not weights.has("centroids.weight"):
        return None
    ordering, centroids = weights.tensor("token_ordering").long(), weights.linear("centroids")
    places = torch.arange(len(ordering), device=ordering.device)
    clusters = places // (len(ordering) // centroids.out_features)
    cluster_of = torch.empty_like(ordering).index_copy_(0, ordering, clusters)
    return ClusteredHead(centroids, cluster_of, int(entries.get("centroid_intermediate_top_k", 32)))


def _of_target(verifier: DecoderVerifier, config: Any) -> Sequence[LayerSpec]:
    """For each layer of an assistant the cache of the target's last one of its kind that has keys
    and values.

    Raises:
        CheckpointError: there is none, or its heads differ.
    """
    target = verifier.config
    last = dict(zip(getattr(target, "layer_types", None) or (), cache_layers(target), strict=False))
    specs = []
    for layer, kind in enumerate(config.layer_types):
        ours = head_shape(config, layer)
        theirs = head_shape(target, last[kind]) if kind in last else None
        if theirs is None or ours[1:3] != theirs[1:3]:
            raise CheckpointError(
                f"layer {layer} reads {ours.num_kv_heads} key heads of {ours.head_dim} of a layer"
                f" of kind {kind!r}, which {verifier.name!r} lacks; take the assistant that was"
                f" made for it"
            )
        specs.append(SharedLayerSpec(layer_caches(target)[last[kind]][0]))
    return specs


def _common(
    verifier: DecoderVerifier,
    own: Any,
    backend: AttentionBackend | MlaBackend,
    builder: LayerBuilder,
    weights: Weights,
) -> dict[str, Any]:
    """What all kinds of `PredictionLayers` have; tensors left in `weights` are too many."""
    scopes = (weights.under(f"model.layers.{one}.") for one in range(own.num_hidden_layers))
    layers = [builder.layer(index, scope) for index, scope in enumerate(scopes)]
    norm = builder.norm(weights, "norm") if weights.has("norm.weight") else verifier.final_norm
    projection = weights.linear("projection")
    weights.check_all_taken()
    mixes = any(hasattr(layer.mlp, "experts") for layer in layers)
    return {
        "target_norm": verifier.final_norm,
        "projection": projection,
        "decoder": Decoder(layers, norm, ops=ops_for(backend, mixes=mixes)),
        "backends": [backend.each[kind] for kind in layer_kinds(own, backend)],
        "places": [places[0] if places else None for places in layer_caches(own)],
    }


def builder_of(
    config: Any,
    backend: AttentionBackend | MlaBackend,
    weights: Weights,
    earlier: LayerBuilder | None = None,
) -> LayerBuilder:
    """What builds layers from `weights`, whose names become those that it knows; `earlier` if that
    is there.

    Raises:
        CheckpointError: our own layers have no such kind.
    """
    description = describe(config)
    if description is None:
        what = f"our own layers have no kind {config.model_type!r}"
        raise CheckpointError(f"{what}; use another drafter")
    weights.rename(description.names)
    return LayerBuilder(config, description, backend) if earlier is None else earlier


def _read(
    verifier: DecoderVerifier,
    source: Source,
    own: Any,
    shapes: Mapping[str, Sequence[int]],
    extra: Mapping[str, Sequence[int]],
    *,
    as_stored: bool,
) -> dict[str, Any]:
    """The tensors of the layers, whose `shapes` are those of a whole model, and `extra` ones by the
    names of their modules; `own` is the config of the layers alone.
    """
    name = partial(prediction_name, config=source.config, layers=source.layers)
    where: dict[str, Any] = {"device": verifier.device, "dtype": verifier.dtype}
    weights = read_named(source.folder, own, name, **where, as_stored=as_stored)
    if not weights:
        what = "the checkpoint holds no layers for multi-token prediction"
        raise CheckpointError(f"{what}; use another drafter")
    of_layers = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.")}
    extras = {f"{module}.weight": shape for module, shape in extra.items()}
    check_shapes(weights, of_layers | extras)
    return weights


def spec_of(verifier: DecoderVerifier, config: Any) -> AttentionSpec | MlaSpec:
    """What layers with this config ask of the target's kind of attention."""
    shared = verifier.attention.spec
    same = ("device", "dtype", "block_size", "cache_dtype", "fp8_prefill")
    options = {name: getattr(shared, name) for name in same if hasattr(shared, name)}
    return backend_spec(config, **options)


def _backend(verifier: DecoderVerifier, config: Any) -> AttentionBackend | MlaBackend:
    """The target's kind of attention, for these layers: the very one where they are alike."""
    spec = spec_of(verifier, config)
    if spec == verifier.attention.spec:
        return verifier.attention
    kind: Any = type(verifier.attention)
    if reasons := kind.unsupported_reasons(spec):
        what = f"attention backend {kind.name!r} cannot serve this drafter: {'; '.join(reasons)}"
        raise BackendError(f"{what}; choose another")
    backend: AttentionBackend | MlaBackend = kind(spec)
    return backend
