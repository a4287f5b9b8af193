"""Which algorithm a drafter's `config.json` names, whichever program wrote it."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafters.keys import require, section
from specdec.base.errors import CheckpointError, shown
from specdec.base.registry import DRAFTERS

_ARCHITECTURES = {
    name: algorithm
    for algorithm, names in {
        "dflash": (
            "DFlashDraftModel DFlareDraftModel DFlashLagunaForCausalLM MuseGlimmerAssistantModel "
            "QwenDFlashDraftModel QwenDFlareDraftModel"
        ),
        "dflash2": "DFlash2DraftModel",
        "domino": "DominoDraftModel",
        "lilicorr": "LiLiCorrDraftModel",
        "xpress": "Qwen3XPressModel XPressSpeculator XPressDraftModel",
        "dspark": (
            "Qwen3DSparkModel DSparkDraftModel Lfm2DSparkDraftModel Gemma4DSparkModel "
            "K3DSparkModel KimiK3DSpark5MLADraftModel"
        ),
        "eagle3": (
            "LlamaForCausalLMEagle3 LlamaEagle3DraftModel Qwen3Eagle3Model Eagle3LlamaForCausalLM "
            "EAGLE3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM "
            "Eagle3Qwen3ForCausalLM Eagle3Qwen3vlForCausalLM Eagle3DeepseekV2ForCausalLM "
            "Eagle3DeepseekV3ForCausalLM Eagle3Speculator Eagle3DraftModel Gemma4Eagle3Model"
        ),
        "peagle": (
            "LlamaForCausalLMPeagle PEagleDraftModel PEagleSpeculator PeagleLlamaForCausalLM "
            "PeagleQwen3ForCausalLM"
        ),
        "mtp": "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM MTPDraftModel",
    }.items()
    for name in names.split()
}

_FAMILIES = {
    "dspark": "DSpark on layers of its own, not Qwen3's",
    "dspine": "DSpine, which hands predicted features on between draft layers, in a form that no"
    " public program we could read has",
    "xpress": "XPress on layers of its own, not Qwen3's",
    "dflash": "DFlash on layers of its own, not Qwen3's",
    "eagle3": "EAGLE-3 on layers of its own",
    "eagle": "EAGLE, a head of one layer that drafts token by token",
    "medusa": "Medusa, one head per drafted position",
    "hydra": "Hydra, one head per drafted position",
    "mtp": "multi-token prediction, a layer that belongs to its target",
    "assistant": "a head that reads its target's own cache",
}
"""What a name may contain, and what that is; a longer name stands before one that it contains."""

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the token that stands for EAGLE-3 drafts in parallel; the last two say they are."""

_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How the names of transformers' language models end."""


def stated_algorithm(raw: Mapping[str, Any]) -> str:
    """The algorithm that `config.json` names: "dflash", "dspark", ..., or an unknown architecture.

    Raises:
        CheckpointError: it names none.
    """
    own = section(raw, "dflash_config")
    projector = own.get("projector_type") or raw.get("projector_type")
    name = raw.get("speculators_model_type") or section(raw, "speculators_config").get("algorithm")
    if name is None:
        # whose published config names no architecture
        kinds = ["dspark"] * (raw.get("model_type") == "k3_dspark")
        kinds += ["dflash"] * bool(own) + ["medusa"] * ("medusa_num_heads" in raw)
        name = architecture_of(raw) or next(iter(kinds), None)
        require(
            name is not None,
            "config.json names no architecture; a DFlash drafter says DFlashDraftModel",
        )
        name = _ARCHITECTURES.get(str(name), name)
        if name == "eagle3" and any(raw.get(mask) is not None for mask in MASKS[1:]):
            return "peagle"
    if name == "dflash" and (own.get("selector_rank") or raw.get("selector_rank")) is not None:
        return "dflash2"
    # The projector "dspark" is DFlash's own but for its Markov head.
    return str(projector) if name == "dflash" and projector not in (None, "dspark") else str(name)


def architecture_of(raw: Mapping[str, Any]) -> str | None:
    """The class that `config.json` names first, or None.

    Raises:
        CheckpointError: the list of them is no list of names.
    """
    names = raw.get("architectures") or []
    right = isinstance(names, list) and all(isinstance(name, str) for name in names)
    require(right, f"architectures is {shown(names)}; it must be a list of names")
    return next(iter(names), None)


def algorithm_of(raw: Mapping[str, Any]) -> str:
    """The algorithm it takes to draft as `config.json` says.

    DSpark without its Markov head is DFlash in next-token alignment; a language model drafts.

    Raises:
        CheckpointError: it names none.
    """
    name = stated_algorithm(raw)
    if name in ("dflash", "dspark"):
        own = section(raw, "dflash_config").get("markov_rank")
        return (
            "dspark" if own or raw.get("markov_rank") or raw.get("dspark_markov_rank") else "dflash"
        )
    if not name.endswith(_LANGUAGE_MODELS) or _family(name) is not None:
        return name
    # SafeAILab's own EAGLE-3 heads are called like the model whose layer they have; no such model
    # has a vocabulary for drafts.
    return "draft-model" if raw.get("draft_vocab_size") is None else "eagle3"


def drafter_and_target(raw: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Algorithm and stated target of what can be nothing but a drafter; else None."""
    try:
        algorithm = algorithm_of(raw)
        stated = section(section(raw, "speculators_config"), "verifier").get("name_or_path")
    except CheckpointError:
        return None
    of_speculators = "speculators_model_type" in raw or "speculators_config" in raw
    known = of_speculators or algorithm in DRAFTERS or algorithm == "medusa"
    if algorithm == "draft-model" or not known:
        return None
    target = stated or raw.get("verifier_name_or_path")
    return algorithm, str(target) if target else None


def speculators_sections(
    algorithm: str, drafts: int, target: str | None, architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """What `config.json` says of drafting and of the target in the layout of speculators."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target, "architectures": list(architectures)},
    }
    return {"speculators_model_type": algorithm, "speculators_config": config}


def _family(name: str) -> str | None:
    """The family of heads that a name tells of."""
    compact = name.lower().replace("-", "").replace("_", "")
    return next((text for part, text in _FAMILIES.items() if part in compact), None)


def unsupported(name: str) -> str:
    """The message that refuses an algorithm: what it is, and the way out."""
    family = _family(name)
    about = f" ({family})" if family else ""
    return (
        f"drafter algorithm {name!r}{about} is not supported yet; use a DFlash drafter, or"
        f" register a loader for it"
    )
