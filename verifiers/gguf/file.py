"""The bytes of GGUF files: metadata, and tensors where they lie in memory maps.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
Package `gguf` reads it too, in twenty seconds where a vocabulary has 150,000 tokens.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.base.checkpoint.gguf_names import whole_model
from specdec.base.errors import CheckpointError
from specdec.base.files import check_file

Entries = dict[str, Any]
"""Entries of a config."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)

NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Codes of `struct` by the number of a type of values."""

STRING, ARRAY = 8, 9

LENGTH = struct.Struct("<Q")
"""What stands before a text."""

MAX_DIMENSIONS = 4

OTHER_KINDS = {
    "adapter": "a LoRA adapter and no model; merge it into the model that it changes",
    "imatrix": "an importance matrix and no model",
    "mmproj": "the tower of a multimodal model, which is not read; give the file of the text model",
}
"""Values of general.type of what is no model."""


class Entry(NamedTuple):
    """Where a tensor lies.

    Attributes:
        kind: number of its type in `gguf.GGMLQuantizationType`.
        shape: in the order of torch.
        start: of its bytes in the file.
        size: of them.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int
    size: int


class Blocks(NamedTuple):
    """A tensor as it is stored.

    Attributes:
        kind: see `Entry`.
        blocks: uint8 [..., out, bytes of a row], a view of the file.
        shape: of its numbers [..., out, in].
    """

    kind: int
    blocks: np.ndarray[Any, Any]
    shape: tuple[int, ...]


