"""Finding and reading a target by name.

What our own layers run is read without transformers' modules, and quantized weights always are. The
embedded model takes a way of its own, and `verifiers.config.recalled` knows other targets from an
earlier start: neither imports transformers' model code, which takes longer than the rest.
"""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.attention.selector import select_backend
from specdec.base.checkpoint.gguf_names import gguf_file
from specdec.base.checkpoint.hub import checkpoint_folder
from specdec.base.checkpoint.kinds import ADAPTER, check_adapter, checkpoint_config
from specdec.base.checkpoint.tensor_files import TensorFiles, usually_named
from specdec.base.config import GenerationSource
from specdec.base.errors import CheckpointError, UnsupportedModelError
from specdec.layers.packed.check import fastest_dtype, keeps_blocks, keeps_packed
from specdec.model.core import Verifier
from specdec.model.large_keys import fitting_specs
from specdec.parallel.group import Group
from verifiers.config import recalled
from verifiers.config.families import describe
from verifiers.config.generation import read_generation
from verifiers.config.reading import blamed, check_numbers, check_sizes, read
from verifiers.config.shape import backend_spec, context_limits, peculiarity
from verifiers.decoder import Checkpoint, DecoderVerifier
from verifiers.description import Description
from verifiers.entries import PlainConfig
from verifiers.formats.format import Stored, check_floats
from verifiers.weights.embedded import BLOCKS, EMBEDDED, embedded_model_path, read_blocks
from verifiers.weights.shards import Shard, sharded
from verifiers.weights.tokenizer import tokenizer_in
from verifiers.weights.weights import Weights

if TYPE_CHECKING:
    from verifiers.hf import HFVerifier

logger = logging.getLogger(__name__)


def load_verifier(
    name: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
    fuse: bool = True,
    as_stored: bool = True,
    group: Group | None = None,
    generation_config: GenerationSource | None = "model",
) -> tuple[Verifier, PreTrainedTokenizerBase]:
    """Loads a target and its tokenizer.

    Args:
        name: "embedded", a local folder, or a hub name.
        dtype: type of weights and activations; None for the fastest, see
            `specdec.layers.packed.check.fastest_dtype`.
        attention: name of an attention backend, or "auto".
        cache_dtype: type of the cache when it is not `dtype`.
        fp8_prefill: prompts may be computed in 8-bit floats, which latent attention on gfx950 does.
        fuse: run models of known families as `DecoderVerifier`; otherwise every model runs through
            its own modules.
        as_stored: quantized weights stay packed where `specdec.layers.packed.check.keeps_packed`
            says so, or `keeps_blocks` of a GGUF file; otherwise they become numbers of `dtype`.
        group: the ranks that compute the target together; each calls this, and reads its part. None
            for a process alone.
        generation_config: "none" leaves aside what the checkpoint asks of requests, but for what
            ends them. None says nothing of it, either: the target gets no requests.

    Raises:
        UnsupportedModelError: the architecture cannot run yet; said before weights are read.
        CheckpointError: nothing there, damaged files, or tensors missing.
        BackendError: no backend, or not the named one, can serve the model.
    """
    if not isinstance(name, str | Path):
        what = f"the target is a {type(name).__name__}"
        raise CheckpointError(f"{what}; give a folder, a hub name, or {EMBEDDED!r}")
    given, name = name, str(name)
    direct, place, known = name == EMBEDDED and fuse and group is None, None, None
    if name == EMBEDDED:
        path = embedded_model_path()
    else:
        path = checkpoint_folder(given, what="target", weights=False)
    if dtype is None:
        blocks = as_stored and (name == EMBEDDED or gguf_file(path) is not None)
        dtype = fastest_dtype(device, blocks=blocks)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "block_size": block_size}
    options |= {"cache_dtype": cache_dtype, "fp8_prefill": fp8_prefill}
    if direct:
        whole = config = read(name, "config", partial(_read_config, path))
        shard, spec = None, backend_spec(config, **options)
    else:
        entries = checkpoint_config(given, path, what="target")
        place = recalled.place_of(name, path, entries) if fuse else None
        known = recalled.recall(place, path)
        whole, config, shard, spec = _understood(name, path, entries, known, group, fuse, options)
    backend = select_backend(attention, spec)
    tokenizer = tokenizer_in(path, name, None if known is None else known.tokenizer)
    source, size = generation_config or "none", config.vocab_size
    generation = read_generation(name, path, vocab_size=size, tokenizer=tokenizer, source=source)
    if generation_config is not None and (group is None or group.rank == 0):
        generation.say()
    verifier: Verifier
    if direct:
        tensors = read(name, "weights", partial(load_file, path / "model.safetensors"))
        check_floats(tensors)
        weights: dict[str, Stored]
        weights = {key: tensor.to(device, dtype) for key, tensor in tensors.items()}
        if device.type == "cpu" and keeps_blocks(device, dtype):
            stored = read(name, "weights as stored", partial(load_file, path / BLOCKS))
            weights |= read_blocks(stored, dtype)
        description = describe(config)
        assert isinstance(backend, AttentionBackend) and description is not None
        parts = Weights(weights)
        verifier = DecoderVerifier(config, description, parts, name=name, backend=backend)
    else:
        from verifiers.config.wrappers import media_token_ids

        folder = path
        if name != EMBEDDED:
            folder = checkpoint_folder(given, what="target", snapshot=path)
        check_adapter(given, folder, what="target")
        keeps = keeps_packed if gguf_file(folder) is None else keeps_blocks
        packed = as_stored and keeps(device, dtype)
        reading = _Reading(name, folder, whole, backend, device, dtype, packed, shard)
        own = _own(reading, fuse)
        if own is not None and known is None and (group is None or group.rank == 0):
            recalled.keep(place, whole, tokenizer)
        verifier = own or _theirs(reading, fuse)
        verifier.media_token_ids = media_token_ids(whole)
    verifier.eos_token_ids, verifier.defaults = generation.ends, generation.defaults
    if cache_dtype is not None:
        cast("DecoderVerifier | HFVerifier", verifier).store(fitting_specs(verifier))
    return verifier, tokenizer


