"""Checkpoints of drafters, whatever the algorithm: a folder, or a name on the hub."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from drafters.keys import require, section
from drafters.vocabulary import check_marks
from specdec.base.checkpoint.hub import CONFIG, checkpoint_folder
from specdec.base.checkpoint.kinds import checkpoint_config
from specdec.base.checkpoint.tensor_files import TensorFiles
from specdec.base.errors import CheckpointError, InvalidInputError, SpecDecError
from specdec.base.files import parse_json
from specdec.base.registry import WEIGHT_READERS, resolve
from specdec.base.writing import disk_errors, fill_folder
from specdec.model.core import Verifier


def find_folder(path: str | Path) -> Path:
    """The local folder, downloaded only when `path` can be nothing but a name on the hub.

    Raises:
        CheckpointError: nothing there, or something that is no drafter.
    """
    folder = checkpoint_folder(path, what="drafter")
    checkpoint_config(path, folder, what="drafter")
    return folder


@contextmanager
def called(folder: str | Path, path: str | Path, *, kind: str = "drafter") -> Iterator[None]:
    """Makes messages about a folder name the checkpoint as the user did, not in a cache."""
    try:
        yield
    except SpecDecError as error:
        text = str(error).replace(f"target {str(folder)!r}", f"{kind} {str(folder)!r}")
        named = text.replace(str(folder), str(path))
        raise type(error)(named) from error.__cause__


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Puts the drafter's path before the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"drafter {str(path)!r}: {error}") from error.__cause__


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: no such file, or no such content.
    """
    what = f"{file.name} is missing; a checkpoint folder holds it beside the safetensors"
    require(file.is_file(), what)
    try:
        content = parse_json(file.read_bytes(), strict=False)
    except (OSError, ValueError) as error:
        what = f"{file.name} is not valid JSON ({error})"
        raise CheckpointError(f"{what}; download or write it again") from error
    require(isinstance(content, dict), f"{file.name} holds no JSON object")
    return dict(content)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files of weights, see `specdec.base.checkpoint.tensor_files`, on
    the CPU and in the type of the file.

    Raises:
        CheckpointError: missing or damaged files.
    """
    files = TensorFiles(folder)
    tensors = {name: files.read(name) for name in files.names}
    for (
        name,
        tensor,
    ) in (
        tensors.items()
    ):  # a sum is NaN or infinite where an element is; such drafts would all be rejected
        finite = not tensor.is_floating_point() or bool(tensor.float().sum().isfinite())
        require(finite, f"tensor {name} holds NaN or infinite values; download it again")
    return tensors


def plain_tensors(
    folder: Path, raw: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of which quantized weights became plain numbers, in the type of `config.json`.

    Args:
        folder: of the checkpoint; ModelOpt says in a file of its own how weights are quantized.
        raw: the content of its `config.json`.
        tensors: as `read_tensors` returns them.

    Raises:
        CheckpointError: a format that is not read, or parts that are missing.
    """
    stated = section(raw, "quantization_config")
    if not stated and (folder / "hf_quant_config.json").is_file():
        stated = section(read_json(folder / "hf_quant_config.json"), "quantization")
    if not stated:
        return tensors
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    name = "bfloat16" if name == "auto" else name
    dtype = getattr(torch, name, None)
    valid = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(valid, f"dtype is {name!r}, which is no type of weights")
    return dict(resolve(WEIGHT_READERS, "quantized", "reader of weights")(tensors, stated, dtype))


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by z-lab's names, without what is the target's or can be computed.

    Raises:
        CheckpointError: a vocabulary map that is read otherwise than it was written.
    """
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        ours = not name.startswith("verifier_")
        if ours and not name.endswith("rotary_emb.inv_freq"):
            renamed[name] = tensor
    marks = renamed.pop("t2d", None)
    if marks is not None and "d2t" in renamed:
        check_marks(renamed["d2t"], marks)
    return renamed


def check_tensors(
    tensors: Mapping[str, Tensor],
    needed: Mapping[str, Sequence[int]],
    optional: Mapping[str, Sequence[int]],
    *,
    kind: str,
) -> None:
    """Complete, of the right shapes, and nothing unknown.

    Args:
        tensors: what was found.
        needed, optional: name and shape of what must and what may be there.
        kind: of drafter, for messages.

    Raises:
        CheckpointError: the first that is not so.
    """
    missing = [name for name in needed if name not in tensors]
    others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
    require(
        not missing,
        f"tensor {missing[0] if missing else ''}{others} missing; config.json asks for"
        f" {len(needed)} tensors",
    )
    shapes = {**optional, **needed}
    unknown = [name for name in tensors if name not in shapes]
    article = "an" if kind[0] in "AEIOU" else "a"
    require(
        not unknown,
        f"tensor {unknown[0] if unknown else ''} is no part of {article} {kind} drafter"
        f" ({len(unknown)} such tensors)",
    )
    for name, tensor in tensors.items():
        found, expected = list(tensor.shape), list(shapes[name])
        fits = found == expected
        require(fits, f"tensor {name} has shape {found}, config.json asks for {expected}")
        valid = name == "d2t" or (tensor.is_floating_point() and tensor.element_size() > 1)
        what = f"tensor {name} is {tensor.dtype}; config.json has no quantization_config for it"
        require(valid, what)


def check_same_target(own: Verifier, verifier: Verifier) -> None:
    """Refuses to bind a drafter that was made ready for a target, its own, to another one.

    Raises:
        InvalidInputError: it is another.
    """
    if verifier is not own:
        raise InvalidInputError(
            f"this drafter was made ready for {own.name!r} as loaded earlier, not for this"
            f" {verifier.name!r}; load it again beside the target it serves"
        )


def check_target(
    verifier: Verifier,
    *,
    taps: Sequence[int],
    tap_width: int,
    hidden_size: int | None,
    vocab_size: int,
    num_layers: int | None,
    made_for: str | None,
) -> None:
    """Refuses a drafter for a target of another shape; acceptance would drop without an error.

    Args:
        verifier: the target.
        taps: tapped layers, 0-based.
        tap_width: width of one tap.
        hidden_size: width of a drafter that borrows the target's embeddings or head, or None.
        vocab_size: of the target it was made for.
        num_layers: of the target it was made for, when stated.
        made_for: name of that target, when stated.

    Raises:
        CheckpointError: everything that does not fit.
    """
    problems = []
    if max(taps) >= verifier.num_layers:
        problems.append(
            f"it taps layer {max(taps)} of a target whose last layer is {verifier.num_layers - 1}"
        )
    if num_layers not in (None, verifier.num_layers):
        problems.append(f"it was made for {num_layers} target layers, not {verifier.num_layers}")
    if tap_width != verifier.hidden_size:
        problems.append(
            f"its fc.weight takes {len(taps) * tap_width} features, not {len(taps)} taps of"
            f" {verifier.hidden_size}"
        )
    if hidden_size not in (None, verifier.hidden_size):
        problems.append(
            f"its hidden size {hidden_size} cannot share embeddings of width {verifier.hidden_size}"
        )
    if vocab_size != verifier.vocab_size:
        what = f"its vocabulary has {vocab_size} tokens, the target's {verifier.vocab_size}"
        problems.append(what)
    if problems:
        origin = f" (made for {made_for})" if made_for else ""
        what = f"the drafter{origin} does not fit {verifier.name}: {'; '.join(problems)}"
        raise CheckpointError(f"{what}; choose one made for it")


def write_folder(
    path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], *, over: bool = False
) -> None:
    """Writes `model.safetensors` and `config.json` to a new or empty folder, or `over` another.

    Raises:
        CheckpointError: a taken path.
        CapacityError, InvalidInputError: see `specdec.base.writing.fill_folder`.
    """
    with disk_errors(path):
        free = not os.path.lexists(path) or (path.is_dir() and (over or not any(path.iterdir())))
    require(free, f"{str(path)!r} exists already; choose a new folder")
    content = save(tensors, metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    files = {
        "model.safetensors": partial(Path.write_bytes, data=content),
        CONFIG: partial(Path.write_text, data=text),
    }
    fill_folder(path, files)
