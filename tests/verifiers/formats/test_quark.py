"""AMD's Quark: every kind of weights that it exports, and which settings a module has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from tests.helpers.quantized import Written
from verifiers.formats.toolkits.quark import Quark

MODULE = "model.layers.0.mlp.up_proj"


def config(weight: Any, **changes: Any) -> dict[str, Any]:
    """A config as Quark 0.13 writes it, of which some keys are left out."""
    export = {
        "kv_cache_group": [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder",
        "weight_format": "real_quantized",
    }
    layers: dict[str, Any] = {"layer_quant_config": {}, "layer_type_quant_config": {}}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "export": export,
        **layers,
        **changes,
    }


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "group_size": None,
        "block_size": None,
        "is_dynamic": False,
        **more,
    }


def float8(weight: Tensor, block: tuple[int, int], shape: tuple[int, ...] | None = None) -> Written:
    file = quantized.float8(weight, block, name="weight_scale")
    return (
        file
        if shape is None
        else Written(
            file.parts | {"weight_scale": file.parts["weight_scale"].view(shape)}, file.numbers
        )
    )


def int8(weight: Tensor) -> Written:
    codes, scale = (
        quantized.random_codes(weight, 256) - 128,
        quantized.random_scales(weight, (1, weight.shape[1])),
    )
    return Written(
        {"weight": codes.to(torch.int8), "weight_scale": scale[:, 0]}, codes * scale.double()
    )


MXFP4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0")
NVFP4 = [
    spec("fp4", "per_group", group_size=16),
    spec("fp8_e4m3", "per_tensor", is_scale_quant=True),
]
KINDS: dict[str, tuple[Any, Any]] = {
    "float8": (spec("fp8_e4m3", "per_tensor"), lambda w: float8(w, (48, 64), ())),
    "float8_channel": (
        spec("fp8_e4m3", "per_channel", ch_axis=0),
        lambda w: float8(w, (1, 64), (48,)),
    ),
    "float8_block": (
        spec("fp8_e4m3", "per_block", block_size=[32, 48]),
        lambda w: float8(w, (32, 48)),
    ),
    "float8_group": (spec("fp8_e4m3", "per_group", group_size=16), lambda w: float8(w, (1, 16))),
    "mxfp8": (
        spec("fp8_e4m3", "per_group", group_size=32, scale_format="e8m0"),
        lambda w: quantized.float8(w, (1, 32), torch.uint8, name="weight_scale"),
    ),
    "mxfp4": (MXFP4, quantized.mxfp4_pairs),
    "nvfp4": (NVFP4, lambda w: quantized.nvfp4(w, divides=False)),
    "int4": (
        spec("int4", "per_group", group_size=32),
        lambda w: quantized.quark_int4(w, 32, signed=True),
    ),
    "uint4": (
        spec("uint4", "per_group", group_size=32),
        lambda w: quantized.quark_int4(w, 32, signed=False),
    ),
    "int4_channel": (
        spec("int4", "per_channel", ch_axis=0),
        lambda w: quantized.quark_int4(w, None, signed=True),
    ),
    "uint4_channel": (
        spec("uint4", "per_channel", ch_axis=0),
        lambda w: quantized.quark_int4(w, None, signed=False),
    ),
    "int8": (spec("int8", "per_channel", ch_axis=0), int8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_that_were_written(kind: str) -> None:
    stated, write = KINDS[kind]
    file = write(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    weight = Quark(config(stated)).read(MODULE, file.parts, torch.bfloat16)
    assert isinstance(weight, PackedWeight)
    torch.testing.assert_close(weight.dequantized(torch.float64), file.numbers, rtol=3e-7, atol=0)


def test_words_in_their_own_order() -> None:
    file = quantized.quark_int4(torch.empty(48, 64), 32, signed=False, reordered=False)
    form = Quark(config(spec("uint4", "per_group", group_size=32), export={"pack_method": "order"}))
    weight = form.read(MODULE, file.parts, torch.bfloat16)
    assert isinstance(weight, PackedWeight) and weight.dequantized(torch.float64).equal(
        file.numbers
    )


def test_the_nearest_settings_are_taken() -> None:
    """A layer's before a class's before those of all;
    names keep or lack the prefix of a composite.
    """
    four = {"weight": spec("int4", "per_group", group_size=32)}
    file, other = (
        quantized.quark_int4(torch.empty(48, 64), 32, signed=signed).parts
        for signed in (True, False)
    )
    expected = {True: file, False: other}
    layers = {"model.layers.0.mlp.down_proj": four, "*k_proj": four, "*embed_tokens": None}
    classes = {"Linear": {"weight": spec("uint4", "per_group", group_size=32)}}
    form = Quark(
        config(
            MXFP4,
            layer_quant_config=layers,
            layer_type_quant_config=classes,
            exclude=["lm_head", "re:.*gate"],
        )
    )
    for module, signed in {
        "model.language_model.layers.0.mlp.down_proj": True,
        "model.layers.3.self_attn.k_proj": True,
        "model.layers.3.self_attn.q_proj": False,
    }.items():
        weight = form.read(module, expected[signed], torch.bfloat16)
        assert isinstance(weight, PackedWeight) and (weight.zero is None, weight.middle) == (
            False,
            0,
        )
        assert weight.dequantized(torch.float64).equal(
            quantized.quark_int4(torch.empty(48, 64), 32, signed=signed).numbers
        )
    assert form.lists_as_plain("lm_head") and form.lists_as_plain("model.layers.1.mlp.gate")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": spec("fp6_e2m3", "per_group", group_size=32)},
            "Quark's fp6_e2m3 weights with scales per_group",
        ),
        (
            {"weight": spec("fp4", "per_group", group_size=128)},
            "Quark's fp4 weights with scales per_group, groups of 128",
        ),
        (
            {"weight": [spec("fp8_e4m3", "per_tensor"), spec("int4", "per_channel")]},
            "Quark's int4 of fp8_e4m3 weights",
        ),
        ({"weight": MXFP4, "export": {"weight_format": "fake_quantized"}}, "not real_quantized"),
        (
            {"weight": MXFP4, "algo_config": [{"name": "rotation", "r1": True}]},
            "Quark's layers rotate their inputs",
        ),
        (
            {"weight": MXFP4, "algo_config": [{"name": "x", "online_r1_rotation": True}]},
            "Quark's layers rotate their inputs",
        ),
        (
            {"weight": MXFP4, "algo_config": [5]},
            "algo_config of quantization_config is 5, which must be a list of objects",
        ),
        (
            {"weight": 5},
            r"global_quant_config\.weight of quantization_config is 5, which must be an object or a"
            r" list",
        ),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Quark(config(**changes))


def test_rotations_that_weights_have_are_read() -> None:
    offline = {
        "name": "rotation", "r1": True, "r2": True, "r4": False, "online_r1_rotation": False,
        "online_config": None,
    }  # fmt: skip
    assert Quark(config(MXFP4, algo_config=[offline, {"name": "smooth"}])) and Quark(
        config(MXFP4, algo_config=None)
    )
