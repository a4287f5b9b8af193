"""Where the files of a stage come from: settings, prompt files and versions, kept beside them and compared before more come."""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from drafters.training.config import TrainConfig
from drafters.training.state import write_atomically
from specdec import __version__
from specdec.decoder import SpecDecoder
from specdec.errors import CheckpointError, InvalidInputError

PROVENANCE = "provenance.json"


def origin_of(config: TrainConfig, settings: Sequence[str]) -> dict[str, Any]:
    """What decides a stage's files: the named settings and the content of the prompt files."""
    hashes = {Path(file).name: _sha256(Path(file).expanduser()) for file in config.prompts}
    origin: dict[str, Any] = json.loads(json.dumps({"settings": {n: getattr(config, n) for n in settings}, "prompt_files": hashes}))
    return origin


def check_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Refuses to mix files of different origin in one folder.

    Raises:
        InvalidInputError: the folder holds others.
        CheckpointError: its provenance cannot be read.
    """
    path = folder / PROVENANCE
    if not path.exists():
        return
    try:
        then = json.loads(path.read_text())
        settings, files = then["settings"], then["prompt_files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete {folder} to write its files again") from error
    changed = [name for name, value in origin["settings"].items() if settings.get(name) != value]
    if files != origin["prompt_files"]:
        changed.append("prompts")
    if changed:
        raise InvalidInputError(
            f"{folder} holds {folder.name} that were written with another {changed[0].replace('_', '-')}; give the same settings to"
            " go on with them, or another --out"
        )


def write_origin(folder: Path, origin: dict[str, Any], decoder: SpecDecoder) -> None:
    """Leaves the origin in the folder, with what wrote the files, unless one is there."""
    versions = {
        "command": shlex.join(["specdec", *sys.argv[1:]]),
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": decoder.verifier.name,
        "dtype": str(decoder.verifier.dtype).removeprefix("torch."),
        "device": str(decoder.verifier.device),
    }
    if not (folder / PROVENANCE).exists():
        text = json.dumps(origin | versions, indent=2) + "\n"
        write_atomically(folder / PROVENANCE, lambda path: path.write_text(text))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
