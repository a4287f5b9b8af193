"""Quantized weights written by hand: the tensors of each format beside the numbers that they stand
for.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
"""What the codes of 4-bit floats mean."""


class Written(NamedTuple):
    """A weight as a file holds it."""

    parts: dict[str, Tensor]  # by what follows the module's name
    numbers: Tensor  # float64 [out, in]


def blocks_of(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The block of each number, int64 [out, in, 2]."""
    rows, columns = (
        torch.arange(size) // share for size, share in zip(weight.shape, block, strict=True)
    )
    return torch.stack(torch.broadcast_tensors(rows[:, None], columns[None]), dim=-1)


def spread(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The scale of each number."""
    rows, columns = blocks_of(weight, block).unbind(-1)
    return scale[rows, columns]


def random_scales(
    weight: Tensor, block: tuple[int, int], kind: torch.dtype = torch.float32
) -> Tensor:
    """Scales of very different sizes, each for one block."""
    generator = torch.Generator().manual_seed(weight.numel())
    grid = [-(-size // share) for size, share in zip(weight.shape, block, strict=True)]
    if kind in (torch.float8_e8m0fnu, torch.uint8):
        return torch.randint(118, 124, grid, generator=generator, dtype=torch.uint8).view(kind)
    return (torch.rand(grid, generator=generator) * 0.03 + 0.002).to(kind)


def as_factor(scale: Tensor) -> Tensor:
    """Scales in float64."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.pow(2.0, scale.view(torch.uint8).double() - 127)
    return scale.double()


def random_codes(weight: Tensor, count: int) -> Tensor:
    """int64 like `weight`, below `count`."""
    generator = torch.Generator().manual_seed(weight.numel() + 1)
    return torch.randint(0, count, weight.shape, generator=generator)


def float8(
    weight: Tensor,
    block: tuple[int, int],
    kind: torch.dtype = torch.float32,
    name: str = "weight_scale_inv",
) -> Written:
    """Blocks of 8-bit floats."""
    scale = random_scales(weight, block, kind)
    codes = (weight / weight.abs().max() * 400).to(torch.float8_e4m3fn)
    return Written(
        {"weight": codes, name: scale}, codes.double() * as_factor(spread(scale, weight, block))
    )


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, ceil(columns * bits / 32)], a stream of bits with the first code lowest."""
    single = (codes[..., None] >> torch.arange(bits) & 1).flatten(1)
    single = torch.nn.functional.pad(single, (0, -single.shape[1] % 32)).unflatten(1, (-1, 32))
    packed = (single << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def packed_integers(
    weight: Tensor,
    bits: int,
    group: int | None,
    *,
    zeros: bool = False,
    kind: torch.dtype = torch.bfloat16,
    scattered: bool = False,
) -> Written:
    """compressed-tensors' packed integers; `scattered`: the inputs of a group are not neighbors."""
    out_features, in_features = weight.shape
    block, middle = (1, group or in_features), 2 ** (bits - 1)
    scale = random_scales(weight, block, kind)
    codes = random_codes(weight, 2**bits)
    zero = random_codes(scale, 2**bits) if zeros else torch.full(scale.shape, middle)
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out_features, in_features]),
    }
    if zeros:
        parts["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    groups = torch.arange(in_features) // block[1]
    if scattered:
        groups = groups[torch.randperm(in_features, generator=torch.Generator().manual_seed(0))]
        parts["weight_g_idx"] = groups.int()
    return Written(parts, (codes - zero[:, groups]).double() * scale.double()[:, groups])


def awq(weight: Tensor, group: int) -> Written:
    """AWQ, version gemm: of eight outputs in a word, 0, 2, 4, 6, 1, 3, 5,
    7 lie from low to high.
    """
    scale, codes = random_scales(weight, (1, group), torch.float16), random_codes(weight, 16)
    zero = random_codes(scale, 16)
    order = torch.cat(
        [torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) + start for start in range(0, weight.shape[0], 8)]
    )
    parts = {
        "qweight": words(codes.t()[:, order], 4),
        "qzeros": words(zero.t()[:, order], 4),
        "scales": scale.t().contiguous(),
    }
    return Written(
        parts,
        (codes - spread(zero, weight, (1, group))) * spread(scale, weight, (1, group)).double(),
    )


