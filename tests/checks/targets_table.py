"""Makes `docs/targets.md`: which model types run, on what, and what they keep of a request.

    python -m tests.checks.targets_table            prints the page
    python -m tests.checks.targets_table --write    writes it

Every type is judged by the config that transformers has of it by default. Bytes are those of a
model of a size that people know, in bfloat16.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checks.public_targets import data
from verifiers.config.families import ARCHITECTURES, FAMILIES, READ_AS, WRAPPERS, describe
from verifiers.config.wrappers import text_config
from verifiers.needs import Needs, needs_of
from verifiers.support import unsupported_reasons

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"


def _size(
    name: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    **more: Any,
) -> tuple[str, dict[str, Any]]:
    found = {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
        "num_key_value_heads": kv_heads,
    }
    return name, {entry: size for entry, size in found.items() if size is not None} | more


def _mixed(layers: int, kind: str, full: Sequence[int]) -> list[str]:
    """Kinds of layers; some have full attention."""
    return ["full_attention" if layer in full else kind for layer in range(layers)]


_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "axk1": _size("A.X-K1"),
    "bamba": _size("Bamba 9B", attn_layer_indices=[9, 18, 27], mamba_d_state=128),
    "deepseek_v2": _size("DeepSeek-V2", layers=60),
    "deepseek_v3": _size("DeepSeek-V3"),
    "deepseek_v32": _size("DeepSeek-V3.2"),
    "dots1": _size("dots.llm1", n_routed_experts=128, num_experts_per_tok=6),
    "ernie4_5": _size("ERNIE 4.5 0.3B"),
    "ernie4_5_moe": _size("ERNIE 4.5 21B-A3B"),
    "falcon_h1": _size(
        "Falcon-H1 34B",
        layers=72,
        hidden=5120,
        heads=20,
        kv_heads=4,
        head_dim=128,
        mamba_d_ssm=4096,
        mamba_n_heads=32,
        mamba_n_groups=2,
        mamba_d_state=256,
    ),
    "gemma": _size("Gemma 7B"),
    "gemma2": _size("Gemma 2 9B", layers=42, heads=16, kv_heads=8, head_dim=256),
    "gemma3_text": _size(
        "Gemma 3 27B", layers=62, heads=32, kv_heads=16, head_dim=128, sliding_window=1024
    ),
    "glm": _size("GLM-4 9B of 2024"),
    "glm4": _size("GLM-4 9B", layers=40, heads=32, kv_heads=2, head_dim=128),
    "glm4_moe_lite": _size("GLM-4.7-Flash"),
    "glm_moe_dsa": _size("GLM-5"),
    "hy_v3": _size("Hy3"),
    "granite": _size("Granite 3.3 8B", layers=40, hidden=4096, kv_heads=8),
    "granitemoehybrid": _size(
        "Granite 4.0 H Small",
        layers=40,
        kv_heads=8,
        mamba_d_state=128,
        num_local_experts=72,
        num_experts_per_tok=10,
        layer_types=_mixed(40, "linear_attention", [9, 19, 29, 39]),
    ),
    "kimi_linear": _size(
        "Kimi Linear 48B-A3B",
        layer_types=_mixed(27, "linear_attention", [3, 7, 11, 15, 19, 23, 26]),
    ),
    "lfm2": _size(
        "LFM2 1.2B", layers=16, hidden=2048, layer_types=_mixed(16, "conv", [2, 5, 8, 10, 12, 14])
    ),
    "lfm2_moe": _size(
        "LFM2 8B-A1B", layers=24, layer_types=_mixed(24, "conv", [2, 6, 10, 14, 18, 21])
    ),
    "llama4_text": _size("Llama 4 Scout"),
    "mellum": _size("Mellum 2 12B-A2.5B"),
    "mimo_v2_flash": _size("MiMo-V2-Flash"),
    "ministral3": _size("Ministral 3 8B"),
    "mistral": _size("Mistral 7B"),
    "mistral4": _size("Mistral Small 4 119B"),
    "mixtral": _size("Mixtral 8x7B"),
    "nemotron_h": _size(
        "Nemotron 3 Nano 30B-A3B",
        hidden=2688,
        kv_heads=2,
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "olmo2": _size("OLMo 2 7B"),
    "olmo3": _size("OLMo 3 7B"),
    "olmoe": _size("OLMoE 7B-A1B"),
    "olmo_hybrid": _size("OLMo Hybrid 7B"),
    "phi3": _size("Phi-3 mini"),
    "qwen2": _size("Qwen2.5 7B", layers=28, hidden=3584, heads=28, kv_heads=4),
    "qwen2_5_vl_text": _size("Qwen2.5-VL 72B"),
    "qwen2_vl_text": _size("Qwen2-VL 72B"),
    "qwen3_vl_text": _size("Qwen3-VL 8B", layers=36, kv_heads=8),
    "qwen2_moe": _size("Qwen2 57B-A14B", layers=28, hidden=3584, heads=28, kv_heads=4),
    "seed_oss": _size("Seed-OSS 36B"),
    "smollm3": _size("SmolLM3 3B"),
    "youtu": _size("Youtu-LLM"),
    "zamba2": _size("Zamba2 2.7B", n_mamba_heads=80),
}
"""Sizes that the public drafters' targets do not show: a name, and what is not the default of the
type.
"""

_PUBLIC = {
    "glm4_moe": "GLM-4.5", "gemma4_text": "gemma-4-31B-it", "gpt_oss": "gpt-oss-120b",
    "llama": "Llama-3.1-8B-Instruct", "qwen3": "Qwen3-8B", "qwen3_5_moe_text": "Qwen3.5-35B-A3B",
    "qwen3_5_text": "Qwen3.5-27B", "qwen3_moe": "Qwen3-30B-A3B", "qwen3_next": "Qwen3-Next-80B-A3B",
}  # fmt: skip
"""From model types to names in `tests/verifiers/public_targets.json`."""

_USUAL: dict[str, dict[str, Any]] = {
    "laguna": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_attention_heads_per_layer": [48, 64],
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
"""What public models of a type have and its defaults have not."""

_CONTEXT = (
    "Without `--max-model-len` (`EngineConfig.max_model_len`) a request may have"
    " `max_position_embeddings` tokens, or what YaRN and LongRoPE stretch theirs to: `factor` times"
    " `original_max_position_embeddings`. So the edit of `config.json` that model cards give for"
    " long texts is all it takes. Of `linear` and `dynamic` RoPE without an original length some"
    " configs state the length that is stretched, others the result: the stated one counts unless"
    " `--max-model-len` names another. With RoPE, or without positions, more than a model was made"
    " for is allowed, with a line that says so. Positions that are looked up in a table, as those"
    " of GPT-2, end with it, and `dynamic` RoPE does not stretch in Transformers' modules."
)

_LENGTHS = (
    "Beyond `max_position_embeddings`, `dynamic` RoPE changes row by row, as in `generate` of a"
    " freshly loaded model: a prompt has the frequencies of its length, and each further token"
    " those of the length that it makes. So such prompts of different lengths share no prefix."
    " LongRoPE (`longrope`: Phi-3 with 128k, Phi-4-mini) has two sets of frequencies. A request has"
    " one of them throughout: the first where prompt and `max_tokens` together stay within"
    " `original_max_position_embeddings`, else the second. Outputs equal those of `generate`, but"
    " for a request whose prompt is within that length and whose `max_tokens` reaches beyond it:"
    " `generate` changes the set midway. A line says so; a lower `max_tokens` keeps the first set."
)

_TOKENIZERS = (
    "A tokenizer is read from `tokenizer.json`, or made by a class of Transformers from another"
    " vocabulary. Code of a repository is never run. A target with a tiktoken file"
    " (`tiktoken.model`) alone, as in the Kimi K2 repositories, is refused, since such a file does"
    " not say where text is split: put a `tokenizer.json` of the model beside it."
)

_FORMATS = {
    "`auto-round`": (
        "tensors of GPTQ, AWQ gemm, FP8, MXFP4, MXFP8 and NVFP4; bits and groups by layer",
        "packed",
    ),
    "`awq`": ("gemm, 4 bits", "packed"),
    "`bitsandbytes`": (
        "8 bits; NF4 and FP4, with scales that are quantized or not",
        "8 bits packed, others plain",
    ),
    "`compressed-tensors`": (
        "integers of 2 to 8 bits, FP8 by tensor, output or block, MXFP4, MXFP8, NVFP4; neither"
        " sparse nor rotated",
        "packed, but plain with scattered groups",
    ),
    "`fp8`, `fbgemm_fp8`, `mxfp8`": (
        "blocks, outputs, groups of 32 with powers of two, or one scale",
        "packed",
    ),
    "`gptq`": (
        "2 to 8 bits, both layouts of zeros, settings by module",
        "packed, but plain with `desc_act`",
    ),
    "`modelopt`": (
        "FP8 by tensor, output and block, MXFP4, MXFP8, NVFP4 with its relatives, INT4 AWQ, INT8,"
        " mixtures",
        "packed, but plain where AWQ left factors of the inputs",
    ),
    "`mxfp4`": ("the experts of gpt-oss", "packed"),
    "`quark`": (
        "FP8 by tensor, output, block and group, MXFP4, MXFP8, NVFP4, INT4, UINT4, INT8",
        "packed",
    ),
    "GGUF": (
        "all types that package `gguf` makes plain numbers of",
        "what kernels read packed, others plain",
    ),
}

_GGUF = (
    "A GGUF file may stand wherever a checkpoint is named: `FILE.gguf`, a folder with one,"
    " `owner/name:file.gguf` or `owner/name:Q4_K_M` on the hub, any part of a split one. Config,"
    " tokenizer, chat template and the tokens that end answers are the file's own; what they say is"
    " kept below `~/.cache/specdec/gguf`. In a folder with a config.json only the weights are the"
    " GGUF file's. A language model in a GGUF file may be a drafter. What llama.cpp assumes of a"
    " family without a word in the file is assumed here, too. These architectures are read: {}."
)
_GGUF_ON_GPUS = (
    "On a GPU in half precision, weights of the types named below stay packed: our Triton kernels"
    " read codes, scales and minima as they are in the file (joined projections of two types get"
    " one form with room for both, which rounds nothing). In products of up to 64 rows a row has"
    " the same bits whatever rows are beside it. `specdec doctor --run` shows their check as"
    " `blocks`."
)
_GGUF_ON_CPUS = (
    "On a CPU in bfloat16, the default for GGUF files and the embedded model, weights of the types"
    " Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and IQ4_NL are multiplied as they are in the"
    " file. Other checkpoints are computed in float32 on CPUs without bfloat16's instructions."
    " Codes and scales of blocks are exact. Up to 64 rows of a forward are rounded to 8 bits, with"
    " a scale for every 32 numbers; llama.cpp takes one for 256 with the types in `_K`. More rows"
    " are not rounded on a CPU with AMX. A row has the same bits whatever rows are beside it, so"
    " drafts change no token. The C++ of it, and of what a step on a CPU does between products, is"
    " compiled at the first use, which takes a few seconds and needs `g++`, or the compiler that"
    " `CXX` names, options included. The result is kept in `$SPECDEC_CACHE` (`~/.cache/specdec`)"
    " for each source, compiler and processor; where that cannot be written, every start compiles."
    " Without a compiler a line says so, weights become numbers, and plain torch computes the"
    " steps. `--dtype float32` computes with the exact numbers."
)

_STARTS = (
    "The first start of a target asks Transformers' classes what its config means, and importing"
    " them takes longer than the rest of a start. The answers are kept in"
    " `$SPECDEC_CACHE/configs` (`~/.cache/specdec/configs`), until a small file of the checkpoint"
    " or a version changes."
)

_FORMAT_NOTE = (
    "By `quant_method` of `quantization_config`. *Plain* weights are unpacked as they are read,"
    " with a line that says so; those of drafters always are. Integers of up to four bits take half"
    " a byte in memory, those of five to eight a byte. Activations and the cache keep their own"
    " type. Other methods (HQQ, torchao, Quanto, AQLM, MLX, AWQ gemv) are refused by name, as are"
    " integers and 8-bit floats that no `quantization_config` explains."
)

_STATE = (
    "it keeps a recurrent state (state-space model or linear attention), which cannot be"
    " rolled back"
)

_ENCODERS = ("its attention is bidirectional", "it is an encoder-decoder model")


def page() -> str:
    """The whole page."""
    own, theirs, refused = _sorted_types()
    lines = [
        "# Targets",
        "",
        *_lines(
            "Which model types run. `specdec doctor --model NAME` says it of one checkpoint, with"
            " its size and a drafter, before a weight is fetched. This page"
            " is made by `python -m tests.checks.targets_table --write` with Transformers"
            f" {transformers.__version__}."
        ),
        "",
        "## On our own layers",
        "",
        "| model type | size | kept of a request | per token | per request |",
        "|---|---|---|---|---|",
        *_size_lines(own),
        "",
        "In bfloat16; states are float32, with the inputs of the 8 rows of a step.",
        "",
        *_lines(_STARTS),
        "",
        "## How long a request may be",
        "",
        *_lines(_CONTEXT),
        "",
        *_lines(_LENGTHS),
        "",
        "## Tokenizers",
        "",
        *_lines(_TOKENIZERS),
        "",
        "## Quantized weights",
        "",
        "| format | what is read | in memory on a GPU |",
        "|---|---|---|",
        *(f"| {name} | {read} | {stays} |" for name, (read, stays) in _FORMATS.items()),
        "",
        *_lines(_FORMAT_NOTE),
        "",
        "## GGUF files",
        "",
        *_lines(_GGUF.format(", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)))),
        "",
        *_lines(_GGUF_ON_GPUS),
        "",
        *_lines(_GGUF_ON_CPUS),
        "",
        "## Through Transformers' modules",
        "",
        *_lines("The same tokens, slower: " + ", ".join(f"`{name}`" for name in theirs) + "."),
        "",
        "## The text part of multimodal models",
        "",
        *_lines(
            "The tower is left out, and prompts with tokens that stand for pictures or sound are"
            " refused."
        ),
        "",
        "| model type | text part | runs on |",
        "|---|---|---|",
        *_wrapper_lines(),
        "",
        *_lines("".join(f"`{name}` is read as `{other}`." for name, other in READ_AS.items())),
        "",
        "## Refused",
        "",
        *_lines(
            "Encoders, encoder-decoders, multimodal and other composed models that are not named"
            " above, and:"
        ),
        "",
        "| why | model types |",
        "|---|---|",
        *_refusal_lines(refused),
        "",
    ]
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    return wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _sorted_types() -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Types of text models on our own layers, through transformers' modules, and refused, with
    reasons.
    """
    own, theirs, refused = [], [], {}
    described = {name for name, family in FAMILIES.items() if family.describe}
    for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | described):
        try:
            config = AutoConfig.for_model(
                name, **(_USUAL.get(name) or _SIZES.get(name, ("", {}))[1])
            )
        except Exception:  # some have no config by default
            continue
        if name in WRAPPERS or config.sub_configs:
            continue
        if reasons := unsupported_reasons(config):
            if not any(reason in _ENCODERS for reason in reasons):
                refused[name] = reasons
        elif describe(text_config(config)) is not None:
            own.append(name)
        else:
            theirs.append(name)
    return own, theirs, refused