def _understood(
    name: str,
    path: Path,
    entries: Mapping[str, Any],
    known: PlainConfig | None,
    group: Group | None,
    fuse: bool,
    options: dict[str, Any],
) -> tuple[Any, Any, Shard | None, AttentionSpec | MlaSpec]:
    """The config of a target, that of its text part, this rank's shard, and what it asks of an
    attention backend; `known` is both configs, from an earlier start.
    """
    from verifiers.config.wrappers import config_of, read_config, text_config

    def judge(whole: Any) -> tuple[Any, Any, Shard | None, AttentionSpec | MlaSpec]:
        config = text_config(whole)
        if known is None:
            from verifiers.support import check_supported

            check_sizes(config)
            check_supported(name, whole)
        shard = None if group is None else _shard(config, group, name, fuse)
        context_limits(config, own=True)
        return whole, config, shard, backend_spec(sharded(config, group), **options)

    def blame(error: BaseException) -> str:
        return blamed(entries, lambda kept: judge(config_of(kept)), error)

    def judge_file() -> tuple[Any, Any, Shard | None, AttentionSpec | MlaSpec]:
        check_numbers(entries)
        return judge(read_config(str(path)) if known is None else known)

    return read(name, "config", judge_file, blame)


class _Reading(NamedTuple):
    """What all ways of reading a target share."""

    name: str
    folder: Path
    whole: Any  # the config, of a composite if it is one
    backend: AttentionBackend | MlaBackend
    device: torch.device
    dtype: torch.dtype
    as_stored: bool
    shard: Shard | None

    @property
    def config(self) -> Any:
        """The config of the text part."""
        from verifiers.config.wrappers import text_config

        return text_config(self.whole)

    @property
    def quantized(self) -> bool:
        """Whether weights are."""
        from verifiers.formats.method import quantization_of

        return quantization_of(self.folder, self.config) is not None

    def blame(self, error: BaseException) -> str:
        """What of the config keeps a model from being made of it; see `read`."""
        from verifiers.config.wrappers import config_entries, config_of, shapes_of, text_config

        def judge(entries: dict[str, Any]) -> object:
            return shapes_of(text_config(config_of(entries)))

        return blamed(config_entries(str(self.folder)), judge, error)


