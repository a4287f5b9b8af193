"""Where a stage's files come from: kept beside them, compared before more come."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters.training.config import TrainConfig
from drafters.training.data.rows import fingerprint
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.base.files import parse_json, user_path
from specdec.base.writing import write_text

PROVENANCE = "provenance.json"
_TARGET = r"verifier_name=('[^']*'|\"[^\"]*\"), "  # in a drafter's config, as it was spelled


def origin_of(config: TrainConfig, settings: Sequence[str]) -> dict[str, Any]:
    """What decides a stage's files: the named settings and the content of the prompt files."""
    hashes = {
        Path(file).name: fingerprint(file) for file in (*config.prompts, *config.answers_from)
    }
    found = {"settings": {n: getattr(config, n) for n in settings}, "prompt_files": hashes}
    origin: dict[str, Any] = json.loads(json.dumps(found))
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
        then = parse_json(path.read_bytes(), strict=False)
        settings, files = dict(then["settings"]), then["prompt_files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is damaged ({error})"
        raise CheckpointError(f"{what}; delete {folder} to write its files again") from error
    written = origin["settings"].items()
    changed = [name for name, value in written if not alike(name, value, settings.get(name))]
    if files != origin["prompt_files"]:
        changed.append("prompts")
    if changed:
        raise InvalidInputError(
            f"{folder} holds {folder.name} that were written with another"
            f" {changed[0].replace('_', '-')}; give the same settings to"
            " go on with them, or another --out"
        )


def write_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Leaves the origin in the folder, unless one is there."""
    if not (folder / PROVENANCE).exists():
        write_text(folder / PROVENANCE, json.dumps(origin, indent=2) + "\n")


def alike(name: str, one: Any, other: Any) -> bool:
    """Whether two runs have the same setting, however the target's folder is spelled."""
    if name == "model" and isinstance(other, str):
        return user_path(one).resolve() == user_path(other).resolve()
    if name == "drafter" and isinstance(other, str):
        return re.sub(_TARGET, "", one) == re.sub(_TARGET, "", other)
    return bool(one == other)
