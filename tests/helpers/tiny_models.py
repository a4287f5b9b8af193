"""Tiny random models of every supported kind, and engines around them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AXK1Config,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    HYV3Config,
    KimiLinearConfig,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    YoutuConfig,
)

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from drafters.head import HeadConfig
from specdec.attention.selector import select_backend
from specdec.model.core import Verifier
from tests.helpers.tiny_hybrids import hybrid_configs
from tests.helpers.tiny_shapes import shape_configs
from verifiers.config.shape import backend_spec
from verifiers.config.wrappers import text_class
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

VOCAB = 97
WINDOW = 8
SHORT_LEN = 37
"""Up to which LongRoPE has its first frequencies: between the lengths of the tests' sequences."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_WINDOWED = ["sliding_attention", "full_attention"] * 2
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_TEMPERED = {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.8}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama_tied": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_without("head_dim")),
    "qwen2_window": lambda: Qwen2Config(
        **_without("head_dim"), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_WINDOWED
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_WINDOWED,
    ),
    "gemma": lambda: GemmaConfig(**_COMMON),
    "glm4": lambda: Glm4Config(**_COMMON, attention_bias=True, rope_parameters=_PARTIAL),
    "granite": lambda: GraniteConfig(
        **_COMMON,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "olmo2": lambda: Olmo2Config(**_COMMON),
    "olmo3": lambda: Olmo3Config(**_COMMON, sliding_window=WINDOW, layer_types=_WINDOWED),
    "phi3": lambda: Phi3Config(**_COMMON, rope_parameters=_PARTIAL),
    "phi3_long": lambda: Phi3Config(
        **_without("head_dim"),
        original_max_position_embeddings=SHORT_LEN,
        rope_parameters={**_LONG, "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]},
    ),
    "llama_dynamic": lambda: LlamaConfig(
        **_COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_COMMON,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters=_PARTIAL,
    ),
    "llama4": lambda: Llama4TextConfig(
        **_COMMON,
        intermediate_size_mlp=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 1],
        attention_chunk_size=WINDOW,
        floor_scale=5,
        attn_scale=0.7,
    ),
    "ernie4_5": lambda: Ernie4_5Config(**_COMMON, use_bias=True),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **_COMMON,
        use_bias=True,
        moe_intermediate_size=24,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
    ),
    "hy_v3": lambda: HYV3Config(
        **_COMMON,
        mlp_layer_types=["dense", *["sparse"] * 3],
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        router_scaling_factor=1.5,
    ),
    "glm": lambda: GlmConfig(**_COMMON, attention_bias=True, rope_parameters=_PARTIAL),
    "mellum": lambda: MellumConfig(
        **_COMMON,
        sliding_window=WINDOW,
        layer_types=_WINDOWED,
        mlp_layer_types=["dense", "sparse"] * 2,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "olmoe": lambda: OlmoeConfig(
        **_without("head_dim"), num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "seed_oss": lambda: SeedOssConfig(
        **_COMMON, attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **_COMMON,
        v_head_dim=12,
        attention_value_scale=0.6,
        attention_bias=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            kind: {**_PARTIAL, "rope_theta": theta}
            for kind, theta in zip(_WINDOWED, (1e3, 1e4), strict=False)
        },
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "ministral3": lambda: Ministral3Config(**_COMMON, rope_parameters={**_YARN, **_TEMPERED}),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_without("head_dim"),
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,  # two of the others'
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[2],
    ),
    "smollm3": lambda: SmolLM3Config(**_COMMON, no_rope_layers=[1, 0, 1, 0]),
    **hybrid_configs(_COMMON),
    **shape_configs(_COMMON, WINDOW),
}
"""One factory per architecture and feature: grouped heads, windows, sinks, softcaps, experts,
multipliers, tied heads, joined projections, norms after sublayers, layers and numbers that RoPE
leaves alone."""

TOPK = 8

