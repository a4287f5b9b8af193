"""Tensors of DFlash drafters that other programs wrote, under the names of z-lab's layout."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from drafters.dflash.config.config import DFlashConfig
from drafters.keys import require

_RENAMED = (
    (r"^encoder\.fc\.", "fc."),  # Muse-Glimmer
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^context_proj\.", "fc."),  # Kimi K3
    (r"^context_norm\.", "hidden_norm."),
    (r"^final_norm\.", "norm."),
    (r"^fc_norm\.", "aux_hidden_norms."),
)


def zlab_names(tensors: Mapping[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Tensors by their names in z-lab's layout; joined projections are taken apart.

    Raises:
        CheckpointError: a joined projection has another number of rows than its parts.
    """
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    halves = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    joined = {
        "self_attn.qkv_proj": {"q_proj": query, "k_proj": kv, "v_proj": kv},
        "mlp.gate_up_proj": halves,
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for expression, replacement in _RENAMED:
            name = re.sub(expression, replacement, name)
        module, _, kind = name.rpartition(".")
        parts = next((parts for end, parts in joined.items() if module.endswith(end)), None)
        if parts is None:
            found[name] = tensor
            continue
        rows = sum(parts.values())
        fits = len(tensor) == rows
        require(fits, f"tensor {name} has {len(tensor)} rows, config.json asks for {rows}")
        around = module.rpartition(".")[0]
        split = torch.split(tensor, list(parts.values()))
        found |= {
            f"{around}.{part}.{kind}": rows.contiguous()
            for part, rows in zip(parts, split, strict=True)
        }
    return found