class GgufFiles:
    """A model in one GGUF file, or in several.

    Args:
        path: of the file, or of any part.

    Attributes:
        metadata: of the first file; long lists of texts are there.
        entries: of all tensors, by name.

    Raises:
        CheckpointError: a part is missing, a file is damaged, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("gguf") is None:
            way_out = "run: python -m pip install gguf"
            what = f"{path.name!r} needs package gguf, which is not installed"
            raise CheckpointError(f"{what}; {way_out}")
        files = [_File(part) for part in whole_model(path)]
        self.path, self.metadata = path, files[0].metadata
        self._check_kind(files)
        self._files: dict[str, _File] = {}
        for file in files:
            for name in file.entries:
                if name in self._files:
                    raise _damaged(file.path, f"it has a second {name!r}")
                self._files[name] = file
        of_files = ((name, file.entries[name]) for name, file in self._files.items())
        self.entries: Mapping[str, Entry] = dict(of_files)

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the family."""
        return str(self.metadata["general.architecture"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path.name!r} has no tensor {name!r}; fetch it again")
        return self.entries[name].shape

    def stored(self, name: str) -> Blocks:
        """A tensor as it lies in the file; errors are those of `shape`."""
        shape, entry = self.shape(name), self.entries[name]
        return Blocks(entry.kind, self._files[name].blocks(entry), shape)

    def _check_kind(self, files: list["_File"]) -> None:
        name, kind = self.path.name, self.metadata.get("general.type", "model")
        architecture = self.metadata.get("general.architecture")
        if architecture == "clip" or "clip.projector_type" in self.metadata:
            kind = "mmproj"
        if kind in OTHER_KINDS:
            raise CheckpointError(f"{name!r} is {OTHER_KINDS[kind]}")
        if not isinstance(architecture, str):
            raise _damaged(self.path, "it names no general.architecture")
        if not any(file.entries for file in files):
            way_out = "give the file of the model"
            raise CheckpointError(f"{name!r} holds a vocabulary alone, without weights; {way_out}")
        count = self.metadata.get("split.count", 1)
        if isinstance(count, int) and count > len(files):
            what = f"{name!r} is one of {count} parts and was renamed"
            raise CheckpointError(f"{what}; call them NAME-00001-of-{count:05}.gguf and so on")


class _File:
    """One file; errors are those of `GgufFiles`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_file(path)
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # a ValueError: it is empty
            raise CheckpointError(f"cannot read {path.name!r} ({error}); fetch it again") from error
        begin = self._bytes[:8]
        if begin[:4] != MAGIC:
            begins = f"it begins with {begin[:4]!r}"
            raise CheckpointError(f"{path.name!r} is no GGUF file: {begins}; fetch it again")
        self._check_version(begin)
        self._place = 8
        try:
            num_tensors, num_entries = self._numbers("QQ")
            pairs = (self._pair() for _ in range(num_entries))
            self.metadata: dict[str, Any] = dict(pairs)
            self.entries = {entry.name: entry for entry in self._entries(num_tensors)}
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise _damaged(path, "its header ends or breaks off early") from error

    def blocks(self, entry: Entry) -> "np.ndarray[Any, Any]":
        """uint8 [..., out, bytes of a row]."""
        flat = np.frombuffer(self._bytes, np.uint8, entry.size, entry.start)
        return flat.reshape(*entry.shape[:-1], -1)

    def _check_version(self, begin: bytes) -> None:
        (version,) = struct.unpack_from("<I", begin.ljust(8, b"\0"), 4)
        if version & 0xFFFF == 0 and version:
            other = "big-endian, for another kind of processor; take the little-endian file"
            raise CheckpointError(f"{self.path.name!r} is {other}")
        if version not in VERSIONS:
            what = f"{self.path.name!r} is of GGUF version {version}, and versions 2 and 3 are read"
            raise CheckpointError(f"{what}; take a file that llama.cpp wrote since October 2023")

    def _numbers(self, codes: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{codes}", self._bytes, self._place)
        self._place += struct.calcsize(f"<{codes}")
        return found

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        found, place, data, length_at = list[str](), self._place, self._bytes, LENGTH.unpack_from
        if count > len(data):
            raise struct.error("a list beyond the end")
        for _ in range(count):
            start = place + LENGTH.size
            place = start + length_at(data, place)[0]
            # Bytes that are no text stand in a few vocabularies.
            found.append(data[start:place].decode("utf-8", "replace"))
        if place > len(data):
            raise struct.error("a text beyond the end")
        self._place = place
        return found

    def _pair(self) -> tuple[str, Any]:
        key = self._text()
        (kind,) = self._numbers("I")
        return key, self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._numbers(self._code(kind))[0]
        kind, count = self._numbers("IQ")
        if kind == STRING:
            return self._texts(count)
        return list(self._numbers(f"{count}{self._code(kind)}"))

    def _code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise _damaged(self.path, f"it has a value of type {kind}")
        return NUMBERS[kind]

    def _entries(self, count: int) -> Iterator[Entry]:
        found = [self._entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise _damaged(self.path, f"its alignment is {alignment}")
        start = -(-self._place // alignment) * alignment
        for name, kind, shape, offset in found:
            entry = Entry(name, kind, shape, start + offset, self._size(name, kind, shape))
            if entry.start + entry.size > len(self._bytes):
                raise CheckpointError(
                    f"{self.path.name!r} is cut off: it has {len(self._bytes):,} bytes, and"
                    f" {name!r} ends at {entry.start + entry.size:,}; fetch it again"
                )
            yield entry

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        (rank,) = self._numbers("I")
        if not 0 < rank <= MAX_DIMENSIONS:
            raise _damaged(self.path, f"{name[:60]!r} has {rank} dimensions")
        shape = self._numbers(f"{rank}Q")
        kind, offset = self._numbers("IQ")
        return name, kind, tuple(reversed(shape)), offset

    def _size(self, name: str, kind: int, shape: tuple[int, ...]) -> int:
        numbers, size = block_of(kind, name, self.path)
        if prod(shape) == 0 or shape[-1] % numbers:
            raise _damaged(self.path, f"{name!r} has shape {list(shape)} in blocks of {numbers}")
        return prod(shape) // numbers * size


def block_of(kind: int, name: str, path: Path) -> tuple[int, int]:
    """Numbers and bytes of a block of a type, which a tensor of the file has; see `Entry.kind`.

    Raises:
        CheckpointError: package gguf does not know the type, or how to read it.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = kind in set(GGMLQuantizationType)
    if not known or not _is_readable(kind):
        called = GGMLQuantizationType(kind).name if known else f"number {kind}"
        what = f"{name!r} of {path.name!r} is of type {called}, which is not read"
        way_out = "take a file with another quantization, such as Q4_K_M or Q8_0"
        raise CheckpointError(f"{what}; {way_out}")
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return numbers, size


@cache
def _is_readable(kind: int) -> bool:
    """Whether package gguf makes plain numbers of a type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    try:
        block = np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8)
        quants.dequantize(block, GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name!r} is damaged ({why}); fetch it again")


class Facts:
    """What the metadata of a model says, read by the keys of its architecture."""

    def __init__(self, files: GgufFiles) -> None:
        self.files = files

    def __call__(self, key: str, default: Any = None) -> Any:
        """A value of the architecture, such as "block_count"; a list of equal ones is one.

        Numbers in single precision are those that a user would write: 1e-06.
        """
        value = self.files.metadata.get(f"{self.files.architecture}.{key}", default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        single = isinstance(value, float) and float(np.float32(value)) == value
        return float(str(np.float32(value))) if single else value

    @property
    def name(self) -> str:
        """Name of the file, for messages."""
        return self.files.path.name

    @property
    def layers(self) -> int:
        """How many there are, without those that draft."""
        return int(self.need("block_count") - self("nextn_predict_layers", 0))

    def each(self, key: str) -> Any:
        """A value as it stands there, a list for all layers if it is one."""
        return self.files.metadata.get(f"{self.files.architecture}.{key}")

    def need(self, key: str) -> Any:
        """The value of a key that has to be there.

        Raises:
            CheckpointError: it is not.
        """
        if (value := self(key)) is None:
            where = f"{self.files.architecture}.{key}"
            raise CheckpointError(f"{self.files.path.name!r} does not say {where}; fetch it again")
        return value

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name, in any layer if it is one's."""
        return name in self.names or f"blk.{name}" in self.names

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors, and of those of layers without the layer's number."""
        bare = (re.sub(r"^blk\.\d+\.", "blk.", name) for name in self.files.entries)
        return frozenset([*self.files.entries, *bare])

    def layers_with(self, name: str) -> list[int]:
        """Layers that have a tensor of that name, such as "ffn_gate_exps.weight"."""
        return [n for n in range(self.layers) if f"blk.{n}.{name}" in self.files.entries]