def gptq(
    weight: Tensor, bits: int, group: int, *, version: int = 1, scattered: bool = False
) -> Written:
    """GPTQ; files of version 1 hold each zero less by one."""
    scale, codes = random_scales(weight, (1, group), torch.float16), random_codes(weight, 2**bits)
    zero = random_codes(scale, 2**bits)
    groups = torch.arange(weight.shape[1]) // group
    if scattered:
        groups = groups[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))]
    stored = (zero - 1) % 2**bits if version == 1 else zero
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(stored.t(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": groups.int(),
    }
    return Written(parts, (codes - zero[:, groups]) * scale.double()[:, groups])


def pairs(codes: Tensor) -> Tensor:
    """uint8 [..., n / 2], the first code of a pair low."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight: Tensor, *, divides: bool) -> Written:
    """NVFP4 with the names of compressed-tensors, whose second scale divides, or of ModelOpt, whose
    multiplies.
    """
    codes, block = random_codes(weight, 16), (1, 16)
    scale = (random_scales(weight, block) * 1e4).to(torch.float8_e4m3fn)
    factor = torch.tensor([0.0007])
    values = torch.tensor(E2M1, dtype=torch.float64)[codes]
    if divides:
        parts = {
            "weight_packed": pairs(codes),
            "weight_scale": scale,
            "weight_global_scale": 1 / factor,
        }
        factor = 1 / (1 / factor)
    else:
        parts = {
            "weight": pairs(codes),
            "weight_scale": scale,
            "weight_scale_2": factor.reshape(()),
        }
    return Written(parts, values * spread((scale.float() * factor).double(), weight, block))


def mxfp4_pairs(weight: Tensor) -> Written:
    """Quark's MXFP4: `weight` uint8 [out, in / 2] and powers of two in bytes."""
    codes, scale = random_codes(weight, 16), random_scales(weight, (1, 32), torch.uint8)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes]
    return Written(
        {"weight": pairs(codes), "weight_scale": scale},
        values * spread(as_factor(scale), weight, (1, 32)),
    )


def modelopt_int4(weight: Tensor, group: int, *, factors: bool) -> Written:
    """ModelOpt's AWQ: signed halves, of neighboring outputs in a byte; `factors` of the inputs
    belong to the weight.
    """
    scale, codes = random_scales(weight, (1, group)), random_codes(weight, 16)
    stored = codes ^ 8
    parts = {"weight": (stored[::2] | stored[1::2] << 4).to(torch.uint8), "weight_scale": scale}
    numbers = (codes - 8) * spread(scale, weight, (1, group)).double()
    if factors:
        parts["pre_quant_scale"] = torch.linspace(0.5, 2, weight.shape[1])
        numbers = numbers * parts["pre_quant_scale"].double()
    return Written(parts, numbers)


def quark_int4(
    weight: Tensor, group: int | None, *, signed: bool, reordered: bool = True
) -> Written:
    """Quark's integers: with groups [in, out / 8] and scales [groups, out], else [out, in / 8] and
    a scale per output.
    """
    block = (1, group or weight.shape[1])
    scale, codes = random_scales(weight, block), random_codes(weight, 16)
    zero = torch.full(scale.shape, 8) if signed else random_codes(scale, 16)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7] if reordered else range(8))

    def packed(numbers: Tensor) -> Tensor:
        stored = numbers ^ 8 if signed else numbers
        return words(stored.unflatten(1, (-1, 8))[..., places].flatten(1), 4)

    if group:
        parts = {
            "weight": packed(codes.t()),
            "weight_scale": scale.t().contiguous(),
            "weight_zero_point": packed(zero.t()),
        }
    else:
        parts = {
            "weight": packed(codes),
            "weight_scale": scale[:, 0],
            "weight_zero_point": packed(zero.t())[0],
        }
    return Written(
        parts, (codes - spread(zero, weight, block)) * spread(scale, weight, block).double()
    )


