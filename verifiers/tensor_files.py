"""The safetensors files of a local checkpoint, from which tensors are read one by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import CheckpointError, one_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """Tensors by the names that they have in the files. Numbers stay on disk until they are asked for.

    Args:
        folder: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names.

    Attributes:
        names: of all tensors, file by file.

    Raises:
        CheckpointError: no such files, one that the index names is missing, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        index = folder / INDEX
        if index.is_file():
            self._files = _read_index(index)
        elif (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise CheckpointError(f"{str(folder)!r} has neither {SINGLE} nor {INDEX}; give a folder with safetensors files")
        missing = sorted({file for file in self._files.values() if not (folder / file).is_file()})
        if missing:
            raise CheckpointError(
                f"{str(folder)!r} lacks {len(missing)} of the files that {INDEX} names, the first being {missing[0]!r};"
                " fetch the whole checkpoint again"
            )
        self.names = sorted(self._files, key=lambda name: (self._files[name], name))

    def read(self, name: str, axis: int = 0, piece: range | None = None) -> Tensor:
        """One tensor, on the CPU, in the type of the file.

        Args:
            name: of it.
            axis, piece: what is wanted of it, of which nothing else is read; None for all.

        Raises:
            CheckpointError: the file that should hold it does not, or is damaged.
        """
        if piece is None:
            return self._asked(name, lambda handle: handle.get_tensor(name))
        return self._asked(name, lambda handle: handle.get_slice(name)[(slice(None),) * axis + (slice(piece.start, piece.stop),)])

    def shape(self, name: str) -> list[int]:
        """Of one tensor; errors are those of `read`."""
        return self._asked(name, lambda handle: handle.get_slice(name).get_shape())

    def _asked(self, name: str, ask: Callable[[Any], Any]) -> Any:
        file = self._files[name]
        try:
            return ask(self._handle(file))
        except SafetensorError as error:
            raise CheckpointError(f"{file!r} does not hold {name!r} ({error}); fetch the whole checkpoint again") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file!r} is damaged ({one_line(error)}); fetch the whole checkpoint again") from error
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        assert all(isinstance(file, str) and "/" not in file and "\\" not in file for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise CheckpointError(f"{str(path)!r} does not name a file for each tensor; fetch it again") from error
    return dict(files)
