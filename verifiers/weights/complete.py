"""Whether the tensors of a checkpoint are those that its config asks for."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from verifiers.config.names import HEAD
from verifiers.config.wrappers import class_facts, shapes_of
from verifiers.formats.format import Stored, check_floats
from verifiers.weights.shards import Shard

logger = logging.getLogger(__name__)


def complete(
    weights: Mapping[str, Stored], config: Any, shard: Shard | None = None
) -> dict[str, Stored]:
    """The weights that the model has a use for, of which none is missing.

    Args:
        weights: as `verifiers.weights.checkpoint.read_weights` returns them.
        shard: what they are; None for all of the model.

    Raises:
        CheckpointError: one is missing, or has another shape.
    """
    shapes: Mapping[str, Sequence[int]] = shapes_of(config)
    if shard is not None:
        shapes = {name: shard.shape(name, shape) for name, shape in shapes.items()}
    check_shapes(weights, shapes, class_facts(config).missed)
    left = sorted(weights.keys() - shapes.keys() - {HEAD})
    if left:
        text = "%d tensors of the files are left out, the first being %s: the model has none such"
        logger.warning(text, len(left), left[0])
    return {name: weight for name, weight in weights.items() if name in shapes or name == HEAD}


def check_shapes(
    weights: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]], ignored: Sequence[str] = ()
) -> None:
    """Whether there is a weight of each of these names, in its shape and of floats.

    Args:
        weights: as `verifiers.weights.checkpoint.read_named` returns them.
        shapes: what is asked for.
        ignored: expressions for names that may be missing.

    Raises:
        CheckpointError: one is missing, or is something else.
    """
    absent = sorted(shapes.keys() - weights.keys())
    missing = [name for name in absent if not any(re.search(one, name) for one in ignored)]
    if missing:
        what = f"it lacks {len(missing)} tensors, the first being {missing[0]!r}"
        raise CheckpointError(f"{what}; fetch the whole checkpoint again")
    check_floats({key: weight for key, weight in weights.items() if key in shapes or key == HEAD})
    for name, shape in shapes.items():
        weight = weights.get(name)
        if weight is None or tuple(weight.shape) == tuple(shape):
            continue
        # which are never transposed
        packed_experts = isinstance(weight, Quantized) and len(shape) == 3
        if not packed_experts or sorted(weight.shape) != sorted(shape):
            what = f"{name!r} is {list(weight.shape)} and the config asks for {list(shape)}"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again")
