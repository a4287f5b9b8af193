"""Weights of a GGUF file, read from its memory map without a model of Transformers."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError, one_line
from specdec.layers.packed.gguf import GGUF_TYPES, PLAIN_TYPES, GgufWeight
from verifiers.config.wrappers import wide_names
from verifiers.formats.format import Stored, check_finite
from verifiers.gguf.file import Blocks, Entry, GgufFiles
from verifiers.weights.gguf_names import Recipe, Recipes

logger = logging.getLogger(__name__)

PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of numbers by the number of a type; all others are quantized."""

AT_ONCE = 2**18
"""Numbers that are made of blocks at a time, which stay in a processor's cache."""


def read_gguf(
    files: GgufFiles,
    config: Any,
    names: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool = False,
    part: Callable[[str, Stored], Stored] | None = None,
) -> dict[str, Stored]:
    """The tensors of a model.

    Args:
        names: of the tensors, as Transformers has them.
        dtype: of plain numbers; what the model's class keeps in float32 stays so.
        as_stored: matrices stay in blocks where our layers multiply these.
        part: gives what is wanted of a tensor of that name; None for all of it.

    Returns:
        By name; shapes are judged by `verifiers.weights.complete`.

    Raises:
        CheckpointError: one is missing, or cannot be made of what the file has.
    """
    recipes, wide = Recipes(files, config), wide_names(config, dtype)
    found = {name: recipes.recipe(name) for name in names}
    if left := recipes.unused({source for recipe in found.values() for source in recipe.sources}):
        text = "%d tensors of %s are left out, the first being %s: the model has none such"
        logger.warning(text, len(left), files.path.name, left[0])

    def made(pair: tuple[str, Recipe]) -> Stored:
        name, recipe = pair
        own = torch.float32 if wide is not None and wide.search(name) else dtype
        weight = _made(files, name, recipe, own, as_stored)
        if isinstance(weight, Tensor):
            check_finite(name, weight)
        return (weight if part is None else part(name, weight)).to(device)

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return dict(zip(found, pool.map(made, found.items()), strict=True))


def _made(
    files: GgufFiles, name: str, recipe: Recipe, dtype: torch.dtype, as_stored: bool
) -> Stored:
    sources = [files.stored(source) for source in recipe.sources]
    try:
        if recipe.change is not None:
            changed = recipe.change([numbers(source, torch.float32) for source in sources])
            return changed.to(dtype).contiguous()
        return _ordered(sources, recipe.rows, dtype, as_stored)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{one} {list(files.shape(one))}" for one in recipe.sources)
        what = f"{name!r} cannot be made of {shapes} in {files.path.name!r} ({one_line(error)})"
        raise CheckpointError(f"{what}; fetch it again") from error


def _ordered(
    sources: list[Blocks], rows: Tensor | None, dtype: torch.dtype, as_stored: bool
) -> Stored:
    """Tensors one below the other, those of experts within each, in another order.

    Here is where blocks stay blocks: `GgufWeight` multiplies them, and knows of which types.
    """
    kinds = [kind_of(source) for source in sources]
    if as_stored and all(kind in GGUF_TYPES for kind in kinds):
        raw = (torch.from_numpy(np.array(source.blocks)) for source in sources)
        pairs = zip(raw, kinds, strict=True)
        parts = [GgufWeight.from_blocks(one, kind, dtype) for one, kind in pairs]
        if rows is None:
            return GgufWeight.joined(parts)
        if len(parts) == 1:
            return parts[0].select(rows)
    plain = [numbers(source, dtype) for source in sources]
    axis = -2 if plain[0].ndim > 1 else 0
    whole = plain[0] if len(plain) == 1 else torch.cat(plain, dim=axis)
    return whole if rows is None else whole.index_select(axis, rows)


def kind_of(stored: Blocks | Entry) -> str:
    """The name of a type, such as "Q4_K"."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(stored.kind).name


def kinds_of(files: GgufFiles) -> list[str]:
    """Types of a model's matrices, those of most bytes first."""
    sizes = Counter[str]()
    for entry in files.entries.values():
        if len(entry.shape) > 1:
            sizes[kind_of(entry)] += entry.size
    return [kind for kind, _ in sizes.most_common()]


def memory_of(
    files: GgufFiles, device: torch.device, dtype: torch.dtype, *, as_stored: bool
) -> int:
    """Bytes of a model's weights where our layers multiply them.

    Args:
        device: where it runs: experts stay in blocks of few types, and on accelerators alone.
        dtype: of numbers.
        as_stored: see `read_gguf`.
    """
    of_experts = () if device.type == "cpu" else PLAIN_TYPES

    def size(entry: Entry) -> int:
        kinds = {2: GGUF_TYPES, 3: of_experts}.get(len(entry.shape), ())
        stays = as_stored and kind_of(entry) in kinds
        return entry.size if stays else prod(entry.shape) * dtype.itemsize

    return sum(map(size, files.entries.values()))


def numbers(stored: Blocks, dtype: torch.dtype) -> Tensor:
    """The numbers [..., out, in] of a tensor."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if (plain := PLAIN.get(stored.kind)) is not None:
        held = torch.empty(stored.shape, dtype=plain)
        held.view(torch.uint8).numpy().reshape(-1)[:] = stored.blocks.reshape(-1)
        return held.to(dtype)
    kind = GGMLQuantizationType(stored.kind)
    blocks = stored.blocks.reshape(-1, stored.blocks.shape[-1])
    found = torch.empty(len(blocks), stored.shape[-1], dtype=dtype)
    step = max(1, AT_ONCE // stored.shape[-1])
    with np.errstate(all="ignore"):  # numbers of a damaged file, which are looked at later
        for start in range(0, len(blocks), step):
            rows = dequantize(blocks[start : start + step], kind)
            found[start : start + step] = torch.from_numpy(rows)
    return found.reshape(stored.shape)