def _refusal_lines(refused: dict[str, list[str]]) -> Iterator[str]:
    """Types with the same reasons on one line."""
    alike: dict[str, list[str]] = {}
    for name, reasons in refused.items():
        words = [re.sub(r"^\w+ does not go", "its class does not go", reason) for reason in reasons]
        if words[0] == _STATE:
            words = [
                word
                for word in words
                if "does not go" not in word and word != "it has layers of type linear_attention"
            ]
        alike.setdefault("; ".join(words), []).append(f"`{name}`")
    for why, names in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"| {why} | {', '.join(names)} |"


def _size_lines(types: Sequence[str]) -> Iterator[str]:
    for model_type in types:
        name, needs = _example(model_type)
        state = f"{needs.request_bytes / 2**20:,.1f} MiB" if needs.request_bytes else ""
        caches, size = "; ".join(needs.caches), f"{needs.token_bytes / 1024:,.1f} KiB"
        yield f"| `{model_type}` | {name} | {caches} | {size} | {state} |"


def _example(model_type: str) -> tuple[str, Needs]:
    """A model of that type by name, and what it needs."""
    if model_type in _PUBLIC:
        name = _PUBLIC[model_type]
        entries: dict[str, Any] = data()["targets"][name]["config"]
    else:
        name, changes = _SIZES.get(model_type, ("default", {}))
        entries = {"model_type": model_type, **changes}
    device, dtype = torch.device("cpu"), torch.bfloat16
    return name, needs_of(
        entries, name=name, device=device, dtype=dtype, gpu_bytes=10**12, total_size=1,
        divides=False,
    )  # fmt: skip


def _wrapper_lines() -> Iterator[str]:
    for name in sorted(WRAPPERS):
        config = AutoConfig.for_model(name)
        text, reasons = text_config(config), unsupported_reasons(config)
        runs = "our own layers" if describe(text) is not None else "Transformers' modules"
        runs = f"refused: {'; '.join(reasons)}" if reasons else runs
        yield f"| `{name}` | `{text.model_type}` | {runs} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints or writes the page; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
