"""Which head a `config.json` gives to DFlash's backbone, and its names in checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from drafters.algorithms import stated_algorithm
from drafters.dflash2 import selector
from drafters.domino import gru
from drafters.dspark import markov
from drafters.head import HeadConfig
from drafters.keys import Keys, require
from drafters.lilicorr import lattice
from drafters.xpress import refiner

_PARSERS: dict[str, Callable[[Keys], HeadConfig]] = {
    "dflash2": selector.parse_selector,
    "dspark": markov.parse_markov,
    "domino": gru.parse_domino,
    "lilicorr": lattice.parse_lattice,
    "xpress": refiner.parse_xpress,
}
"""By the name that `drafters.algorithms` gives to the algorithm."""

ALGORITHMS = ("dflash", *_PARSERS)
"""What runs on this backbone."""

HEAD_KEYS = selector.KEYS | markov.KEYS | gru.KEYS | lattice.KEYS | refiner.KEYS
"""All that `config.json` says about heads."""

ARCHITECTURES = {
    "dflash": {"z-lab": "DFlashDraftModel", "speculators": "DFlashSpeculator"},
    "dflash2": {"z-lab": "DFlash2DraftModel", "speculators": "DFlash2DraftModel"},
    "dspark": {"z-lab": "DSparkDraftModel", "speculators": "DSparkSpeculator"},
    "domino": {"z-lab": "DominoDraftModel"},
    "lilicorr": {"z-lab": "LiLiCorrDraftModel"},
    "xpress": {"z-lab": "Qwen3XPressModel", "speculators": "XPressSpeculator"},
}
"""By algorithm and layout; DSpark in z-lab's layout is SpecForge's, and XPress its authors'."""

_RENAMED = {
    # ModelOpt's DSpark.
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
    # What the public dflash package writes itself.
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
    **refiner.RELEASED,
}


def parse_head(algorithm: str, keys: Keys) -> HeadConfig | None:
    """The head of a drafter of this algorithm; None for plain DFlash.

    Raises:
        CheckpointError: a missing or malformed value.
    """
    parse = _PARSERS.get(algorithm)
    return None if parse is None else parse(keys)


def predicts_from_anchor(
    raw: Mapping[str, Any], algorithm: str, keys: Keys, *, all_rows: bool
) -> bool:
    """Whether rows predict the token after their own, see `DFlashConfig.sample_from_anchor`.

    What is stated counts: `sample_from_anchor`, vLLM's `dspark_bonus_anchor`, or `shift_label` of
    SpecForge and ModelOpt. Else it is so with a Markov head, which DeepSpec, SpecForge and ModelOpt
    train so, and for all that DeepSpec calls DSpark; in the layout of speculators, whose first
    releases trained it otherwise, where `all_rows` of a block are recommended as drafts.

    Raises:
        CheckpointError: two of them that disagree.
    """
    bonus = keys.flag("dspark_bonus_anchor")
    answers = {
        "sample_from_anchor": keys.flag("sample_from_anchor"),
        "dspark_bonus_anchor": None if bonus is None else not bonus,
        "shift_label": keys.flag("shift_label"),
    }
    stated = {name: answer for name, answer in answers.items() if answer is not None}
    require(
        len(set(stated.values())) <= 1,
        f"{' and '.join(stated)} disagree about which row predicts the first draft; correct the"
        f" wrong one in config.json",
    )
    trained = "dspark" in (algorithm, stated_algorithm(raw))
    values = iter(stated.values())
    return next(values, trained and (all_rows or "speculators_model_type" not in raw))


def head_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names that the heads' modules have."""
    return _renamed(tensors, _RENAMED)


def written_names(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Tensors under the names that a layout has for them."""
    own = {ours: theirs for theirs, ours in refiner.RELEASED.items()}
    return _renamed(tensors, own if layout == "z-lab" else {})


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors whose names begin otherwise: as the first does that fits, of `names`."""
    starts = {
        name: next((start for start in names if name.startswith(start)), "") for name in tensors
    }
    return {
        names.get(starts[name], "") + name.removeprefix(starts[name]): tensor
        for name, tensor in tensors.items()
    }
