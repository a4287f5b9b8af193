"""Finding and reading a target by name.

What our own layers run is read without transformers' modules, and quantized weights always are. The embedded model takes a way of
its own, without transformers' model code, so that a start takes a second or two instead of five.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.attention.selector import select_backend
from specdec.config import GenerationSource
from specdec.core import Verifier
from specdec.errors import CheckpointError, SpecDecError, UnsupportedModelError, one_line
from specdec.hub import checkpoint_folder, json_object, unpinned
from specdec.kinds import ADAPTER, check_adapter, checkpoint_config
from specdec.layers.linear import can_pack_four_bit
from specdec.layers.packed_check import keeps_packed
from specdec.parallel.group import Group
from specdec.registry import PARTS, resolve
from specdec.tensor_files import usually_named
from verifiers.decoder import Checkpoint, DecoderVerifier
from verifiers.description import Description
from verifiers.embedded import FOUR_BIT, embedded_model_path
from verifiers.families import describe
from verifiers.generation import read_generation
from verifiers.shape import backend_spec, peculiarity
from verifiers.shares import Share, shared
from verifiers.weights import Weights

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""Name of the model that comes with the package."""

Read = TypeVar("Read")

NO_FOREIGN_CODE = {"trust_remote_code": False}
"""Said each time, since transformers otherwise asks on standard input whether to run code from a repository."""


