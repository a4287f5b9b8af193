"""Which algorithm a drafter's `config.json` names, in the words of the programs that write such files."""

from collections.abc import Mapping
from typing import Any

from drafters.keys import require, section

_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlareDraftModel": "dflash",
    "DFlashLagunaForCausalLM": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DominoDraftModel": "domino",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "K3DSparkModel": "dspark",
    "KimiK3DSpark5MLADraftModel": "dspark",
}

_FAMILIES = {
    "dspark": "DSpark on layers of its own, not Qwen3's",
    "xpress": "XPress, which refines a DFlash block in several passes",
    "dflash": "DFlash on layers of its own, not Qwen3's",
    "peagle": "P-EAGLE, an EAGLE-3 head that drafts in parallel",
    "eagle3": "EAGLE-3, a head of one layer that drafts token by token",
    "eagle": "EAGLE, a head of one layer that drafts token by token",
    "medusa": "Medusa, one head per drafted position",
    "hydra": "Hydra, one head per drafted position",
    "mtp": "multi-token prediction, a layer that belongs to its target",
    "forcausallm": "a language model of its own, which cannot serve as a drafter yet",
}
"""What a name may contain, and what that is; a longer name stands before one that it contains."""


def stated_algorithm(raw: Mapping[str, Any]) -> str:
    """The algorithm that `config.json` names: "dflash", "dspark", ..., or an architecture that is not known.

    Raises:
        CheckpointError: it names none.
    """
    own = section(raw, "dflash_config")
    projector = own.get("projector_type") or raw.get("projector_type")
    name = raw.get("speculators_model_type") or section(raw, "speculators_config").get("algorithm")
    if name is None:
        kinds = ["dspark"] * (raw.get("model_type") == "k3_dspark")  # whose published config names no architecture
        kinds += ["dflash"] * bool(own) + ["medusa"] * ("medusa_num_heads" in raw)
        names = raw.get("architectures") or kinds
        require(
            isinstance(names, list) and bool(names), "config.json names no architecture; a DFlash drafter says DFlashDraftModel"
        )
        name = _ARCHITECTURES.get(names[0], names[0])
    if name == "dflash" and (own.get("selector_rank") or raw.get("selector_rank")) is not None:
        return "dflash2"
    # The projector "dspark" is DFlash's own but for its Markov head.
    return str(projector) if name == "dflash" and projector not in (None, "dspark") else str(name)


def algorithm_of(raw: Mapping[str, Any]) -> str:
    """The algorithm it takes to draft as `config.json` says; DSpark without its Markov head is DFlash in next-token alignment.

    Raises:
        CheckpointError: it names none.
    """
    name = stated_algorithm(raw)
    rank = section(raw, "dflash_config").get("markov_rank") or raw.get("markov_rank")
    return ("dspark" if rank else "dflash") if name in ("dflash", "dspark") else name


def unsupported(name: str) -> str:
    """The message that refuses an algorithm: what it is, and the way out."""
    compact = name.lower().replace("-", "").replace("_", "")
    about = next((f" ({text})" for part, text in _FAMILIES.items() if part in compact), "")
    return f"drafter algorithm {name!r}{about} is not supported yet; use a DFlash drafter, or register a loader for it"