_LATENT: dict[str, Any] = {
    **{
        key: value
        for key, value in _COMMON.items()
        if key not in ("head_dim", "num_key_value_heads")
    },
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_LATENT_MOE: dict[str, Any] = {
    **_LATENT,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
# With few heads in the indexer, a position often scores exactly 0 in all of them, and which of
# several such a row takes is chance.
_INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": TOPK}
LATENT_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**_LATENT_MOE, "q_lora_rank": None}, first_k_dense_replace=1
    ),
    "deepseek_v2_yarn": lambda: DeepseekV2Config(
        **_LATENT_MOE,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        rope_parameters=_YARN,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_LATENT_MOE, first_k_dense_replace=1, rope_parameters=_YARN
    ),
    "deepseek_v3_halves": lambda: DeepseekV3Config(
        **{**_LATENT_MOE, "q_lora_rank": None},
        first_k_dense_replace=1,
        rope_interleave=False,
        attention_bias=True,
    ),
    "deepseek_v32": lambda: DeepseekV32Config(
        **_LATENT_MOE, **_INDEXER, first_k_dense_replace=1, rope_parameters=_YARN
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **_LATENT_MOE,
        **_INDEXER,
        first_k_dense_replace=1,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**_LATENT_MOE),
    "axk1": lambda: AXK1Config(**_LATENT_MOE),
    "mistral4": lambda: Mistral4Config(
        **{**_LATENT_MOE, "n_group": 1},
        first_k_dense_replace=1,
        rope_parameters={**_YARN, **_TEMPERED},
        routed_scaling_factor=1.7,
    ),
    "youtu": lambda: YoutuConfig(**_LATENT),
    "kimi_linear": lambda: KimiLinearConfig(
        **{
            **{key: value for key, value in _LATENT_MOE.items() if key != "n_routed_experts"},
            "q_lora_rank": None,
        },
        num_local_experts=8,
        linear_num_heads=3,
        linear_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
}
"""The same for latent attention: with a compressed query and without, YaRN, both pairings of RoPE,
indexers of every layer and shared ones that choose far fewer positions than there are, a dense
layer before experts, states beside latents.
"""


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in _COMMON.items() if key not in keys}


def plain_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model as transformers alone runs it, eager attention, float32; `changes` are made to its
    config.
    """
    torch.manual_seed(seed)
    config = (CONFIGS | LATENT_CONFIGS)[name]()
    config.tie_word_embeddings = config.tie_word_embeddings and not name.startswith("gemma")
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    model = _from_config(config, "eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if parameter_name.endswith(
                ("router.scale", "per_expert_scale", "e_score_correction_bias")
            ):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            # by default a state forgets all within a token or two
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-2, 0)
            if parameter_name.endswith(("dt_bias", ".D")):
                parameter.normal_()
            if name in hybrid_configs(_COMMON) and parameter_name.endswith(".bias"):
                parameter.normal_(std=0.1)
        for buffer_name, buffer in model.named_buffers():
            keeps_states = name in hybrid_configs(_COMMON) or name in ("kimi_linear", "hy_v3")
            if keeps_states and buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        if name in LATENT_CONFIGS:
            # transformers makes the padding token's row zero, for which all positions score the
            # same in the first indexer.
            model.get_input_embeddings().weight[config.pad_token_id].normal_(
                std=config.initializer_range
            )
    return model


def _from_config(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A causal language model."""
    model: PreTrainedModel = text_class(config)._from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model


def paged_verifier(
    model: PreTrainedModel,
    block_size: int = 4,
    *,
    fuse: bool = True,
    backend: Callable[[Any], Any] | None = None,
    device: str = "cpu",
) -> Verifier:
    """A second model with the same weights behind our paged attention, torch_ref's unless `backend`
    makes another of the spec.
    """
    config = copy.deepcopy(model.config)
    paged = _from_config(config, ATTENTION_NAME)
    paged.load_state_dict(model.state_dict())
    paged.generation_config.eos_token_id = model.generation_config.eos_token_id
    spec = backend_spec(
        config, device=torch.device(device), dtype=torch.float32, block_size=block_size
    )
    attention = backend(spec) if backend is not None else select_backend("torch_ref", spec)
    return verifier_for(paged.to(device), name=config.model_type, backend=attention, fuse=fuse)


@torch.inference_mode()
def plain_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """New tokens of `generate`, greedy, end-of-sequence included."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, the same size as the tiny models' vocabulary."""
    pieces = ["<pad>", "<s>", "</s>", *map(chr, range(32, 32 + VOCAB - 3))]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<pad>")
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def random_dflash(
    verifier: Verifier,
    *,
    block_size: int = 5,
    causal: tuple[bool, bool, bool] = (False, True, False),
    head_dim: int = 8,
    seed: int = 0,
    taps: tuple[int, ...] = (0, 2, 3),
    head: HeadConfig | None = None,
) -> DFlashDrafter:
    """A DFlash drafter with random weights, one full layer and two sliding ones; with a head, the
    anchor's row predicts.
    """
    torch.manual_seed(seed)
    config = DFlashConfig(
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=taps,
        windows=(None, WINDOW, WINDOW),
        causal=causal,
        hidden_size=verifier.hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=verifier.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        num_target_layers=verifier.num_layers,
        sample_from_anchor=head is not None,
        head=head,
    )
    return DFlashDrafter(DFlashModel(config), verifier)


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
