"""bitsandbytes: tables of four bits with scales that may be codes themselves, and rows of eight
bits.
"""

import json

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from verifiers.formats.bitsandbytes import BitsAndBytes


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (40, 100), (3, 10), (144, 448)])
def test_four_bits(shape: tuple[int, int], nested: bool, kind: str) -> None:
    """Blocks go across rows, and the last one may be smaller."""
    file = quantized.bitsandbytes4(torch.empty(shape), kind, nested=nested)
    weight = BitsAndBytes({"load_in_4bit": True}).read("x", file.parts, torch.bfloat16)
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight.double(), file.numbers, rtol=1e-6, atol=1e-8)


def test_codes_may_lie_in_wider_numbers() -> None:
    """As `bnb_4bit_quant_storage` has them, whose bytes are the same."""
    file = quantized.bitsandbytes4(torch.empty(24, 64))
    stored = file.parts["weight"].flatten().view(torch.bfloat16)[:, None]
    weight = BitsAndBytes({}).read("x", file.parts | {"weight": stored}, torch.bfloat16)
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight.double(), file.numbers, rtol=1e-6, atol=1e-8)


def test_eight_bits() -> None:
    file = quantized.bitsandbytes8(torch.empty(24, 64))
    weight = BitsAndBytes({"load_in_8bit": True}).read("x", file.parts, torch.bfloat16)
    assert isinstance(weight, PackedWeight) and weight.code == "int8"
    torch.testing.assert_close(weight.dequantized(torch.float64), file.numbers, rtol=3e-7, atol=0)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    "state", [b"{", b"[]", b"5", b'{"shape": [24, 64]}', b'{"shape": 5, "blocksize": 64}', b"\xff"]
)
def test_damaged_states_are_refused(state: bytes) -> None:
    parts = quantized.bitsandbytes4(torch.empty(24, 64)).parts
    with pytest.raises(CheckpointError, match="the state of 'x' is none of bitsandbytes"):
        BitsAndBytes({}).read(
            "x", parts | {STATE: torch.tensor(list(state), dtype=torch.uint8)}, torch.bfloat16
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight.absmax": torch.ones(3)}, "has 3 scales for 1536 numbers in blocks of 64"),
        ({"weight": torch.zeros(5, 1, dtype=torch.uint8)}, r"holds 10 codes for \[24, 64\]"),
        ({"weight.nested_absmax": torch.ones(1)}, "but no whole state"),
        ({"SCB": torch.ones(24)}, "rows of torch.uint8, not int8"),
        (
            {
                STATE: torch.tensor(
                    list(json.dumps({"shape": [24, 64], "blocksize": 0}).encode()),
                    dtype=torch.uint8,
                )
            },
            "is none of bitsandbytes",
        ),
    ],
)
def test_parts_that_do_not_go_together(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        BitsAndBytes({}).read(
            "x", quantized.bitsandbytes4(torch.empty(24, 64)).parts | changes, torch.bfloat16
        )
