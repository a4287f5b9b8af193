"""Whether a target would run, on what, and what it would take: told from its config files, before
any weight is fetched.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers import __version__ as transformers_version

from specdec.attention.backend import AttentionSpec
from specdec.attention.mla import MlaSpec
from specdec.attention.selector import refusals, select_backend
from specdec.base.checkpoint.hub import gguf_of, json_file, local_folder
from specdec.base.checkpoint.kinds import check_adapter, checkpoint_config
from specdec.base.checkpoint.tensor_files import INDEXES
from specdec.base.config import DEFAULT_BLOCK_SIZE
from specdec.base.errors import CheckpointError
from specdec.kv_cache import KVLayerSpec, SharedLayerSpec, StateLayerSpec, bytes_per_slot
from specdec.layers.packed.check import fastest_dtype, keeps_blocks, keeps_packed
from specdec.model.core import ContextLimits
from verifiers.config.families import READ_AS, describe, family_of
from verifiers.config.generation import FILE, generation_of
from verifiers.config.names import predicts
from verifiers.config.reading import blamed, check_numbers, check_sizes, read
from verifiers.config.shape import backend_spec, context_limits, layer_caches, layer_specs
from verifiers.config.wrappers import config_of, text_config
from verifiers.divisions import divisions
from verifiers.entries import layer_windows
from verifiers.formats.method import QUANTIZATION, format_of, method_of, stated_quantization
from verifiers.gguf.file import GgufFiles
from verifiers.sizes import weight_bytes
from verifiers.support import unsupported_reasons
from verifiers.weights.embedded import EMBEDDED, embedded_model_path
from verifiers.weights.gguf import PLAIN, kinds_of, memory_of
from verifiers.weights.tokenizer import WHOLE, tokenizer_in, tokenizer_reasons

ROOM = 0.9
"""Part of a GPU's memory that weights may take; cache, drafter and activations need the rest."""

