"""Families of DFlash drafters by their class: what configs leave unsaid, how layers differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drafters.algorithms import architecture_of
from drafters.attention import LatentSizes
from drafters.dflash.config.config import AttentionGate
from drafters.keys import Keys, require


@dataclass(frozen=True, slots=True)
class Family:
    """What the class of a drafter stands for.

    Attributes:
        defaults: values of keys that its files leave out.
        plain_values: values of keys that the layers have.
        laguna: taps have norms, layers norm the context, and attention is gated.
        gemma: layers are those of Gemma 4.
        mixes_taps: every layer mixes the taps for itself (DFlare).
        latent: attention is latent.
        partial_rope: a stated `partial_rotary_factor` is what its layers turn.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    plain_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    laguna: bool = False
    gemma: bool = False
    mixes_taps: bool = False
    latent: bool = False
    partial_rope: bool = False

    def sizes(self, keys: Keys) -> LatentSizes | None:
        """Sizes of latent attention; None without it; CheckpointError: one is missing."""
        if not self.latent:
            return None
        interleaved = keys.flag("rope_interleave")
        return LatentSizes(
            query_rank=keys.integer("q_lora_rank"),
            rank=keys.required("kv_lora_rank"),
            nope=keys.required("qk_nope_head_dim"),
            rope=keys.required("qk_rope_head_dim"),
            value=keys.required("v_head_dim"),
            interleaved=interleaved is None or interleaved,
        )

    def gate(self, keys: Keys) -> AttentionGate | None:
        """The gate of attention's output, as Laguna's `gating` says; unsaid, one for each head.

        Raises:
            CheckpointError: another kind.
        """
        if not self.laguna:
            return None
        stated = keys.find("gating")
        names: dict[Any, AttentionGate | None] = {
            None: "per-head", True: "per-head", False: None, "disabled": None,
            "per-head": "per-head", "per-element": "per-element",
        }  # fmt: skip
        known = isinstance(stated, bool | str | None) and stated in names
        require(
            known,
            f"gating is {stated!r}; supported: true, false, 'per-head', 'per-element' and"
            f" 'disabled'",
        )
        return names[stated]


_K3 = Family(
    latent=True,
    defaults={"block_size": 7},  # which the published config leaves to the engine's options
    plain_values={
        "attention_bias": (False,),
        "aux_hidden_stream": ("prefix",),
        "mla_use_nope": (False,),
        "mla_use_output_gate": (False,),
    },
)

_RAW_ROWS = Family(defaults={"input_embedding_scale": 1.0})
"""Trained, or run by its authors, on rows of the target's table as they are."""

_FAMILIES = {
    "DFlash2DraftModel": _RAW_ROWS,  # by the dflash package and vLLM
    "Lfm2DSparkDraftModel": _RAW_ROWS,
    # by SpecForge, which trains on a table of its own, as DeepSpec does
    "DSparkDraftModel": _RAW_ROWS,
    "DominoDraftModel": _RAW_ROWS,
    "Qwen3DSparkModel": _RAW_ROWS,
    "K3DSparkModel": _K3,
    "KimiK3DSpark5MLADraftModel": _K3,
    "DFlareDraftModel": Family(mixes_taps=True),
    "QwenDFlareDraftModel": Family(mixes_taps=True),  # its authors' own name
    "DFlashLagunaForCausalLM": Family(laguna=True, partial_rope=True),
    "Gemma4DSparkModel": Family(
        gemma=True,
        partial_rope=True,
        plain_values={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "enable_moe_block": (False,),
            "hidden_size_per_layer_input": (0,),
            "num_kv_shared_layers": (0,),
            "use_double_wide_mlp": (False,),
        },
    ),
    # Rows of a block see each other, whatever its windows.
    "MuseGlimmerAssistantModel": Family(
        defaults={"is_causal": False, "input_embedding_scale": 1.0, "vocab_size": 202_048},
        partial_rope=True,
    ),
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a drafter with this `config.json`; plain DFlash for unlisted classes."""
    name = architecture_of(raw)
    if raw.get("speculators_model_type") == "dflare":
        name = "DFlareDraftModel"
    if raw.get("model_type") == "k3_dspark":
        name = "K3DSparkModel"
    family = _FAMILIES.get(str(name), Family())
    # ModelOpt leaves the block to SGLang's default, TorchSpec to an option with the same default.
    if "has_embed_tokens" in raw or raw.get("model_type") == "dflash":
        family = replace(family, defaults={"block_size": 16, **family.defaults})
    return family
