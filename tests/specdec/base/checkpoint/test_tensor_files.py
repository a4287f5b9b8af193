"""Files of weights, in every form that checkpoints are published in, for targets and drafters
alike.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.base.checkpoint.tensor_files import (
    TensorFiles,
    read_pickle,
    usually_named,
    weight_files,
)
from specdec.base.errors import CheckpointError
from tests.helpers.nodes import pipe

TENSORS = {name: torch.rand(4, 3) for name in ("a.weight", "b.weight", "c.weight")}


def pickled(tensors: dict[str, Tensor], file: Path) -> None:
    torch.save(tensors, file)


def written(folder: Path, names: tuple[str, ...], index: str | None = None) -> None:
    """The tensors, in files of these names, each in the format of its ending."""
    parts = [dict(list(TENSORS.items())[place :: len(names)]) for place in range(len(names))]
    for name, part in zip(names, parts, strict=True):
        (save_file if name.endswith(".safetensors") else pickled)(part, folder / name)
    if index is not None:
        weight_map = {
            tensor: name for name, part in zip(names, parts, strict=True) for tensor in part
        }
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


INDEX, PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
FORMS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "one file": (("model.safetensors",), None),
    "shards": (("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), INDEX),
    "one shard": (("model-00001-of-00001.safetensors",), None),
    "shards without an index": (
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        None,
    ),
    "shards from 0": (("model-0-of-2.safetensors", "model-1-of-2.safetensors"), None),
    "odd shards": (
        (
            "model.safetensors-00001-of-00002.safetensors",
            "model.safetensors-00002-of-00002.safetensors",
        ),
        INDEX,
    ),
    "odd names": (("drafter.safetensors", "head.safetensors"), None),
    "pickle": (("pytorch_model.bin",), None),
    "pickled shards": (
        ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
        PICKLE_INDEX,
    ),
    "pickled shards without an index": (
        ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
        None,
    ),
    "odd pickle": (("model.bin",), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    """Each reads as the same tensors, whole and in pieces, whatever other files lie there."""
    written(tmp_path, *FORMS[form])
    for other in (
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "training_args.bin",
        "optimizer.bin",
    ):
        (tmp_path / other).write_bytes(b"no weights")
    files = TensorFiles(tmp_path)
    assert sorted(files.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(files.read(name), tensor) and files.shape(name) == [4, 3]
        assert torch.equal(files.read(name, 1, range(1, 3)), tensor[:, 1:3])
    assert usually_named(tmp_path) == (
        form in ("one file", "shards", "odd shards", "pickle", "pickled shards")
    )


def test_what_comes_first(tmp_path: Path) -> None:
    """Safetensors before pickles and an index before a file alone, unless its files are gone."""
    assert weight_files(tmp_path) == []
    written(tmp_path, ("pytorch_model.bin",))
    assert weight_files(tmp_path) == ["pytorch_model.bin"]
    written(tmp_path, ("model-1.safetensors", "model-2.safetensors"), INDEX)
    assert weight_files(tmp_path) == [INDEX, "model-1.safetensors", "model-2.safetensors"]
    written(tmp_path, ("model.safetensors",))
    assert weight_files(tmp_path)[0] == INDEX
    (tmp_path / "model-1.safetensors").unlink()
    assert weight_files(tmp_path) == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(tmp_path) == ["pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    assert weight_files(tmp_path)[0] == INDEX  # whose lost file is told


def test_a_pickle_of_an_old_torch(tmp_path: Path) -> None:
    """In the format that cannot stay on disk."""
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TensorFiles(tmp_path).read("b.weight"), TENSORS["b.weight"])


def test_a_transposed_tensor_and_a_parameter(tmp_path: Path) -> None:
    torch.save(
        {"w": TENSORS["a.weight"].T, "p": torch.nn.Parameter(TENSORS["b.weight"])},
        tmp_path / "pytorch_model.bin",
    )
    files = TensorFiles(tmp_path)
    assert files.read("w").is_contiguous() and torch.equal(files.read("w"), TENSORS["a.weight"].T)
    assert not files.read("p").requires_grad


class _Code:
    """What runs a command where a pickle is read without care."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