def load_verifier(
    name: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
    fuse: bool = True,
    as_stored: bool = True,
    group: Group | None = None,
    generation_config: GenerationSource = "model",
) -> tuple[Verifier, PreTrainedTokenizerBase]:
    """Loads a target and its tokenizer.

    Args:
        name: "embedded", a local folder, or a hub name.
        device: where the weights go.
        dtype: type of weights and activations.
        attention: name of an attention backend, or "auto".
        block_size: tokens per cache block.
        cache_dtype: type of the cache when it is not `dtype`.
        fp8_prefill: prompts may be computed in 8-bit floats, which latent attention on gfx950 does.
        fuse: run models of known families as `DecoderVerifier`; otherwise every model runs through its own modules.
        as_stored: quantized weights stay packed where `specdec.layers.packed_check.keeps_packed` says so; otherwise they become
            numbers of `dtype` when they are read.
        group: the ranks that compute the target together; each calls this, and reads its part. None for a process alone.
        generation_config: "none" leaves aside what the checkpoint asks of requests, but for what ends them.

    Raises:
        UnsupportedModelError: the architecture cannot run yet; said from its config, before weights are read.
        CheckpointError: nothing there, damaged files, or tensors missing.
        BackendError: no backend, or not the named one, can serve the model.
    """
    if not isinstance(name, str | Path):
        raise CheckpointError(f"the target is a {type(name).__name__}; give a folder, a hub name, or {EMBEDDED!r}")
    given, name = name, str(name)
    direct = name == EMBEDDED and fuse and group is None
    path = embedded_model_path() if name == EMBEDDED else checkpoint_folder(given, what="target", weights=False)
    if direct:
        whole = config = _read(name, "config", partial(_read_config, path))
    else:
        from verifiers.support import check_supported
        from verifiers.wrappers import media_token_ids, read_config, text_config

        refuse_drafter(name, checkpoint_config(given, path, what="target"))
        whole = _read(name, "config", partial(read_config, str(path)))
        config = text_config(whole)
        _check_sizes(name, config)
        check_supported(name, whole)
    share = None if group is None else _share(config, group, name, fuse)
    options: dict[str, Any] = {"block_size": block_size, "cache_dtype": cache_dtype, "fp8_prefill": fp8_prefill}
    backend = select_backend(attention, backend_spec(shared(config, group), device=device, dtype=dtype, **options))
    tokenizer = _tokenizer(name, path)
    generation = read_generation(name, path, vocab_size=config.vocab_size, tokenizer=tokenizer, source=generation_config)
    if group is None or group.rank == 0:
        generation.say()
    verifier: Verifier
    if direct:
        tensors = _read(name, "weights", partial(load_file, path / "model.safetensors"))
        tensors = {key: tensor.to(device, dtype) for key, tensor in tensors.items()}
        if can_pack_four_bit(tensors["model.embed_tokens.weight"]):
            tensors |= _read(name, "four-bit weights", partial(load_file, path / FOUR_BIT))
        description = describe(config)
        assert isinstance(backend, AttentionBackend) and description is not None
        verifier = DecoderVerifier(config, description, Weights(dict(tensors)), name=name, backend=backend)
    else:
        folder = path if name == EMBEDDED else checkpoint_folder(given, what="target", snapshot=path)
        check_adapter(given, folder, what="target")
        reading = _Reading(name, folder, whole, backend, device, dtype, as_stored and keeps_packed(device, dtype), share)
        verifier = _own(reading, fuse) or _theirs(reading, fuse)
        verifier.media_token_ids = media_token_ids(whole)
    verifier.eos_token_ids, verifier.defaults = generation.ends, generation.defaults
    return verifier, tokenizer


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, by the target's name as in `load_verifier`.

    Raises:
        CheckpointError: nothing there, or damaged files.
    """
    if str(name) == EMBEDDED:
        return _tokenizer(EMBEDDED, embedded_model_path())
    return _tokenizer(str(name), checkpoint_folder(name, what="target", weights=False))


def _tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    if name == EMBEDDED:
        return _read(name, "tokenizer", partial(PreTrainedTokenizerFast.from_pretrained, str(folder)))
    tokenizer = _read(name, "tokenizer", partial(_read_tokenizer, name, folder))
    of_processor = folder / "chat_template.json"  # which transformers leaves to processors
    if not tokenizer.chat_template and of_processor.is_file():
        template = json_object(of_processor, name, what="target").get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _read_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    from verifiers.wrappers import read_config

    config = read_config(str(folder))
    config.name_or_path = unpinned(name).partition(":")[0]  # by which transformers knows whose entries are wrong
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), config=config, **NO_FOREIGN_CODE)
    return tokenizer


def refuse_drafter(name: str, entries: Mapping[str, Any]) -> None:
    """Refuses as a target what can be nothing but a drafter.

    Raises:
        UnsupportedModelError: the config.json is of one; the message names its target.
    """
    if (found := resolve(PARTS, "drafter", "part")(entries)) is not None:
        algorithm, target = found
        beside = f"its target, {target}" if target else "its target, which its card names"
        raise UnsupportedModelError(f"{name!r} is no target but a drafter ({algorithm}); give it as --drafter, beside {beside}")


class _Reading(NamedTuple):
    """What all ways of reading a target share."""

    name: str
    folder: Path
    whole: Any  # the config, of a composite if it is one
    backend: AttentionBackend | MlaBackend
    device: torch.device
    dtype: torch.dtype
    as_stored: bool
    share: Share | None = None

    @property
    def config(self) -> Any:
        """Of the text part."""
        from verifiers.wrappers import text_config

        return text_config(self.whole)

    @property
    def quantized(self) -> bool:
        """Whether weights are."""
        from verifiers.checkpoint import quantization_of

        return quantization_of(self.folder, self.config) is not None


def _share(config: Any, group: Group, name: str, fuse: bool) -> Share:
    """This rank's share of a target.

    Raises:
        UnsupportedModelError: the target cannot be divided.
    """
    description = describe(shared(config, group))
    if description is None or not fuse:
        why = "was asked to" if description is not None else f"of type {config.model_type!r} has to"
        raise UnsupportedModelError(
            f"target {name!r} {why} run through transformers' modules, which are not divided among ranks; start one process"
        )
    return Share(config, description, group, name=name)


def _own(reading: _Reading, fuse: bool) -> Verifier | None:
    """A target on our own layers, which take its weights from the files; None where transformers' modules have to."""
    from verifiers.wrappers import say_text_only

    config = reading.config
    description = describe(config) if reading.share is None else reading.share.description
    if description is None or not (fuse or peculiarity(config) or isinstance(reading.backend, MlaBackend)):
        return None
    say_text_only(reading.whole)
    return _read(reading.name, "weights", partial(_built, reading, config, description))


