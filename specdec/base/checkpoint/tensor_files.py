"""The weights of a local checkpoint: safetensors or pickles, read tensor by tensor."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.base.errors import CheckpointError, one_line
from specdec.base.files import check_file, parse_json

_KINDS = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
"""Endings of files of weights, the preferred first, and the name of a file alone."""

INDEXES = tuple(f"{single}.index.json" for single in _KINDS.values())
"""Names of files that say which file has which tensor."""

_PICKLES = (".bin", ".pt", ".pth")

_OTHERS = re.compile(
    r"(adapter_|consolidated|training_args|optimizer|scheduler|random_states|rng_state)"
)
"""How files begin that have such an ending and are not, or not only here, the model's weights."""

_PART = re.compile(r"-(\d+)-of-(\d+)(?!\d)")
"""In the name of a shard: its number, and how many there are."""


def weight_files(folder: Path) -> list[str]:
    """Names of the files of a checkpoint's weights, an index first; empty if there are none.

    Safetensors come before pickles, an index before a single file, a whole form before all.
    """
    forms = list(_forms(folder))
    whole = (files for files in forms if all(os.path.isfile(folder / file) for file in files))
    return next(whole, forms[0] if forms else [])


def _forms(folder: Path) -> Iterator[list[str]]:
    for ending, single in _KINDS.items():
        index, usual = f"{single}.index.json", False
        if (folder / index).is_file():
            usual = True
            yield [index, *sorted(set(_read_index(folder / index).values()))]
        if (folder / single).is_file():
            usual = True
            yield [single]
        found = [path.name for path in folder.glob(f"*.{ending}") if not _OTHERS.match(path.name)]
        if found and not usual:  # which may be a part of what an index names
            yield sorted(found)


def usually_named(folder: Path) -> bool:
    """Whether transformers would find the weights as well."""
    first = next(iter(weight_files(folder)), "")
    return first.removesuffix(".index.json") in _KINDS.values()


class TensorFiles:
    """Tensors by their names in the files. Numbers stay on disk until they are asked for.

    Attributes:
        names: of all tensors, file by file.

    Raises:
        CheckpointError: no such files, one is damaged, or one that others tell of is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        files = weight_files(folder)
        if not files:
            what = "there are no weights: neither safetensors files nor pytorch_model.bin"
            raise CheckpointError(f"{what}; fetch the whole checkpoint")
        if files[0].endswith(".json"):
            self._files = _read_index(folder / files[0])
            self._check_there(files[1:], files[0])
        else:
            self._check_there(_announced(files), "a file's name")
            self._files = self._listed(files)
        self.names = sorted(self._files, key=lambda name: (self._files[name], name))

    def read(self, name: str, axis: int = 0, piece: range | None = None) -> Tensor:
        """One tensor, on the CPU, in the type of the file.

        Args:
            axis, piece: what is wanted of it, of which nothing else is read; None for all.

        Raises:
            CheckpointError: the file that should hold it does not, or is damaged.
        """
        if piece is None:
            return self._asked(name, lambda handle: handle.get_tensor(name))
        part = (slice(None),) * axis + (slice(piece.start, piece.stop),)
        return self._asked(name, lambda handle: handle.get_slice(name)[part])

    def shape(self, name: str) -> list[int]:
        """Shape of one tensor; errors are those of `read`."""
        return self._asked(name, lambda handle: handle.get_slice(name).get_shape())

    def _check_there(self, files: Iterable[str], teller: str) -> None:
        missing = sorted({file for file in files if not os.path.isfile(self._folder / file)})
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the files that {teller} tells of are missing, the first being"
                f" {missing[0][:100]!r}; fetch the whole checkpoint again"
            )

    def _listed(self, files: Iterable[str]) -> dict[str, str]:
        """The file of each tensor, where no index says it."""
        found: dict[str, str] = {}
        for file in files:
            for name in self._handle(file).keys():  # noqa: SIM118 - a handle is no mapping
                if name in found:
                    what = f"{name!r} is in {found[name]!r} and in {file!r}"
                    raise CheckpointError(f"{what}; keep one form of the weights")
                found[name] = file
        return found

    def _asked(self, name: str, ask: Callable[[Any], Any]) -> Any:
        file = self._files[name]
        try:
            return ask(self._handle(file))
        except (SafetensorError, KeyError) as error:
            what = f"{file!r} does not hold {name!r} ({error})"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = _opened(self._folder / file)
        return self._open[file]


def _opened(path: Path) -> Any:
    if path.suffix in _PICKLES:
        return _Pickle(path)
    check_file(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        what = f"{path.name!r} is damaged ({one_line(error)})"
        raise CheckpointError(f"{what}; fetch the whole checkpoint again") from error


class _Pickle:
    """A pickled dictionary of tensors behind the methods of a safetensors file in use here."""

    def __init__(self, path: Path) -> None:
        content = read_pickle(path)
        if not isinstance(content, dict) or not all(
            isinstance(value, Tensor) for value in content.values()
        ):
            what = f"{path.name!r} does not hold tensors by name"
            raise CheckpointError(f"{what}; take the checkpoint's safetensors files")
        self._tensors = {str(name): value.detach() for name, value in content.items()}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self._tensors[name])


class _Slice:
    """What `get_slice` of a safetensors file gives."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, place: Any) -> Tensor:
        return self._tensor[place].contiguous()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def read_pickle(path: Path) -> Any:
    """What torch has pickled, without running its code; numbers stay on disk where they can.

    Raises:
        CheckpointError: the file is none, damaged, or holds more than tensors in containers.
    """
    check_file(path)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            # written by torch before 1.6
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file ends in any kind of error
        found = re.search(r"GLOBAL (\S+)", str(error))
        foreign = found if isinstance(error, UnpicklingError) else None
        if foreign:
            what = f"{path.name!r} holds {foreign[1]} beside tensors, code that is never run"
            raise CheckpointError(f"{what}; take the checkpoint's safetensors files") from error
        what = f"{path.name!r} is damaged ({one_line(error)})"
        raise CheckpointError(f"{what}; fetch the whole checkpoint again") from error


def _announced(files: Iterable[str]) -> list[str]:
    """Shards that are missing by the names of others, as of "model-00002-of-00002.safetensors"."""
    shards: dict[tuple[str, str, str], list[str]] = {}
    for file in files:
        if part := _PART.search(file):
            around = file[: part.start()], part[2], file[part.end() :]
            shards.setdefault(around, []).append(part[1])
    lost = []
    for (before, count, after), numbers in shards.items():
        if len(numbers) < int(count) < 10**5:
            whole = (f"{number:0{len(numbers[0])}}" for number in range(1, int(count) + 1))
            lost += [f"{before}-{n}-of-{count}{after}" for n in whole if n not in numbers]
    return lost


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor.

    Raises:
        CheckpointError: it is no index, or names something else than files beside it.
    """
    try:
        content = parse_json(path.read_bytes(), strict=False)
    except (OSError, ValueError) as error:
        what = f"{path.name!r} is not valid JSON ({error})"
        raise CheckpointError(f"{what}; fetch it again") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(map(_is_beside, files.values())):
        what = f"{path.name!r} does not name a file beside it for each tensor"
        raise CheckpointError(f"{what}; fetch it again")
    return files


def _is_beside(file: object) -> bool:
    """Whether an entry of an index is the name of a file in the index's own folder."""
    return isinstance(file, str) and file not in ("", ".", "..") and not set("/\\\0") & set(file)