def test_code_in_a_pickle_is_not_run(new: bool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save(
        {"a": _Code(ran)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new
    )
    for read in (
        lambda: TensorFiles(tmp_path),
        lambda: read_pickle(tmp_path / "pytorch_model.bin"),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"'pytorch_model.bin' holds \w+\.system beside tensors, code that is never run",
        ) as caught:
            read()
        assert "\n" not in str(caught.value) and not ran.exists()


def without(name: str) -> Callable[[Path], None]:
    """Shards with an index of which one is lost."""

    def damage(folder: Path) -> None:
        written(folder, *FORMS["shards"])
        (folder / name).unlink()

    return damage


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    with pipe(tmp_path / "a.safetensors"), pytest.raises(CheckpointError, match="is no file"):
        TensorFiles(tmp_path)


def twice(folder: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        written(folder, (name,))


def map_to(file: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a.weight": file}})
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (
        lambda p: None,
        "there are no weights: neither safetensors files nor pytorch_model.bin",
    ),
    "lost shard": (
        without("model-00002-of-00002.safetensors"),
        r"1 of the files that model\S+json tells of are missing",
    ),
    "lost shard without an index": (
        lambda p: written(p, ("model-00002-of-00003.safetensors",)),
        "2 of the files that a file's name tells of are missing, the first being"
        " 'model-00001-of-00003.safetensors'",
    ),
    "two forms": (
        twice,
        "'a.weight' is in 'x.safetensors' and in 'y.safetensors'; keep one form of the weights",
    ),
    "cut": (
        lambda p: (p / "model.safetensors").write_bytes(b"\x10"),
        "'model.safetensors' is damaged",
    ),
    "cut pickle": (
        lambda p: (p / "pytorch_model.bin").write_bytes(b"PK\x03\x04"),
        "'pytorch_model.bin' is damaged",
    ),
    "no tensors": (
        lambda p: torch.save({"state": {"a": 1}}, p / "pytorch_model.bin"),
        "does not hold tensors by name",
    ),
    "a list": (
        lambda p: torch.save([torch.ones(1)], p / "pytorch_model.bin"),
        "does not hold tensors by name",
    ),
    "out": (map_to("../model.safetensors"), "does not name a file beside it for each tensor"),
    "absolute": (map_to("/model.safetensors"), "does not name a file beside it for each tensor"),
    "up": (map_to(".."), "does not name a file beside it for each tensor"),
    "number": (map_to(5), "does not name a file beside it for each tensor"),
    "NUL": (map_to("a\0b"), "does not name a file beside it for each tensor"),
    "empty index": (
        lambda p: (p / INDEX).write_text("{}"),
        "does not name a file beside it for each tensor",
    ),
    "a folder": (
        lambda p: (p / "model.safetensors").mkdir(),
        "'model.safetensors' is no file; fetch the whole",
    ),
    "a folder for a pickle": (
        lambda p: (p / "pytorch_model.bin").mkdir(),
        "'pytorch_model.bin' is no file",
    ),
    "a link to nothing": (
        lambda p: (p / "model.safetensors").symlink_to("nowhere"),
        "'model.safetensors' is no file",
    ),
    "no index": (lambda p: (p / INDEX).write_text("["), "is not valid JSON"),
    "deep index": (lambda p: (p / INDEX).write_text("[" * 100_000), "is not valid JSON"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, tmp_path: Path) -> None:
    """Each is one line, and nothing outside the folder is read."""
    folder = tmp_path / "inside"
    folder.mkdir()
    written(tmp_path, ("model.safetensors",))
    damage, said = DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as caught:
        TensorFiles(folder)
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
