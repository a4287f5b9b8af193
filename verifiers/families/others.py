"""Families whose layers are transformers' modules, and of which more is to be said."""

from verifiers.family import Family
from verifiers.gguf.entries import LOCAL_COUNTS, NO_WINDOW, Gguf, expert_width, partial_rotation
from verifiers.gguf.file import Entries, Facts


def _gpt2_entries(facts: Facts, entries: Entries) -> Entries:
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
    }
    names |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
    found = {name: entries.pop(entry) for name, entry in names.items()}
    for entry in ("rope_parameters", "num_key_value_heads", "head_dim"):
        entries.pop(entry, None)
    return {**found, "layer_norm_epsilon": facts.need("attention.layer_norm_epsilon")}


FAMILIES = {
    "gpt2": Family(gguf={"gpt2": Gguf(_gpt2_entries, transposed=True)}),
    "minimax_m2": Family(
        gguf={
            "minimax-m2": Gguf(
                expert_width,
                partial_rotation,
                needs={**LOCAL_COUNTS, "rotary_dim": "rope.dimension_count"},
            )
        }
    ),
    "muse_glimmer_text": Family(wrappers=("muse_glimmer",)),
    "starcoder2": Family(
        gguf={
            "starcoder2": Gguf(
                needs={"norm_epsilon": "attention.layer_norm_epsilon"},
                has={"use_bias": "attn_q.bias"},
                fixed=NO_WINDOW,
            )
        }
    ),
}
