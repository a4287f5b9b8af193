"""Which layers of its target an EAGLE-3 head reads, in the two ways that checkpoints count them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from drafters.keys import require, section

IDS = "eagle_aux_hidden_state_layer_ids"
_FEWEST_LAYERS = 4


class StatedTaps(NamedTuple):
    """Tapped layers as a checkpoint states them.

    Attributes:
        layers: 0-based; None where it states none.
        unsure: they are so if their ids count the embeddings, which nothing says. See `taps`.
    """

    layers: tuple[int, ...] | None = None
    unsure: bool = False


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """Layers, 0-based, whose outputs a head reads that names none: entries 2, T // 2 and T - 3 of
    Transformers' hidden states, the first of which are the embeddings.

    Raises:
        CheckpointError: the target has fewer layers than that takes.

    >>> default_taps(32)
    (1, 15, 28)
    """
    require(
        num_target_layers >= _FEWEST_LAYERS,
        "config.json names no tapped layers, and the usual three take a target of at least"
        f" {_FEWEST_LAYERS} layers, not {num_target_layers}; name them as {IDS} in eagle_config",
    )
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def stated_taps(raw: Mapping[str, Any], own: Mapping[str, Any]) -> StatedTaps:
    """The layers that `config.json` names.

    Two ways to count are in use. As `target_layer_ids` (DeepSpec) 0 is the first layer. In
    `eagle_config` it is in a list that holds 0 or 1, as ModelOpt and SpecForge write them; any
    other list is one of entries of hidden states, the embeddings first, as of NVIDIA's
    gpt-oss-120b v3 and of heads for Kimi K2. Elsewhere, as at the top level, the place of
    speculators and vLLM, the embeddings count, too.

    Raises:
        CheckpointError: a malformed list, or lists that name different layers.
    """
    places = [
        (raw, "target_layer_ids"),
        (own, IDS),
        (raw, IDS),
        (section(raw, "transformer_layer_config"), IDS),
    ]
    stated = [
        (place, name, _ids(place[name])) for place, name in places if place.get(name) is not None
    ]
    if not stated:
        return StatedTaps()
    place, name, ids = stated[0]
    from_embeddings = name == IDS and (place is not own or min(ids) > 1)
    layers = tuple(i - from_embeddings for i in ids)
    require(
        min(layers) >= 0,
        f"target layer ids are {list(ids)}; the embeddings cannot be tapped, only outputs of"
        f" layers",
    )
    for _, _, others in stated[1:]:
        same = others in (layers, tuple(layer + 1 for layer in layers))
        require(
            same,
            f"{name} {list(ids)} and another list, {list(others)}, name different layers; take one"
            f" out of config.json",
        )
    unsure = place is not own and name == IDS and ids == default_taps(max(ids[-1], 0) + 4)
    return StatedTaps(layers, unsure)


def taps(stated: StatedTaps, num_target_layers: int) -> tuple[int, ...]:
    """Tapped layers of a target of so many, 0-based: those stated, or a low, a middle, a high one.

    Converters to speculators' layout copy ids of `eagle_config` as they are, though they do not
    count the embeddings there (Qwen3-235B's 1, 46, 90). So ids of the usual layers mean these.

    >>> taps(StatedTaps((0, 45, 89), unsure=True), 94), taps(StatedTaps((0, 45, 89)), 94)
    ((1, 46, 90), (0, 45, 89))
    """
    if stated.layers is None:
        return default_taps(num_target_layers)
    counted = tuple(layer + 1 for layer in stated.layers)
    return (
        counted if stated.unsure and counted == default_taps(num_target_layers) else stated.layers
    )


def _ids(value: object) -> tuple[int, ...]:
    valid = isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
    require(valid, f"target layer ids are {value!r}; they must be a list of integers")
    assert isinstance(value, list)
    return tuple(value)


def settled(stated: StatedTaps, num_target_layers: int | None) -> tuple[int, ...] | None:
    """The stated layers without a doubt of how they are counted; None where none is stated.

    Raises:
        CheckpointError: only the number of the target's layers could tell, which is not known.
    """
    if stated.layers is None or not stated.unsure:
        return stated.layers
    ids = [layer + 1 for layer in stated.layers]
    given = num_target_layers is not None
    require(given, f"{IDS} {ids} may count the embeddings or not; name the target with --model")
    assert num_target_layers is not None
    return taps(stated, num_target_layers)