def _shard(config: Any, group: Group, name: str, fuse: bool) -> Shard:
    """This rank's shard of a target.

    Raises:
        UnsupportedModelError: the target cannot be divided.
    """
    description = describe(sharded(config, group))
    if description is None or not fuse:
        why = "was asked to" if description is not None else f"of type {config.model_type!r} has to"
        raise UnsupportedModelError(
            f"target {name!r} {why} run through transformers' modules, which are not divided among"
            f" ranks; start one process"
        )
    return Shard(config, description, group, name=name)


def _own(reading: _Reading, fuse: bool) -> Verifier | None:
    """A target on our own layers, which take its weights from the files; None where transformers'
    modules have to.
    """
    from verifiers.config.wrappers import say_text_only

    config = reading.config
    description = describe(config) if reading.shard is None else reading.shard.description
    latent = isinstance(reading.backend, MlaBackend)
    if description is None or not (fuse or latent or peculiarity(config)):
        return None
    say_text_only(reading.whole)
    build = partial(_built, reading, config, description)
    return read(reading.name, "weights", build, reading.blame)


def _built(reading: _Reading, config: Any, description: Description) -> Verifier:
    from verifiers.config.wrappers import shapes_of
    from verifiers.weights.checkpoint import read_weights
    from verifiers.weights.complete import complete

    name, folder, _, backend, device, dtype, as_stored, shard = reading
    if shard is not None:
        shard.check(shapes_of(config))
    read = read_weights(
        folder, config, device=device, dtype=dtype, as_stored=as_stored, shard=shard
    )
    group = None if shard is None else shard.group
    weights = Weights(complete(read, config, shard), group=group)
    checkpoint = Checkpoint(folder, as_stored)
    return DecoderVerifier(
        config, description, weights, name=name, backend=backend, checkpoint=checkpoint
    )


def _theirs(reading: _Reading, fuse: bool) -> Verifier:
    """A target whose modules transformers makes; quantized weights become plain numbers first."""
    from verifiers.config.wrappers import say_text_only
    from verifiers.hf import verifier_for

    say_text_only(reading.whole)
    # transformers finds files of the usual names alone, and would take an adapter's word for what
    # the model is.
    plain = (
        not reading.quantized
        and usually_named(reading.folder)
        and not (reading.folder / ADAPTER).is_file()
    )
    load = partial(_load_plain, reading) if plain else partial(_read_whole, reading)
    model, missing = read(reading.name, "weights", load, reading.blame)
    if missing:
        raise CheckpointError(
            f"target {reading.name!r} lacks {len(missing)} tensors, the first being {missing[0]!r};"
            " fetch the whole checkpoint again"
        )
    build = partial(verifier_for, name=reading.name, backend=reading.backend, fuse=fuse)
    return read(reading.name, "weights", lambda: build(model.to(reading.device)))


def _load_plain(reading: _Reading) -> tuple[Any, list[str]]:
    """By transformers, which would turn integers into floats without a word."""
    from verifiers.config.names import name_of
    from verifiers.config.wrappers import shapes_of
    from verifiers.hf import load_model

    files, shapes = TensorFiles(reading.folder), shapes_of(reading.config)
    for source in files.names:
        name = name_of(source, reading.config)
        if name is not None and (name in shapes or name.endswith(".weight")):
            piece = range(0) if files.shape(source) else None  # whose type is all that counts
            check_floats({source: files.read(source, piece=piece)})
    return load_model(str(reading.folder), reading.whole, reading.dtype)


def _read_whole(reading: _Reading) -> tuple[Any, list[str]]:
    from verifiers.config.wrappers import shapes_of
    from verifiers.hf import model_of
    from verifiers.weights.checkpoint import read_weights

    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": reading.dtype}
    weights = read_weights(reading.folder, reading.config, **options, as_stored=False)
    shapes = shapes_of(reading.config)
    check_floats({name: weight for name, weight in weights.items() if name in shapes})
    return model_of(reading.config, weights, reading.dtype)


def _read_config(path: Path) -> Any:
    """The entries of config.json as attributes; transformers' class imports model code."""
    return SimpleNamespace(**json.loads((path / "config.json").read_text()))
