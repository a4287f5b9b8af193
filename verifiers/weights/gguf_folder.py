"""What a GGUF file says of its model, unpacked to the small files that every checkpoint has."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.base.checkpoint.gguf_names import GGUF, whole_model
from specdec.base.errors import CheckpointError
from specdec.base.files import cache_folder
from specdec.base.kept import kept_folder
from specdec.base.version import __version__
from verifiers.config.generation import OF_GGUF
from verifiers.config.gguf import config_of
from verifiers.gguf.file import Facts, GgufFiles
from verifiers.gguf.tokenizer import end_ids, tokenizer_files

FORMAT_VERSION = 4
"""Goes up when other files are made of the same model."""

VERSION = {"transformers_version": "5.0.0"}
"""Entry of config.json by which Transformers knows that the tokenizer is right. Without it 5.17
says of every model that its tokenizer is a wrong one of Mistral's.
"""

SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""From keys of general.sampling to entries of generation_config.json."""


def unpacked(path: Path, cache_dir: Path | None = None) -> Path:
    """The folder with what a GGUF file says of its model, made on the first call.

    Holds `config.json`, `generation_config.json`, `tokenizer.json`, `tokenizer_config.json` with
    the chat template, and `gguf.json`, which names the file; weights stay where they are.

    Args:
        path: of the file, or of any of its parts.
        cache_dir: where model folders are kept; None takes `$SPECDEC_CACHE`, or `~/.cache/specdec`.

    Raises:
        CheckpointError: a part is missing, or the file is damaged or no model.
        UnsupportedModelError: an architecture or a tokenizer that is not read.
        CapacityError, InvalidInputError: see `specdec.base.kept.kept_folder`.
    """
    path = path.absolute()
    state = [__version__, FORMAT_VERSION]
    for part in whole_model(path):
        try:
            found = part.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {str(part)!r} ({error.strerror})") from error
        state += [str(part), found.st_size, found.st_mtime_ns]
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    root = cache_dir if cache_dir is not None else cache_folder()
    folder = root / "gguf" / f"{path.stem[:60]}-{digest}"
    return kept_folder(folder, lambda: GgufFiles(path), _files, what=f"what {path.name!r} says")


def _files(files: GgufFiles) -> dict[str, bytes]:
    texts, config = files_of(files)
    names = [str(part) for part in whole_model(files.path)]
    return {**texts, "config.json": as_json(VERSION | config), GGUF: as_json({"files": names})}


def files_of(files: GgufFiles) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Content of the files beside a config.json, and its entries; errors as of `unpacked`."""
    config = config_of(Facts(files))
    generation = as_json(generation_of(files, config))
    return {"generation_config.json": generation, **tokenizer_files(files)}, config


def generation_of(files: GgufFiles, config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of generation_config.json: tokens that end answers, and what is said of sampling."""
    ids = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")}
    named = {f"general.sampling.{key}": entry for key, entry in SAMPLING.items()}
    named |= {key: key for key in OF_GGUF}
    stated = {entry: files.metadata.get(key) for key, entry in named.items()}
    given = {entry: value for entry, value in (ids | stated).items() if value is not None}
    return {**given, "eos_token_id": end_ids(files)}


def as_json(content: Mapping[str, Any]) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
