"""Tiny Gemma 4 assistants on disk, and transformers' own classes with the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, Gemma4TextConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import plain_model, tiny_tokenizer

WIDTH = 24
"""Of an assistant's layers; its targets are wider."""
TOKENS = VOCAB + 1
"""Of targets and assistants, so that they make clusters of two."""


@contextmanager
def sharing() -> Iterator[None]:
    """Lets layers of a Gemma 4 read keys and values from outside, and others store them where none
    of its own reads them.

    transformers does both up to 5.17; 5.23 says so, and refuses the one and leaves out the other.
    """

    def modes(config: Any) -> list[str | None]:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        last = {kind: layer for layer, kind in enumerate(config.layer_types[:first])}
        return [
            "reuse" if layer >= first else "store" if layer in last.values() else None
            for layer in range(config.num_hidden_layers)
        ]

    with ExitStack() as stack:
        for kind in {Gemma4TextConfig, type(AutoConfig.for_model(_text_type(unified=True)))}:
            stack.enter_context(
                patch.object(kind, "kv_sharing_modes", property(modes), create=True)
            )
        yield


def _text_type(*, unified: bool) -> str:
    """Of an assistant's layers; the 12B model's are of a type of their own, where transformers has
    it.
    """
    return (
        "gemma4_unified_text"
        if unified and "gemma4_unified_text" in CONFIG_MAPPING_NAMES
        else "gemma4_text"
    )


def assistant_class(config: Any) -> Any:
    """Transformers' class of an assistant, which none of its auto classes has."""
    folder = import_module(f"transformers.models.{config.model_type}")
    return getattr(folder, type(config).__name__.replace("Config", "ForCausalLM"))


def write_assistant(
    path: Path, target: PreTrainedModel, *, clusters: bool = False, seed: int = 3
) -> PreTrainedModel:
    """Saves a random assistant of a Gemma 4 target to `path` and returns it.

    Args:
        path: folder to make.
        target: whose keys and values it reads.
        clusters: whether it scores the tokens of the likeliest clusters alone.
        seed: of its weights.
    """
    torch.manual_seed(seed)
    theirs = target.config
    text: dict[str, Any] = {
        name: getattr(theirs, name) for name in ("vocab_size", "sliding_window", "rope_parameters")
    }
    text |= {
        "head_dim": 16,
        "num_key_value_heads": 2,
        "global_head_dim": 24,
        "max_position_embeddings": 512,
    }
    if getattr(theirs, "attention_k_eq_v", False):
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    kind = _text_type(unified="unified" in theirs.model_type)
    if kind == "gemma4_text":
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = AutoConfig.for_model(
        kind.replace("_text", "_assistant"),
        text_config=AutoConfig.for_model(
            kind,
            **text,
            hidden_size=WIDTH,
            intermediate_size=40,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            num_attention_heads=4,
            num_kv_shared_layers=3,
            initializer_range=0.3,
            pad_token_id=0,
        ),
        backbone_hidden_size=theirs.hidden_size,
        use_ordered_embeddings=clusters,
        num_centroids=TOKENS // 2,
        centroid_intermediate_top_k=9,
    )
    with sharing():
        made = assistant_class(config)._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    model: PreTrainedModel = made.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if "projection" in name:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(TOKENS))
    model.save_pretrained(path)
    return model


def gemma4_target(path: Path, name: str, seed: int = 0) -> PreTrainedModel:
    """Saves a tiny Gemma 4 of that name and returns it."""
    with sharing():
        model = plain_model(name, seed, vocab_size=TOKENS, vocab_size_per_layer_input=TOKENS)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model


@torch.inference_mode()
def assistant_logits(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    token_ids: Sequence[int],
    drafts: Sequence[int],
    wrong: str = "",
) -> Tensor:
    """Logits [k, V] of `drafts`, each given those before it, as transformers' `generate` has them
    when nothing was rejected.

    Args:
        target, assistant: transformers' models.
        token_ids: of the prompt and the anchor.
        drafts: k tokens.
        wrong: "position" takes that of the last token that the target has read, "order" puts the
            hidden state first, and "scale" takes raw rows of the embedding table.
    """
    read = target.base_model(
        torch.tensor([list(token_ids[:-1])]), return_shared_kv_states=True, use_cache=False
    )
    hidden, embeddings = read.last_hidden_state[:, -1:], target.get_input_embeddings()
    logits = []
    for token in [token_ids[-1], *drafts[:-1]]:
        embedding = (
            embeddings.weight[None, None, token]
            if wrong == "scale"
            else embeddings(torch.tensor([[token]]))
        )
        halves = [embedding, hidden]
        out = assistant(
            inputs_embeds=torch.cat(halves[::-1] if wrong == "order" else halves, dim=-1),
            position_ids=torch.tensor([[len(token_ids) - (2 if wrong == "position" else 1)]]),
            shared_kv_states=dict(read.shared_kv_states),
        )
        hidden = out.last_hidden_state
        logits.append(out.logits[0, 0])
    return torch.stack(logits)
