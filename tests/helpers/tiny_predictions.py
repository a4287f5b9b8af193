"""Tiny targets on disk with layers for multi-token prediction, and what transformers' own layers
make of the same weights.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.tiny_models import plain_model, tiny_tokenizer

PARTS = ("embedding_norm", "hidden_norm", "projection", "norm")


class Layout(NamedTuple):
    """Names of public files: of `PARTS`, of layers, and of what stands within layers."""

    parts: Mapping[str, str]
    layers: str
    within: Sequence[tuple[str, str]] = ()
    further: Sequence[str] = ()  # scopes of deeper layers, which are not read

    def name(self, own: str, target_layers: int) -> str:
        """Of a tensor that the helper calls `own`."""
        part, _, rest = own.partition(".")
        if part in self.parts:
            found = f"{self.parts[part]}.{rest}"
        else:
            found = re.sub(r"^model\.layers\.", self.layers, own)
            for old, new in self.within:
                found = re.sub(old, new, found)
        return found.replace("{T}", str(target_layers))


QWEN = Layout(
    dict(
        zip(
            PARTS,
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
            strict=True,
        )
    ),
    "mtp.layers.",
)
APPENDED = Layout(
    {
        part: f"model.layers.{{T}}.{name}"
        for part, name in zip(PARTS, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), strict=True)
    },
    "model.layers.",
    [(r"^model\.layers\.0", "model.layers.{T}")],
)
HUNYUAN = APPENDED._replace(
    parts={**APPENDED.parts, "norm": "model.layers.{T}.final_layernorm"},
    within=[
        *APPENDED.within,
        (r"\.mlp\.gate\.", ".mlp.router.gate."),
        (r"\.mlp\.e_score_correction_bias", ".mlp.expert_bias"),
        (r"\.shared_experts\.", ".shared_mlp."),
    ],
)
ERNIE = Layout(
    {
        part: f"model.{name}.0"
        for part, name in zip(
            PARTS[:3], ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"), strict=True
        )
    },
    "model.mtp_block.",
)
MIMO = Layout(
    {
        part: f"model.mtp.layers.0.{name}"
        for part, name in zip(PARTS, ("enorm", "hnorm", "eh_proj", "final_layernorm"), strict=True)
    },
    "model.mtp.layers.",
    [(r"post_attention_layernorm", "pre_mlp_layernorm"), (r"sinks$", "attention_sink_bias")],
    ["model.mtp.layers.1.", "model.mtp.layers.2."],
)
NEMOTRON = Layout(
    dict(
        zip(
            PARTS,
            (
                "mtp.layers.0.enorm",
                "mtp.layers.0.hnorm",
                "mtp.layers.0.eh_proj",
                "mtp.layers.1.final_layernorm",
            ),
            strict=True,
        )
    ),
    "mtp.layers.",
)
SPECULATORS = Layout(
    {
        part: f"mtp_layers.0.{name}"
        for part, name in zip(
            PARTS,
            ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            strict=True,
        )
    },
    "mtp_layers.",
)

FULL = {"layer_types": ["full_attention"]}
SPARSE = {"mlp_layer_types": ["sparse"]}

CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "qwen3_5": (QWEN, FULL),
    "qwen3_5_moe": (QWEN, FULL),
    "qwen3_next": (QWEN, FULL),
    "mellum": (QWEN, {"layer_types": ["sliding_attention"], **SPARSE}),
    "deepseek_v3": (APPENDED, {"first_k_dense_replace": 0}),
    "deepseek_v32": (APPENDED, {"first_k_dense_replace": 0, **SPARSE}),
    "ernie4_5_moe": (ERNIE, {"moe_layer_start_index": 1}),
    "hy_v3": (HUNYUAN, SPARSE),
    "glm4_moe": (APPENDED, {"first_k_dense_replace": 0}),
    "glm4_moe_lite": (APPENDED, SPARSE),
    "glm_moe_dsa": (APPENDED, {**SPARSE, "indexer_types": ["full"]}),
    "mimo_v2_flash": (MIMO, {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}),
    "nemotron_h": (NEMOTRON, {"layer_types": ["full_attention", "moe"]}),
}
"""For each family its names, and what its layers have otherwise than the target's."""