def bitsandbytes4(weight: Tensor, kind: str = "nf4", *, nested: bool = False) -> Written:
    """Four bits: high halves first, in blocks of 64 numbers of row after row; `nested` scales are
    codes of 8 bits.
    """
    codes, block, nested_block, offset = random_codes(weight, 16).flatten(), 64, 256, 0.25
    table = torch.linspace(-1, 1, 16).pow(3)
    parts = {"weight.absmax": random_scales(codes[None], (1, block))[0]}
    scale = parts["weight.absmax"].double()
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    if nested:
        parts = {"weight.absmax": random_codes(scale, 256).to(torch.uint8)}
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        parts["weight.nested_absmax"] = random_scales(scale[None], (1, nested_block))[0]
        large = parts["weight.nested_absmax"].double().repeat_interleave(nested_block)[: len(scale)]
        scale = (
            parts["weight.nested_quant_map"].double()[parts["weight.absmax"].long()] * large
            + offset
        )
        state |= {
            "nested_blocksize": nested_block,
            "nested_offset": offset,
            "nested_dtype": "float32",
        }
    parts["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    parts["weight.quant_map"] = table
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    numbers = table.double()[codes] * scale.repeat_interleave(block)[: len(codes)]
    return Written(parts, numbers.view(weight.shape))


def bitsandbytes8(weight: Tensor) -> Written:
    """Eight bits: the largest number of each row, whose code is 127."""
    codes, largest = (
        random_codes(weight, 255) - 127,
        random_scales(weight, (1, weight.shape[1]))[:, 0],
    )
    parts = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(parts, codes * (largest.double() / 127)[:, None])


def mxfp4(shape: tuple[int, int, int]) -> Written:
    """Experts of gpt-oss: `_blocks` [E, out, in / 32, 16] and `_scales` [E, out, in / 32]."""
    codes = random_codes(torch.empty(shape), 16)
    scale = random_scales(torch.empty(shape[0] * shape[1], shape[2]), (1, 32), torch.uint8).view(
        *shape[:2], -1
    )
    values = torch.tensor(E2M1, dtype=torch.float64)[codes] * as_factor(scale).repeat_interleave(
        32, dim=-1
    )
    return Written({"blocks": pairs(codes).unflatten(-1, (-1, 16)), "scales": scale}, values)


def quantize_files(
    folder: Path,
    target: Path,
    quantization: Mapping[str, Any],
    write: Callable[[str, Tensor], Written | None],
    *,
    prefix: str = "",
    shards: int = 2,
) -> dict[str, Tensor]:
    """Writes a checkpoint again, quantized.

    Args:
        folder: with `model.safetensors` and `config.json`.
        target: folder of the new one, in several files with an index.
        quantization: its `quantization_config`.
        write: a linear layer, by its name, in another form; None where it stays as it is.
        prefix: before every name that begins with "model.".
        shards: files.

    Returns:
        The numbers of the whole checkpoint by the names of `folder`, quantized ones in float64.
    """
    tensors, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        written = (
            write(module, tensor.float()) if name.endswith(".weight") and tensor.ndim == 2 else None
        )
        numbers[name] = tensor if written is None else written.numbers
        renamed = prefix + module if name.startswith("model.") else module
        for part, value in ({"weight": tensor} if written is None else written.parts).items():
            tensors[f"{renamed}.{part}" if name.endswith(".weight") else (prefix + name)] = (
                value.contiguous()
            )
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": dict(quantization)
    }
    (target / "config.json").write_text(json.dumps(config))
    files = {
        name: f"model-{number}.safetensors"
        for name, number in zip(tensors, itertools.cycle(range(shards)), strict=False)
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name, at in files.items() if at == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return numbers
