"""GGUF files: their bytes, their types, and what is said of those that are no models."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specdec.base.checkpoint.gguf_names import gguf_file
from specdec.base.errors import CheckpointError, SpecDecError, UnsupportedModelError
from tests.helpers.gguf_files import add, characters, write_gguf
from tests.helpers.nodes import pipe
from tests.helpers.tiny_models import plain_model
from verifiers.config.gguf import config_of
from verifiers.gguf.file import Facts, GgufFiles
from verifiers.needs import read_needs
from verifiers.weights.gguf import numbers
from verifiers.weights.gguf_folder import unpacked

QUANTIZED = ("Q", "IQ", "TQ", "MX", "NV")
TYPES = [one.name for one in gguf.GGMLQuantizationType if one.name.startswith(QUANTIZED)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound file."""
    write_gguf(tmp_path / "m.gguf", plain_model("llama"), "llama")
    return tmp_path / "m.gguf"


def lone(path: Path, raw: np.ndarray[Any, Any], kind: str) -> GgufFiles:
    """A file with one tensor, of random bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFiles(path)


@pytest.mark.parametrize("kind", [*TYPES, "F16", "BF16", "F32"])
def test_numbers_of_a_type(kind: str, tmp_path: Path) -> None:
    """As package gguf has them; a type that it cannot read is refused by name."""
    own = gguf.GGMLQuantizationType[kind]
    count, size = gguf.GGML_QUANT_SIZES[own]
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (3, 1024 // count * size), dtype=torch.uint8)
    try:
        whole = torch.from_numpy(np.array(gguf.quants.dequantize(raw.numpy(), own)))
    except NotImplementedError:
        with pytest.raises(
            CheckpointError,
            match=rf"'token_embd.weight' of 'm.gguf' is of type {kind}, which is not read; take",
        ):
            lone(tmp_path / "m.gguf", raw.numpy(), kind)
        return
    stored = lone(tmp_path / "m.gguf", raw.numpy(), kind).stored("token_embd.weight")
    for dtype in (torch.float32, torch.bfloat16):
        found = numbers(stored, dtype)
        assert torch.equal(found.nan_to_num(), whole.to(dtype).nan_to_num())


def test_metadata_is_that_of_package_gguf(path: Path) -> None:
    """Every value of a file with all types of values, and every tensor's place."""
    reader, files = gguf.GGUFReader(path), GgufFiles(path)
    theirs = {key: field.contents() for key, field in reader.fields.items()}
    assert files.metadata == {key: theirs[key] for key in theirs if not key.startswith("GGUF.")}
    starts = [(one.name, one.start) for one in files.entries.values()]
    assert [(one.name, one.data_offset) for one in reader.tensors] == starts


Damage = Callable[[bytes], bytes]
DAMAGED: dict[str, tuple[Damage, str]] = {
    "empty": (
        lambda raw: b"",
        r"cannot read 'm\.gguf' \(cannot mmap an empty file\); fetch it again",
    ),
    "a page": (
        lambda raw: b"<html>" + raw,
        r"'m\.gguf' is no GGUF file: it begins with b'<htm'; fetch it again",
    ),
    "begun": (lambda raw: raw[:6], r"'m\.gguf' is damaged \("),
    "header cut": (
        lambda raw: raw[:2000],
        r"'m\.gguf' is damaged \(its header ends or breaks off early\); fetch it again",
    ),
    "tensors cut": (
        lambda raw: raw[:-100],
        r"'m\.gguf' is cut off: it has [\d,]+ bytes, and '.*' ends at [\d,]+; fetch it again",
    ),
    "big-endian": (
        lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:],
        r"'m\.gguf' is big-endian, .*; take the little-endian",
    ),
    "old": (
        lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:],
        r"is of GGUF version 1, and versions 2 and 3 are read; take",
    ),
    "counts": (lambda raw: raw[:8] + b"\xff" * 16 + raw[24:], r"'m\.gguf' is damaged \("),
    "a value": (
        lambda raw: raw.replace(b"llama.block_count\x04", b"llama.block_count\x63"),
        r"has a value of type 99",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_told_in_a_line(kind: str, path: Path, tmp_path: Path) -> None:
    """And nothing is kept of them."""
    damage, said = DAMAGED[kind]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said) as caught:
        unpacked(path, tmp_path / "cache")
    assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    said = r"'m\.gguf' is no file; fetch"
    with pipe(tmp_path / "m.gguf"), pytest.raises(CheckpointError, match=said):
        read_needs(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, gpu_bytes=10**9)


