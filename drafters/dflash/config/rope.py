"""RoPE parameters of a DFlash drafter, as its `config.json` states them."""

from collections.abc import Mapping
from typing import Any

from drafters.dflash.config.families import Family
from drafters.keys import Keys, require, rope_sets, rotary_factor
from specdec.layers.rotary.rotary import check_parameters


def rope_parameters(
    keys: Keys, family: Family, windows: tuple[int | None, ...], head_dim: int
) -> dict[str, Any]:
    """RoPE in the Transformers 5 form, from that form or from `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: a missing or malformed value.
    """
    stated = _stated(keys, windows)
    parameters = {
        name: value for name, value in stated.items() if name != "type" and value is not None
    }
    parameters.setdefault("rope_type", stated.get("type", "default"))
    parameters.setdefault("rope_theta", keys.find("rope_theta"))
    if parameters["rope_type"] == "mrope":  # positions of text are the same on all its axes
        parameters["rope_type"] = "default"
    for name in ("rope_dim", "partial_rotary_factor"):
        parameters.pop(name, None)
    factor = _turned_part(keys, family, stated, parameters["rope_type"], head_dim)
    if factor not in (None, 1):
        parameters["partial_rotary_factor"] = factor
    given = parameters["rope_theta"] is not None
    require(given, "config.json lacks rope_theta, RoPE's base frequency")
    check_parameters(parameters)
    return parameters


def _stated(keys: Keys, windows: tuple[int | None, ...]) -> Mapping[str, Any]:
    """The set of the drafter's kind of layers."""
    stated = keys.find("rope_parameters") or keys.find("rope_scaling") or {}
    kinds = {"full_attention" if window is None else "sliding_attention" for window in windows}
    several = isinstance(stated, Mapping) and any(
        isinstance(value, Mapping) for value in stated.values()
    )
    if several and len(kinds) == 1:
        stated = stated.get(*kinds) or {}
    if kinds == {"sliding_attention"}:
        stated = keys.find("swa_rope_parameters") or stated
    flat = isinstance(stated, Mapping) and not any(
        isinstance(value, Mapping) for value in stated.values()
    )
    require(flat, f"RoPE parameters are {stated!r}; one set for all layers is supported")
    return dict(stated)


def _turned_part(
    keys: Keys, family: Family, stated: Mapping[str, Any], rope_type: str, head_dim: int
) -> float | None:
    """The part of a head that is turned; None for the whole.

    `rope_dim` is the width that was trained. A `partial_rotary_factor` is mostly the target's own,
    which came along with a copy of its config: modules of Llama and Qwen3, on which drafters are
    trained, turn the whole head whatever it says. It counts in `dflash_config`, beside MiMo's
    scaled values, and for layers that obey it.
    """
    sets = [parameters for place in keys.places for _, parameters in rope_sets(place)]
    width = Keys(sets).integer("rope_dim")
    if width is not None:
        what = f"rope_dim is {width}; it must lie in [1, {head_dim}], the size of a head"
        require(0 < width <= head_dim, what)
        return rotary_factor(width, head_dim)
    own = Keys(keys.places[:1]).number("partial_rotary_factor")
    if (
        family.partial_rope
        or rope_type == "proportional"
        or keys.find("attention_value_scale") is not None
    ):
        return own or Keys([stated, *keys.places]).number("partial_rotary_factor")
    return own