OWN, THEIRS = "our own layers", "transformers' modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What running a target takes.

    Attributes:
        name: of the target.
        model_type: in its config.json.
        text_type: of the text part that would run; the same for a text model.
        runs_on: whose layers would run it; "" for none.
        dtype: of its weights and activations.
        attention: backend that `auto` takes; "" where none can.
        caches: what is kept of requests, in words.
        token_bytes: of the paged cache per token.
        request_bytes: of states per request, with `max_rows` rows in a step.
        stored: weights in the file: a quantization method, a type of numbers, or types of ggml.
        weights: bytes in memory.
        unpacked: quantized weights become plain numbers there.
        gpu_bytes: memory of one GPU.
        gpus: needed for the weights.
        ranks: bytes of a rank's weights by the number of ranks, see `verifiers.divisions`; of those
            that divide it.
        hidden_size, num_layers, vocab_size: what a drafter has to fit.
        predicts: it has layers for multi-token prediction, which can draft.
        context: how long requests may be; None where it would not run.
        notes: what its generation_config.json asks of requests, in lines.
        missing: everything in the way; empty when it would run.
    """

    name: str
    model_type: str
    text_type: str = ""
    runs_on: str = ""
    dtype: torch.dtype | None = None
    attention: str = ""
    caches: tuple[str, ...] = ()
    token_bytes: int = 0
    request_bytes: int = 0
    stored: str = ""
    weights: int = 0
    unpacked: bool = False
    gpu_bytes: int = 0
    gpus: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    predicts: bool = False
    context: ContextLimits | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def would_run(self) -> bool:
        """Whether nothing is in the way."""
        return not self.missing


def read_needs(
    name: str, *, device: torch.device, dtype: torch.dtype | None, gpu_bytes: int, **options: Any
) -> Needs:
    """What the target in a folder, or on the hub, needs; the arguments are those of `needs_of`, and
    `dtype` may be None for the fastest.

    Raises:
        CheckpointError: its config cannot be read.
    """
    where = str(embedded_model_path()) if name == EMBEDDED else name
    entries = checkpoint_config(where, what="target")
    apart = json_file(where, QUANTIZATION, what="target")
    if apart and not entries.get("quantization_config"):
        entries = {**entries, "quantization_config": apart.get("quantization")}
    check_adapter(where, what="target")
    index = next(filter(None, (json_file(where, file, what="target") for file in INDEXES)), {})
    about, files = index.get("metadata"), index.get("weight_map")
    size = about.get("total_size") if isinstance(about, dict) else None
    size = size if isinstance(size, int | float) else 0
    options["total_size"] = int(size) if 0 < size < 2**63 else None
    options["names"] = tuple(files) if isinstance(files, dict) else ()
    options["gguf"] = None if (whole := gguf_of(where)) is None else GgufFiles(whole)
    if dtype is None:
        dtype = fastest_dtype(device, blocks=name == EMBEDDED or options["gguf"] is not None)
    needs = needs_of(entries, name=name, device=device, dtype=dtype, gpu_bytes=gpu_bytes, **options)
    reasons = [] if name == EMBEDDED else tokenizer_reasons(name)
    needs = replace(needs, missing=(*needs.missing, *reasons))
    if not needs.vocab_size:
        return needs
    try:
        folder = local_folder(where) if needs.would_run else None  # and not far away
        tokenizer = None
        if folder is not None and (folder / WHOLE).is_file():
            tokenizer = tokenizer_in(folder, name)
        file = json_file(where, FILE, what="target")
        asked = generation_of(name, file, entries, vocab_size=needs.vocab_size, tokenizer=tokenizer)
        return replace(needs, notes=tuple(asked.notes))
    except CheckpointError as error:
        return replace(needs, missing=(*needs.missing, str(error)))


def _in_one_line(needs_of: Callable[..., Needs]) -> Callable[..., Needs]:
    """A `needs_of` that says what entries of any kind make it raise."""

    @wraps(needs_of)
    def guarded(entries: Mapping[str, Any], *, name: str, **options: Any) -> Needs:
        def judge(entries: Mapping[str, Any]) -> Needs:
            check_numbers(entries)
            return needs_of(entries, name=name, **options)

        return read(name, "config", partial(judge, entries), lambda e: blamed(entries, judge, e))

    return guarded


@_in_one_line
def needs_of(
    entries: Mapping[str, Any],
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    gpu_bytes: int,
    total_size: int | None = None,
    names: Sequence[str] = (),
    gguf: GgufFiles | None = None,
    cache_dtype: torch.dtype | None = None,
    max_rows: int = 8,
    packed: bool | None = None,
    max_gpus: int = 8,
    divides: bool = True,
) -> Needs:
    """What a target needs.

    Args:
        entries: of its config.json.
        device: where it would run, which decides the attention backend.
        dtype: of its weights and activations.
        total_size: bytes of its weights' files; None to add them up from the config.
        names: of the tensors in them, where they are known.
        gguf: the files where they are GGUF's.
        cache_dtype: type of the cache when it is not `dtype`.
        max_rows: rows of a step, k + 1.
        packed: quantized weights stay packed on our own layers; None for what loading does on
            `device`.
        max_gpus: that a machine has.
        divides: asks how the target can be divided among GPUs.

    Raises:
        CheckpointError: the entries make no config.
    """
    model_type = entries.get("model_type", "")
    gpus = _gpus(total_size or 0, gpu_bytes)
    too_large = _too_large(gpus, gpu_bytes, {}, max_gpus)
    known = isinstance(model_type, str) and (model_type in READ_AS or model_type in CONFIG_MAPPING)
    if not known:
        unknown = f"transformers {transformers_version} has no model of type {model_type!r}"
        missing = unknown, *too_large
        return Needs(name=name, model_type=str(model_type), gpus=gpus, missing=missing)
    config = config_of(dict(entries))
    text = text_config(config)
    check_sizes(text)
    reasons = unsupported_reasons(config)
    common = {
        "name": name,
        "model_type": config.model_type,
        "text_type": text.model_type,
        "dtype": dtype,
        "stored": _stored(text, dtype) if gguf is None else ", ".join(kinds_of(gguf)),
        "gpu_bytes": gpu_bytes,
    }
    if reasons:
        missing = *reasons, *too_large
        return Needs(**common, weights=total_size or 0, gpus=gpus, missing=missing)
    own, quantization = describe(text) is not None, stated_quantization(text)
    keeps = keeps_packed if gguf is None else keeps_blocks
    packed = own and (keeps(device, dtype) if packed is None else packed)
    if gguf is None:
        packed = packed and (quantization is None or format_of(quantization).stays_packed)
        weights = weight_bytes(text, quantization, dtype, total_size=total_size, packed=packed)
        unpacked = quantization is not None and not packed
    else:
        weights = memory_of(gguf, device, dtype, as_stored=packed)
        unpacked = not packed and any(one.kind not in PLAIN for one in gguf.entries.values())
    ranks = {1: weights}
    if own and divides:
        ranks = divisions(text, quantization, weights, device=device, dtype=dtype, packed=packed)
    fitting = [n for n, size in ranks.items() if n <= max_gpus and size <= ROOM * gpu_bytes]
    gpus = fitting[0] if fitting else _gpus(weights, gpu_bytes)
    spec = backend_spec(text, device=device, dtype=dtype, block_size=DEFAULT_BLOCK_SIZE)
    chosen = next((one for one, against in refusals(spec, auto=True).items() if not against), "")
    against = [f"{one}: {'; '.join(reasons)}" for one, reasons in refusals(spec).items()]
    return Needs(
        **common,
        **(_caches(text, spec, chosen, cache_dtype or dtype, max_rows) if chosen else {}),
        runs_on=OWN if own else THEIRS,
        attention=chosen,
        weights=weights,
        unpacked=unpacked,
        gpus=gpus,
        ranks=ranks,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        predicts=own and predicts(text, names),
        context=context_limits(text, own=own),
        missing=(
            *([] if chosen else against),
            *([] if fitting else _too_large(gpus, gpu_bytes, ranks, max_gpus)),
        ),
    )


def _gpus(weights: int, gpu_bytes: int) -> int:
    return math.ceil(weights / (ROOM * gpu_bytes))


def _too_large(gpus: int, gpu_bytes: int, ranks: Mapping[int, int], max_gpus: int) -> list[str]:
    """What is said of weights that so many GPUs do not hold; `ranks` are those of `Needs`, none
    where it is not known.
    """
    if gpus <= max_gpus and not ranks:
        return []
    counts = [str(count) for count in ranks if 1 < count <= max_gpus]
    why = f"there are {max_gpus} at most" if max_gpus > 1 else "there is one"
    if max_gpus > 1 and ranks:
        why = "it is not divided among several"
    if max_gpus > 1 and counts:
        why = f"it is divided among {' or '.join(counts)} alone"
    return [f"its weights need {gpus} GPUs of {gpu_bytes / 1e9:.0f} GB, and {why}"]


def _stored(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    if (quantization := stated_quantization(config)) is not None:
        return method_of(quantization)
    stated = getattr(config, "dtype", None) or dtype
    return str(stated).removeprefix("torch.")


def _caches(
    config: PreTrainedConfig,
    spec: AttentionSpec | MlaSpec,
    backend: str,
    dtype: torch.dtype,
    max_rows: int,
) -> dict[str, Any]:
    """What `Needs` says of caches."""
    specs = layer_specs(config, select_backend(backend, spec))
    states = sum(isinstance(one, StateLayerSpec) for one in specs)
    shared = sum(isinstance(one, SharedLayerSpec) for one in specs)
    paged = len(specs) - states - shared
    words = []
    if (family := family_of(config)).latent:
        indexed = " and index keys" if family.indexer else ""
        words.append(f"latents{indexed} of {paged} layers")
    elif paged:
        of_layers = zip(layer_caches(config), layer_windows(config), strict=True)
        windows = [
            window
            for places, window in of_layers
            if window is not None and any(isinstance(specs[one], KVLayerSpec) for one in places)
        ]
        seen = f", {len(windows)} of them with a window of {windows[0]:,}" if windows else ""
        readers = f", which {shared} more read" if shared else ""
        words.append(f"keys and values of {paged} layers{seen}{readers}")
    if states:
        words.append(f"states of {states} layers")
    token_bytes = sum(one.bytes_per_token(dtype) for one in specs)
    request_bytes = bytes_per_slot(specs, max_rows)
    return {"caches": tuple(words), "token_bytes": token_bytes, "request_bytes": request_bytes}
