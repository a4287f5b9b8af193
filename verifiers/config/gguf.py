"""The config of a model from what its GGUF file says."""

from specdec.base.errors import UnsupportedModelError
from verifiers.config.families import ARCHITECTURES
from verifiers.gguf.file import Entries, Facts
from verifiers.gguf.rope import rope

COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",  # as many as heads, if nothing is said
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
"""From keys to entries that most configs have."""

TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def config_of(facts: Facts) -> Entries:
    """The entries of a config.json.

    Raises:
        UnsupportedModelError: a family that is not read.
        CheckpointError: the file does not say what it has to.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = facts.files.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{facts.name!r} is of architecture {name!r}, which is not read from GGUF files; these"
            f" are: {', '.join(sorted(ARCHITECTURES))}; take the model's safetensors files"
        )
    for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        facts.need(key)
    if facts("attention.layer_norm_epsilon") is None:
        facts.need("attention.layer_norm_rms_epsilon")
    entries = {entry: value for key, entry in COMMON.items() if (value := facts(key)) is not None}
    entries.setdefault("num_key_value_heads", entries.get("num_attention_heads"))
    layers = facts.need("block_count") - facts("nextn_predict_layers", 0)
    vocab_size = facts.files.shape("token_embd.weight")[0]
    entries |= {"num_hidden_layers": layers, "vocab_size": vocab_size}
    entries["tie_word_embeddings"] = not facts.has("output.weight")
    entries["head_dim"] = _head_dim(facts)
    entries["rope_parameters"] = rope(facts)
    for key, entry in TOKENS.items():
        entries[entry] = facts.files.metadata.get(f"tokenizer.ggml.{key}_token_id")
    model_type, architecture = ARCHITECTURES[name]
    entries |= {"model_type": model_type} | architecture.entries(facts, entries)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(entries["model_type"])
    return {"architectures": [model_class], **entries} if isinstance(model_class, str) else entries


def _head_dim(facts: Facts) -> int:
    """Numbers of a query, which older files do not say."""
    heads, kv_heads = facts.need("attention.head_count"), facts("attention.head_count_kv")
    if (stated := facts("attention.key_length")) is not None:
        return int(stated)
    if "blk.0.attn_q.weight" in facts.files.entries and isinstance(heads, int):
        return facts.files.shape("blk.0.attn_q.weight")[0] // heads
    if "blk.0.attn_qkv.weight" in facts.files.entries and isinstance(kv_heads, int):
        return facts.files.shape("blk.0.attn_qkv.weight")[0] // (heads + 2 * kv_heads)
    return int(facts.need("embedding_length") // (max(heads) if isinstance(heads, list) else heads))