class Reference(NamedTuple):
    """Layers for multi-token prediction on transformers' own.

    Attributes:
        target: the model.
        layers: a model whose layers and norm they are.
        norms: of the embedding and of the hidden state.
        projection: [H, 2 H].
    """

    target: PreTrainedModel
    layers: PreTrainedModel
    norms: tuple[Any, Any]
    projection: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the helper."""
        named = {
            name: tensor
            for name, tensor in self.layers.state_dict().items()
            if name.startswith("model.layers.")
        }
        embedding_norm, hidden_norm = (norm.weight for norm in self.norms)
        own = {
            "embedding_norm": embedding_norm,
            "hidden_norm": hidden_norm,
            "projection": self.projection,
        }
        own["norm"] = final_norm(self.layers).weight
        return named | {f"{part}.weight": tensor for part, tensor in own.items()}

    def hidden(self, token_ids: Sequence[int], *, raw: bool = False) -> Tensor:
        """Hidden states [T, H] that the target's head is given, or the `raw` ones that its last
        norm is given.
        """
        kept: list[Tensor] = []
        hook = self.target.base_model.layers[-1].register_forward_hook(
            lambda module, given, out: kept.append(first(out)[0])
        )
        normed = self.target.base_model(
            torch.tensor([list(token_ids)]), use_cache=False
        ).last_hidden_state[0]
        hook.remove()
        return kept[0] if raw else normed

    def row(self, embedding: Tensor, hidden: Tensor, *, hidden_first: bool = False) -> Tensor:
        """What the layers are given."""
        halves = [self.norms[0](embedding), self.norms[1](hidden)]
        return torch.cat(halves[::-1] if hidden_first else halves, dim=-1) @ self.projection.T

    def out(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] behind the last norm, and before it."""
        kept: list[Tensor] = []
        hook = self.layers.base_model.layers[-1].register_forward_hook(
            lambda module, given, out: kept.append(first(out)[0])
        )
        normed = self.layers.base_model(
            inputs_embeds=rows[None], use_cache=False
        ).last_hidden_state[0]
        hook.remove()
        return normed, kept[0]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], drafts: Sequence[int], wrong: str = "") -> Tensor:
        """Logits [k, V] of `drafts`, each given those before it, of forwards over the whole text.

        Args:
            token_ids: of the prompt and the anchor.
            drafts: k tokens.
            wrong: "hidden" takes the target's hidden states from before its norm, "order" puts them
                first, "shift" gives a row the token of its own position, and "recursion" takes the
                layers' own from before their norm.
        """
        embed = self.target.get_input_embeddings().weight
        hidden, tokens, found = (
            self.hidden(token_ids[:-1], raw=wrong == "hidden"),
            [*token_ids, *drafts],
            [],
        )
        for draft in range(len(drafts)):
            ahead = 0 if wrong == "shift" else 1
            given = torch.tensor(tokens[ahead : ahead + len(token_ids) - 1 + draft])
            out, raw = self.out(self.row(embed[given], hidden, hidden_first=wrong == "order"))
            found.append(self.target.get_output_embeddings()(out[-1]))
            hidden = torch.cat([hidden, (raw if wrong == "recursion" else out)[-1:]])
        return torch.stack(found)


def first(out: Any) -> Tensor:
    """Hidden states that a layer gives, in a tuple or by themselves."""
    return out[0] if isinstance(out, tuple) else out


def final_norm(model: PreTrainedModel) -> Any:
    """The norm before a model's head."""
    base: Any = model.base_model
    return base.norm_f if hasattr(base, "norm_f") else base.norm


def reference(name: str, seed: int = 0, **entries: Any) -> Reference:
    """A target of that name and layers beside it; `entries` of its config are others."""
    target = plain_model(name, seed, **entries)
    changes = CASES[name][1] if name in CASES else FULL
    config = copy.deepcopy(target.config)
    count = len(changes.get("layer_types") or [0])
    changed = {**entries, **changes, "num_hidden_layers": count}
    layers = plain_model(
        name,
        seed + 1,
        **{entry: value for entry, value in changed.items() if hasattr(config, entry)},
    )
    norm = final_norm(layers)
    if name in CASES and "norm" not in CASES[name][0].parts:
        norm.load_state_dict(final_norm(target).state_dict())
    norms = copy.deepcopy(norm), copy.deepcopy(norm)
    with torch.no_grad():
        for one in norms:
            one.weight.add_(torch.randn_like(one.weight) * 0.3)
    width = config.hidden_size
    return Reference(target, layers, norms, torch.randn(width, 2 * width) * width**-0.5)


def write_target(path: Path, ref: Reference, layout: Layout, *, own: bool = True) -> Path:
    """Saves the target, and if they are its `own` the layers, those of experts one by one, under
    the names of public files.
    """
    config = ref.target.config
    config.num_nextn_predict_layers = int(own)
    ref.target.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    if not own:
        return path
    tensors = load_file(path / "model.safetensors")
    written = {
        one: tensor
        for one, tensor in experts_apart(ref.tensors()).items()
        if "norm" in layout.parts or one != "norm.weight"
    }
    further = {
        layout.name(one, config.num_hidden_layers): tensor for one, tensor in written.items()
    }
    if layout in (APPENDED, HUNYUAN):
        scope = f"model.layers.{config.num_hidden_layers}."
        further |= {
            f"{scope}{name}.weight": tensors["lm_head.weight"].clone()
            for name in ("embed_tokens", "shared_head.head")
        }
    further |= {scope + "mlp.down_proj.weight": torch.zeros(3, 3) for scope in layout.further}
    save_file(
        {name: tensor.contiguous() for name, tensor in (tensors | further).items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


def experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with the experts of a layer one by one, as files have them."""
    apart = {}
    for name, tensor in tensors.items():
        joined = re.match(r"^(.*\.experts)\.(gate_up_proj|up_proj|down_proj)$", name)
        if joined is None:
            apart[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            names = ("gate_proj", "up_proj") if joined[2] == "gate_up_proj" else (joined[2],)
            for part, rows in zip(names, weight.chunk(len(names)), strict=True):
                apart[f"{joined[1]}.{expert}.{part}.weight"] = rows.clone()
    return apart
