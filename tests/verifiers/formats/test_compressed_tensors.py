"""compressed-tensors: what its own package writes, every kind of scheme, and which scheme a module
has.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from verifiers.formats.format import Stored
from verifiers.formats.toolkits.compressed_tensors import CompressedTensors

DTYPE = torch.float32
SCHEMES: dict[str, dict[str, Any]] = {
    "float8_tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float8_channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float8_block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [16, 24],
    },
    "mxfp8": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
        "scale_dtype": torch.uint8,
    },
    "int4_group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4_group_zeros": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False,
    },
    "int4_channel": {"num_bits": 4, "type": "int", "strategy": "channel"},
    "int4_channel_zeros": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    "int8_packed": {
        "num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False,
    },
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}  # fmt: skip
"""Each with the package's names; those that it does not write by itself follow from the type."""

FORMATS = {
    "int8": "int-quantized",
    "int8_packed": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}


def form_of(weights: dict[str, Any], **changes: Any) -> CompressedTensors:
    """The format that a config with one scheme makes."""
    stated = {
        "symmetric": True,
        **{name: value for name, value in weights.items() if name != "scale_dtype"},
    }
    group = {"targets": ["Linear"], "weights": stated, "input_activations": None}
    return CompressedTensors(
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | changes
    )


def numbers(weight: Stored) -> Tensor:
    return weight.dequantized(torch.float32) if isinstance(weight, Quantized) else weight


@pytest.mark.parametrize("shape", [(48, 64), (40, 96)])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_package_writes(name: str, shape: tuple[int, int]) -> None:
    """Its own compressor's tensors are read as its own decompressor reads them."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    torch.manual_seed(0)
    state = {"weight": torch.randn(shape)} | _scales(weights, shape)
    kind = FORMATS.get(name, "pack-quantized" if weights["type"] == "int" else "float-quantized")
    compressor = BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress(state, scheme)
    weight = form_of(weights).read("model.layers.0.mlp.up_proj", parts, DTYPE)
    theirs = compressor.decompress(parts, scheme)["weight"].float()
    # The package divides NVFP4's scales in bfloat16.
    torch.testing.assert_close(
        numbers(weight), theirs, rtol=2**-8 if name == "nvfp4" else 0, atol=0
    )
    assert numbers(weight).unique().numel() > 10, package.__version__


def _scales(weights: dict[str, Any], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Scales and zeros of random sizes, in the shapes that the package asks for."""
    rows, columns = {
        "tensor": shape,
        "channel": (1, shape[1]),
        "block": tuple(weights.get("block_structure", (1, 1))),
    }.get(weights["strategy"], (1, weights.get("group_size", 1)))
    grid = [math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)]
    most = 7 if weights["num_bits"] == 4 else 120 if weights["type"] == "int" else 400
    scale = (torch.rand(grid) + 1) * 3 / most
    if weights["type"] == "float" and weights.get("group_size") == 32:
        scale = torch.exp2(scale.log2().round())
    state = {"weight_scale": scale}
    if not weights.get("symmetric", True):
        half = 2 ** (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, grid, dtype=torch.int8)
    if weights["strategy"] == "tensor_group":
        state |= {
            "weight_scale": (scale * 100).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": torch.tensor([100.0]),
        }
    return state


@pytest.mark.parametrize("divisor", [24, 40])
def test_nvfp4_divides_by_its_second_scale(divisor: int) -> None:
    file = quantized.nvfp4(torch.empty(divisor, 32), divides=True)
    weight = form_of(SCHEMES["nvfp4"]).read("x", file.parts, DTYPE)
    torch.testing.assert_close(numbers(weight).double(), file.numbers, rtol=3e-7, atol=0)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_ragged_floats(strategy: str) -> None:
    """N = 144 and K = 448, with blocks whose size only the config tells."""
    block = {"tensor": (144, 448), "channel": (1, 448), "block": (128, 128)}[strategy]
    file = quantized.float8(torch.randn(144, 448), block, torch.bfloat16, name="weight_scale")
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "block_structure": [128, 128] if strategy == "block" else None,
    }
    assert numbers(form_of(scheme).read("x", file.parts, DTYPE)).equal(file.numbers.float())


def test_lists_of_plain_modules() -> None:
    """Names and expressions, with the composite's prefix and without."""
    form = form_of(
        SCHEMES["int4_group"],
        ignore=["lm_head", "re:.*self_attn.*", "model.language_model.layers.0.mlp.gate"],
    )
    plain = (
        "lm_head",
        "language_model.lm_head",
        "model.layers.3.self_attn.q_proj",
        "model.layers.0.mlp.gate",
    )
    assert all(map(form.lists_as_plain, plain)) and not form.lists_as_plain(
        "model.layers.0.mlp.gate_proj"
    )


def test_the_nearest_scheme_is_taken() -> None:
    """A name before an expression before a class."""
    schemes = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 8}},
        "b": {
            "targets": ["re:.*down_proj"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 16},
        },
        "c": {
            "targets": ["model.layers.1.mlp.down_proj", "lm_head"],
            "weights": {"num_bits": 8, "type": "int", "group_size": 32},
        },
    }
    form = CompressedTensors({"config_groups": schemes})
    expected = {
        "model.layers.1.mlp.up_proj": (4, 8),
        "model.layers.0.mlp.down_proj": (4, 16),
        "language_model.model.layers.1.mlp.down_proj": (8, 32),
        "lm_head": (8, 32),
    }
    for module, (bits, group) in expected.items():
        weight = form.read(
            module, quantized.packed_integers(torch.empty(8, 64), bits, group).parts, DTYPE
        )
        assert isinstance(weight, PackedWeight) and (weight.code, weight.group) == (
            f"int{bits}",
            group,
        )
    del schemes["a"]
    with pytest.raises(
        CheckpointError,
        match=r"'model.norm' is quantized but no group of quantization_config has it",
    ):
        CompressedTensors({"config_groups": schemes}).read(
            "model.norm", {"weight_scale": torch.ones(1)}, DTYPE
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"transform_config": {"config_groups": {"u": {}}}},
    ],
)
def test_sparse_and_rotated_weights_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="sparse or rotated"):
        form_of(SCHEMES["int8"], **changes)
    assert form_of(SCHEMES["int8"], sparsity_config={"format": "dense"}, transform_config={})


def test_a_strategy_that_is_not_read_is_named() -> None:
    with pytest.raises(CheckpointError, match="weights share scales by 'attn_head'"):
        form_of({"num_bits": 8, "type": "float", "strategy": "attn_head"})
