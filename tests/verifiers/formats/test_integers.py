"""Integers of few bits: compressed-tensors' packing, AWQ and GPTQ."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from verifiers.formats.awq import Awq
from verifiers.formats.format import Stored
from verifiers.formats.gptq import Gptq
from verifiers.formats.integers import packed_integers

DTYPE = torch.bfloat16


def numbers(weight: Stored) -> Tensor:
    return weight.dequantized(torch.float64) if isinstance(weight, Quantized) else weight.double()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"), [((24, 64), 32), ((20, 36), 16), ((17, 44), None), ((144, 448), 128)]
)
def test_packed_integers(shape: tuple[int, int], group: int | None, zeros: bool, bits: int) -> None:
    """Groups and outputs that are no multiples of anything, with zeros and without."""
    file = quantized.packed_integers(torch.empty(shape), bits, group, zeros=zeros)
    weight = packed_integers("x", file.parts, bits, group, DTYPE)
    assert isinstance(weight, PackedWeight) and weight.code == ("int4" if bits <= 4 else "int8")
    assert weight.in_features == shape[1]
    assert numbers(weight).equal(file.numbers)


def test_one_zero_for_a_weight_is_not_packed() -> None:
    """With one scale, zeros are a signed byte."""
    file = quantized.packed_integers(torch.empty(8, 16), 4, None)
    parts = file.parts | {
        "weight_scale": torch.tensor([0.5]),
        "weight_zero_point": torch.tensor([-3], dtype=torch.int8),
    }
    signed = file.numbers / file.parts["weight_scale"].double()
    assert numbers(packed_integers("x", parts, 4, None, DTYPE)).equal((signed + 3) * 0.5)


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_groups_of_scattered_inputs(zeros: bool, bits: int) -> None:
    """Each input names its group; -1 throughout says that there is no such order."""
    file = quantized.packed_integers(torch.empty(24, 64), bits, 16, zeros=zeros, scattered=True)
    weight = packed_integers("x", file.parts, bits, 16, DTYPE)
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight.double(), file.numbers, rtol=1e-6, atol=0)
    file = quantized.packed_integers(torch.empty(24, 64), bits, 16, zeros=zeros)
    for groups in (torch.full((64,), -1), torch.arange(64) // 16):
        kept = packed_integers("x", file.parts | {"weight_g_idx": groups.int()}, bits, 16, DTYPE)
        assert isinstance(kept, Quantized) and numbers(kept).equal(file.numbers)


@pytest.mark.parametrize(("shape", "group"), [((24, 64), 16), ((16, 40), 16), ((144, 448), 128)])
def test_awq(shape: tuple[int, int], group: int) -> None:
    file = quantized.awq(torch.empty(shape), group)
    weight = Awq({"bits": 4, "group_size": group, "version": "gemm"}).read("x", file.parts, DTYPE)
    assert isinstance(weight, PackedWeight) and weight.code == "int4"
    assert numbers(weight).equal(file.numbers)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("shape", "group"), [((32, 64), 16), ((32, 96), 64), ((160, 448), 128)])
def test_gptq(shape: tuple[int, int], group: int, version: int, bits: int) -> None:
    """Every zero, in both layouts, and groups of which the last one is smaller."""
    layout = {1: "gptq", 2: "gptq_v2"}[version]
    form = Gptq({"bits": bits, "group_size": group, "checkpoint_format": layout})
    file = quantized.gptq(torch.empty(shape), bits, group, version=version)
    weight = form.read("x", file.parts, DTYPE)
    assert isinstance(weight, Quantized) and numbers(weight).equal(file.numbers)
    scattered = quantized.gptq(torch.empty(shape), bits, group, version=version, scattered=True)
    weight = form.read("x", scattered.parts, DTYPE)
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight.double(), scattered.numbers, rtol=1e-6, atol=0)


def test_one_group_for_all_inputs() -> None:
    """Which a size of -1 says."""
    for form, file in (
        (Gptq({"bits": 4, "group_size": -1}), quantized.gptq(torch.empty(16, 40), 4, 40)),
        (Awq({"bits": 4, "group_size": -1}), quantized.awq(torch.empty(16, 40), 40)),
    ):
        assert numbers(form.read("x", file.parts, DTYPE)).equal(file.numbers)


@pytest.mark.parametrize(
    ("form", "quantization", "message"),
    [
        (Awq, {"bits": 8}, "AWQ with 8 bits in version 'gemm' is not read"),
        (Awq, {"bits": 4, "version": "gemv"}, "in version 'gemv' is not read"),
        (Gptq, {"bits": 16}, "GPTQ has integers of 16 bits, and 2 to 8 are read"),
        (Gptq, {"bits": 4, "checkpoint_format": "marlin"}, "in layout 'marlin' is not read"),
    ],
)
def test_what_is_not_read_is_named(
    form: Any, quantization: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        form(quantization)


def test_modules_of_gptq_may_have_settings_of_their_own() -> None:
    """Bits and groups, as rules under "dynamic" give them; a module's tensors tell."""
    form = Gptq(
        {
            "bits": 4,
            "group_size": 16,
            "dynamic": {"-:.*gate": {}, "+:.*down": {"bits": 8, "group_size": 32}},
        }
    )
    for bits, group in ((4, 16), (8, 32), (2, 64)):
        file = quantized.gptq(torch.empty(32, 128), bits, group)
        assert numbers(form.read("x", file.parts, DTYPE)).equal(file.numbers)
    parts = quantized.gptq(torch.empty(32, 128), 4, 16).parts
    for name in ("qzeros", "scales"):
        with pytest.raises(CheckpointError, match=r"with \d scales each, which do not go together"):
            form.read("x", parts | {name: parts[name][:-1, :-1].contiguous()}, DTYPE)


def test_words_with_gaps_are_refused() -> None:
    """Ten codes of three bits to a word, as compressed-tensors once packed them."""
    file = quantized.packed_integers(torch.empty(8, 40), 3, 8)
    parts = file.parts | {
        "weight_packed": torch.nn.functional.pad(file.parts["weight_packed"], (0, 1))
    }
    with pytest.raises(
        CheckpointError,
        match=r"holds \[8, 5\] words of 3-bit integers for \[8, 40\]; take a checkpoint that packs",
    ):
        packed_integers("x", parts, 3, 8, DTYPE)


def test_other_widths_are_refused() -> None:
    file = quantized.packed_integers(torch.empty(8, 16), 4, 16)
    with pytest.raises(CheckpointError, match="integers of 9 bits, and 2 to 8 are read"):
        packed_integers("x", file.parts, 9, 16, DTYPE)