def _built(reading: _Reading, config: Any, description: Description) -> Verifier:
    from verifiers.checkpoint import read_weights
    from verifiers.complete import complete, shapes_of

    share, group = reading.share, None
    if share is not None:
        share.check(shapes_of(config))
        group = share.group
    device, dtype, as_stored = reading.device, reading.dtype, reading.as_stored
    read = read_weights(reading.folder, config, device=device, dtype=dtype, as_stored=as_stored, share=share)
    weights = Weights(complete(read, config, share), group=group)
    checkpoint = Checkpoint(reading.folder, reading.as_stored)
    return DecoderVerifier(config, description, weights, name=reading.name, backend=reading.backend, checkpoint=checkpoint)


def _theirs(reading: _Reading, fuse: bool) -> Verifier:
    """A target whose modules transformers makes; quantized weights become plain numbers before it sees them."""
    from verifiers.hf import load_model, verifier_for
    from verifiers.wrappers import say_text_only

    say_text_only(reading.whole)
    # transformers finds files of the usual names alone, and would take an adapter's word for what the model is.
    plain = not reading.quantized and usually_named(reading.folder) and not (reading.folder / ADAPTER).is_file()
    load = partial(load_model, str(reading.folder), reading.whole, reading.dtype) if plain else partial(_read_whole, reading)
    model, missing = _read(reading.name, "weights", load)
    if missing:
        raise CheckpointError(
            f"target {reading.name!r} lacks {len(missing)} tensors, the first being {missing[0]!r};"
            " fetch the whole checkpoint again"
        )
    return verifier_for(model.to(reading.device), name=reading.name, backend=reading.backend, fuse=fuse)


def _read_whole(reading: _Reading) -> tuple[Any, list[str]]:
    from verifiers.checkpoint import read_weights
    from verifiers.hf import model_of

    weights = read_weights(reading.folder, reading.config, device=torch.device("cpu"), dtype=reading.dtype, as_stored=False)
    return model_of(reading.config, weights, reading.dtype)


def _read_config(path: Path) -> Any:
    """The entries of config.json as attributes; transformers' own class would import much of its model code."""
    return SimpleNamespace(**json.loads((path / "config.json").read_text()))


def _check_sizes(name: str, config: Any) -> None:
    """Refuses what no model can have, before anything is allocated for it."""
    for key in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
        value = getattr(config, key, None)
        if isinstance(value, int) and not 1 <= value < 2**31:
            raise CheckpointError(f"{key} of target {name!r} is {value}; it must lie in [1, 2**31), so fetch config.json again")


def _read(name: str, what: str, load: Callable[[], Read]) -> Read:
    """Calls `load`, turning what a bad path or damaged file raises into one line."""
    try:
        return load()
    except CheckpointError as error:
        raise CheckpointError(f"cannot read the {what} of target {name!r}: {error}") from error
    except SpecDecError:
        raise
    except ImportError as error:  # transformers reads some quantized weights through other packages
        raise CheckpointError(
            f"the {what} of target {name!r} need a package that is not installed: {one_line(error, 300)}"
        ) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise  # nothing is wrong with the files
    except Exception as error:  # transformers believes what files say: a damaged one ends in any kind of error
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"the {what} of target {name!r} need code from its repository, which is never run;"
                " use a checkpoint whose architecture transformers has itself"
            ) from error
        raise CheckpointError(
            f"cannot read the {what} of target {name!r}: {one_line(error, 300)}; check the name or folder, or fetch it again"
        ) from error
