"""Checkpoints that are something else than what was asked for: adapters, MLX, variants."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.base.checkpoint.gguf_names import gguf_file
from specdec.base.checkpoint.hub import CONFIG, checkpoint_file, files_of, json_file, json_object
from specdec.base.checkpoint.tensor_files import weight_files
from specdec.base.errors import CheckpointError, UnsupportedModelError
from specdec.base.files import user_path
from specdec.base.registry import PARTS, resolve

logger = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"


def checkpoint_config(name: str | Path, folder: Path | None = None, *, what: str) -> dict[str, Any]:
    """The entries of a checkpoint's config.json.

    Args:
        folder: where its files lie; None fetches this one alone.

    Raises:
        CheckpointError: none, or of a checkpoint that cannot be read; the message says what it is.
    """
    path = checkpoint_file(str(name), CONFIG, what=what) if folder is None else folder / CONFIG
    if path is None or not path.is_file():
        raise missing_config(name, what)
    entries = json_object(path, str(name), what=what)
    check_entries(entries, name, what)
    return entries


def check_entries(entries: Mapping[str, Any], name: str | Path, what: str) -> None:
    """Refuses the config.json of what cannot be read, or is no target.

    Raises:
        CheckpointError: MLX's, whose quantized weights are in an order of their own.
        UnsupportedModelError: a target that can only be a drafter; the message names its target.
    """
    stated = entries.get("quantization")
    if isinstance(stated, Mapping) and {"bits", "group_size"} <= stated.keys():
        raise CheckpointError(
            f"{what} {str(name)!r} is quantized by MLX ({CONFIG} has quantization), which is not"
            " read; take the checkpoint that it was made of"
        )

    drafter = resolve(PARTS, "drafter", "part")(entries) if what == "target" else None
    if drafter is not None:
        algorithm, target = drafter
        beside = f"its target, {target}" if target else "its target, which its card names"
        message = f"{str(name)!r} is no target but a drafter ({algorithm})"
        raise UnsupportedModelError(f"{message}; give it as --drafter, beside {beside}")


def missing_config(name: str | Path, what: str) -> CheckpointError:
    """The error of a checkpoint without config.json: what it is instead, as its files tell."""
    files = files_of(name)
    variants = sorted({file.rpartition("/")[0] for file in files if file.endswith(f"/{CONFIG}")})
    if ADAPTER in files:
        return _lone_adapter(name, what)
    if variants:
        return CheckpointError(
            f"{what} {str(name)!r} has no {CONFIG} itself, but its folders {', '.join(variants)}"
            f" have; name one, such as {_inside(str(name), variants[0])!r}"
        )
    message = f"{what} {str(name)!r} has no {CONFIG}"
    return CheckpointError(f"{message}; give a checkpoint in the layout of transformers")


def _inside(name: str, folder: str) -> str:
    """How a checkpoint in a folder of another one is called."""
    if user_path(name).is_dir():
        return f"{name}/{folder}"
    repo, at, revision = name.partition("@")
    return f"{repo}:{folder}{at}{revision}"


def check_adapter(name: str | Path, folder: Path | None = None, *, what: str) -> None:
    """Says that an adapter beside a checkpoint's weights is not applied.

    Args:
        name, folder, what: see `checkpoint_config`; without a folder weights are not looked for.

    Raises:
        CheckpointError: there are no weights but the adapter's.
    """
    path = checkpoint_file(str(name), ADAPTER, what=what) if folder is None else folder / ADAPTER
    if path is None or not path.is_file():
        return
    if folder is not None and not weight_files(folder) and gguf_file(folder) is None:
        raise _lone_adapter(name, what)
    text = "%r has an adapter (%s), which is not applied"
    logger.warning(f"{text}; merge it into the weights if it belongs to them", str(name), ADAPTER)


def _lone_adapter(name: str | Path, what: str) -> CheckpointError:
    stated = json_file(str(name), ADAPTER, what=what) or {}
    base = stated.get("base_model_name_or_path") or "the model that it changes"
    message = f"{what} {str(name)!r} is an adapter (LoRA or the like) and no model"
    way_out = f"merge it into {base} (merge_and_unload of peft), and give the result"
    return CheckpointError(f"{message}; {way_out}")