NO_MODELS: dict[str, tuple[dict[str, Any], type[SpecDecError], str]] = {
    "LoRA": (
        {"general.type": "adapter"},
        CheckpointError,
        "is a LoRA adapter and no model; merge it into",
    ),
    "mmproj": (
        {"general.type": "mmproj"},
        CheckpointError,
        "is the tower of a multimodal model, which is not read; give",
    ),
    "old mmproj": (
        {"clip.projector_type": "mlp"},
        CheckpointError,
        "is the tower of a multimodal model",
    ),
    "unknown": (
        {"general.architecture": "mamba9"},
        UnsupportedModelError,
        "is of architecture 'mamba9', which is not read from",
    ),
    "split": (
        {"split.count": 3},
        CheckpointError,
        r"is one of 3 parts and was renamed; call them NAME-00001-of-00003\.gguf",
    ),
    "silent": (
        {"llama.block_count": None},
        CheckpointError,
        r"does not say llama\.block_count; fetch it again",
    ),
}


@pytest.mark.parametrize("kind", NO_MODELS)
def test_files_of_something_else(kind: str, tmp_path: Path) -> None:
    stated, error, said = NO_MODELS[kind]
    architecture = stated.get("general.architecture", "llama")
    entries = {"llama.block_count": 1, **stated, "general.architecture": None}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    for key, value in entries.items():
        if value is not None:
            add(writer, key, value)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(error, match=said) as caught:
        unpacked(tmp_path / "m.gguf", tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_vocabulary_alone(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError,
        match="holds a vocabulary alone, without weights; give the file of the model",
    ):
        GgufFiles(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ggml.model": None}, "holds no tokenizer; take a file that does"),
        ({"ggml.model": "bert"}, "is of kind 'bert', and gpt2, llama and gemma4 are read; take"),
        ({"ggml.pre": "klingon"}, "splits text as 'klingon' does, which is not known; take"),
        ({"ggml.merges": None}, "has no merges; take"),
        ({"ggml.token_type": [1, 1]}, "has 97 tokens and types of 2; fetch it again"),
    ],
)
def test_tokenizers_that_are_not_read(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    keys = {**characters(), **changed}
    write_gguf(tmp_path / "m.gguf", plain_model("llama"), "llama", tokenizer=keys)
    with pytest.raises(SpecDecError, match=said):
        unpacked(tmp_path / "m.gguf", tmp_path / "cache")


def test_parts(path: Path) -> None:
    """Any of them stands for all; one that is missing is named."""
    reader = gguf.GGUFReader(path)
    whole = GgufFiles(path)
    for number, own in enumerate((reader.tensors[::2], reader.tensors[1::2]), start=1):
        writer = gguf.GGUFWriter(path.with_name(f"m-{number:05}-of-00002.gguf"), "llama")
        writer.add_uint16("split.count", 2)
        for field in reader.fields.values() if number == 1 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind, inner = [*field.types, None][:2]
                writer.add_key_value(field.name, field.contents(), kind, inner)
        for tensor in own:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first, second = (path.with_name(f"m-{number:05}-of-00002.gguf") for number in (1, 2))
    for part in (first, second):
        files = GgufFiles(part)
        assert config_of(Facts(files)) == config_of(Facts(whole))
        assert files.entries.keys() == whole.entries.keys()
        for name in files.entries:
            assert np.array_equal(files.stored(name).blocks, whole.stored(name).blocks)
    path.unlink()
    assert gguf_file(path.parent) == first
    second.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"1 of the 2 parts of '.*' are missing, the first being 'm-00002-of-00002\.gguf'",
    ):
        GgufFiles(first)


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    """Or one that is missing."""
    from verifiers.config.wrappers import config_of as made
    from verifiers.config.wrappers import shapes_of
    from verifiers.weights.gguf import read_gguf

    def read(path: Path) -> object:
        files = GgufFiles(path)
        config = made(config_of(Facts(files)))
        cpu = torch.device("cpu")
        return read_gguf(files, config, shapes_of(config), device=cpu, dtype=torch.float32)

    model = plain_model("llama")
    write_gguf(tmp_path / "a.gguf", model, "llama", leave_out=["blk.2.ffn_up.weight"])
    with pytest.raises(
        CheckpointError,
        match=r"'a\.gguf' lacks 'blk\.2\.ffn_up\.weight', which 'model\.layers\.2\.mlp\.up_proj",
    ):
        read(tmp_path / "a.gguf")
    odd = {"blk.2.attn_k.weight": torch.ones(3, 32)}
    write_gguf(tmp_path / "b.gguf", model, "llama", leave_out=list(odd), extra=odd)
    with pytest.raises(
        CheckpointError,
        match=r"'blk\.2\.attn_k\.weight' of 'b\.gguf' is \[3, 32\], of which 2 heads",
    ):
        read(tmp_path / "b.gguf")
