"""Where a tensor of Transformers comes from in a GGUF file, and what has to be undone.

Names are those of package `gguf`; what llama.cpp changes stands in its folder `conversion`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from verifiers.config.families import ARCHITECTURES, family_of
from verifiers.description import TRANSPOSED
from verifiers.gguf.entries import Gguf
from verifiers.gguf.file import GgufFiles

Change = Callable[[list[Tensor]], Tensor]

NEXT_TO_WEIGHTS = re.compile(r"(^|\.)(rope_freqs|rope_factors_(long|short))\.weight$|rot_embd")
"""Tensors that are a part of the config."""


class Recipe(NamedTuple):
    """How a tensor is made.

    Attributes:
        sources: names of tensors in the file, whose rows follow each other.
        rows: int64 [out], their order where it is another one; of experts that of each.
        change: makes the tensor from the float32 numbers of the sources, where it takes more.
    """

    sources: tuple[str, ...]
    rows: Tensor | None = None
    change: Change | None = None


class Recipes:
    """Recipes for the tensors of one text model.

    Raises:
        CheckpointError: package gguf does not know the architecture.
    """

    def __init__(self, files: GgufFiles, config: Any) -> None:
        import gguf

        self._files, self._config, self._architecture = files, config, files.architecture
        _, self._gguf = ARCHITECTURES.get(self._architecture, ("", Gguf()))
        self._experts = family_of(config).experts
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        if self._architecture not in numbers:
            raise CheckpointError(
                f"package gguf {gguf.__file__!r} does not know architecture {self._architecture!r};"
                " run: python -m pip install --upgrade gguf"
            )
        layers = config.num_hidden_layers
        self._map = gguf.get_tensor_name_map(numbers[self._architecture], layers)

    def recipe(self, name: str) -> Recipe:
        """Recipe of the tensor that Transformers calls so.

        Raises:
            CheckpointError: the file does not have what it takes.
        """
        for expression, make in _SPECIAL:
            found = expression.search(name)
            if found is not None and (recipe := make(self, name, found)):
                break
        else:
            recipe = self._plain(name)
        missing = [source for source in recipe.sources if source not in self._files.entries]
        if missing:
            what = f"{missing[0]!r}, which {name!r} comes from"
            raise CheckpointError(f"{self._files.path.name!r} lacks {what}; fetch it again")
        return recipe

    def unused(self, used: set[str]) -> list[str]:
        """Tensors that the model should have a use for, but for layers that draft."""
        beyond = re.compile(r"^blk\.(\d+)\.")
        layers, left = self._config.num_hidden_layers, self._files.entries.keys() - used
        drafting = {one for one in left if (found := beyond.match(one)) and int(found[1]) >= layers}
        return sorted(one for one in left - drafting if not NEXT_TO_WEIGHTS.search(one))

    def has(self, source: str) -> bool:
        """Whether the file has such a tensor."""
        return source in self._files.entries

    def _plain(self, name: str) -> Recipe:
        source = self.source(name)
        adds_one = self._gguf.adds_one and not name.endswith("linear_attn.norm.weight")
        if adds_one and name.endswith("norm.weight"):
            return Recipe((source,), change=lambda parts: parts[0] - 1)
        found = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if found is not None and self._gguf.neighbors:
            entry = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            heads = getattr(self._config, entry)
            count = self._files.shape(source)[0] if self.has(source) else 0
            if count % (2 * heads):
                shape = list(self._files.shape(source))
                raise CheckpointError(
                    f"{source!r} of {self._files.path.name!r} is {shape}, of which {heads} heads"
                    f" cannot have pairs of rows; fetch it again"
                )
            return Recipe((source,), rows=halves(count, heads))
        return Recipe((source,))

    def source(self, name: str) -> str:
        """What the file calls a tensor."""
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            what = f"package gguf has no name for {name!r} of {self._architecture!r}"
            raise CheckpointError(f"{what}; run: python -m pip install --upgrade gguf")
        named = str(found)
        whole = named.endswith((".weight", ".bias")) or self.has(named)
        return named if whole else f"{named}.weight"

    def experts(self, name: str, found: re.Match[str]) -> Recipe:
        """Joined experts, or their biases."""
        part, ending = found["part"], "bias" if found["bias"] else "weight"
        begin = f"blk.{_layer(name)}.ffn"
        single = "gate_up" if part == "gate_up_proj" else part.removesuffix("_proj")
        sources: tuple[str, ...] = (f"{begin}_{single}_exps.{ending}",)
        if single == "gate_up" and not self.has(sources[0]):
            sources = (f"{begin}_gate_exps.{ending}", f"{begin}_up_exps.{ending}")
        in_turns = len(sources) == 2 and self._experts == "interleaved"
        turned = ending == "weight" and self._experts in TRANSPOSED
        if not in_turns and not turned:
            return Recipe(sources)

        def change(parts: list[Tensor]) -> Tensor:
            whole = torch.stack(parts, dim=2).flatten(1, 2) if in_turns else torch.cat(parts, dim=1)
            return whole.transpose(1, 2) if turned else whole

        return Recipe(sources, change=change)

    def choice_bias(self, name: str, found: re.Match[str]) -> Recipe:
        """What is added to the scores of experts when they are chosen."""
        block = f"blk.{_layer(name)}"
        sources = [f"{block}.exp_probs_b{ending}" for ending in (".bias", "", ".weight")]
        source = next((one for one in sources if self.has(one)), sources[0])
        return Recipe((source,), change=_as_row if "moe_statics" in name else None)

    def latent(self, name: str, found: re.Match[str]) -> Recipe | None:
        """The projection from latents to keys and values, which newer files have in two parts."""
        block = f"blk.{_layer(name)}"
        if self.has(f"{block}.attn_kv_b.weight"):
            return None
        sources = (f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight")
        return Recipe(sources, change=_keys_and_values)

    def shared_gate(self, name: str, found: re.Match[str]) -> Recipe:
        """The gate of shared experts, which is a vector in the file."""
        return Recipe((f"blk.{_layer(name)}.ffn_gate_inp_shexp.weight",), change=_as_row)

    def convolution(self, name: str, found: re.Match[str]) -> Recipe:
        """A convolution of each channel for itself, which has one dimension less in the file."""
        rows = self._values_behind_keys()

        def change(parts: list[Tensor]) -> Tensor:
            return (parts[0] if rows is None else parts[0][rows]).unsqueeze(1)

        return Recipe((self.source(name),), change=change)

    def decay(self, name: str, found: re.Match[str]) -> Recipe:
        """The logarithm of what states lose, of which the file has the power with its sign."""
        rows = self._values(1)

        def change(parts: list[Tensor]) -> Tensor:
            powers = -parts[0].flatten()
            return torch.log(powers if rows is None else powers[rows])

        return Recipe((f"blk.{_layer(name)}.ssm_a",), change=change)

    def step_bias(self, name: str, found: re.Match[str]) -> Recipe:
        """What is added to the widths of steps."""
        return Recipe((f"blk.{_layer(name)}.ssm_dt.bias",), rows=self._values(1))

    def of_mamba(self, name: str, found: re.Match[str]) -> Recipe:
        """Vectors, which the file has as matrices."""
        part = "ssm_d" if found[1] == "D" else "ssm_norm.weight"
        return Recipe((f"blk.{_layer(name)}.{part}",), change=lambda parts: parts[0].flatten())

    def shared_mlp(self, name: str, found: re.Match[str]) -> Recipe:
        """Granite's MLP, that of shared experts where there are others."""
        begin, mixed = f"blk.{_layer(name)}.ffn", bool(self._config.num_local_experts)
        end = "_shexp.weight" if mixed else ".weight"
        parts = ("gate", "up") if found["part"] == "input" else ("down",)
        return Recipe(tuple(f"{begin}_{part}{end}" for part in parts))

    def router(self, name: str, found: re.Match[str]) -> Recipe | None:
        """The router of Gemma 4's experts, with factors that are no weights, and of Granite's."""
        ends = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
        return Recipe((f"blk.{_layer(name)}.{ends.get(found['part'], 'ffn_gate_inp.weight')}",))

    def linear_rows(self, name: str, found: re.Match[str]) -> Recipe | None:
        """Projections to what value heads have."""
        if not self._gguf.groups_values:
            return None
        z = self._values(self._config.linear_value_head_dim)
        rows = {"qkv": self._values_behind_keys(), "z": z}.get(found["part"], self._values(1))
        return Recipe((self.source(name),), rows=rows)

    def linear_output(self, name: str, found: re.Match[str]) -> Recipe | None:
        """The projection from them."""
        if not self._gguf.groups_values:
            return None
        columns = self._values(self._config.linear_value_head_dim)
        return Recipe((self.source(name),), change=lambda parts: parts[0][:, columns])

    def linear_inputs(self, name: str, found: re.Match[str]) -> Recipe:
        """Qwen3-Next's projection: for each key head its query, key, values and gates."""
        block, config = f"blk.{_layer(name)}", self._config
        key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        value_dim = config.linear_num_value_heads // key_heads * config.linear_value_head_dim
        parts, start = [], 0
        for width in (key_dim, key_dim, value_dim, value_dim):
            end = start + key_heads * width
            parts.append(torch.arange(start, end).unflatten(0, (key_heads, width)))
            start = end
        sources = (f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight")
        return Recipe(sources, rows=torch.cat(parts, dim=1).flatten())

    def _values(self, width: int) -> Tensor | None:
        """The order of rows of value heads, `width` in each; None where it is the file's."""
        if not self._gguf.groups_values:
            return None
        config = self._config
        heads = config.linear_num_key_heads
        shared = config.linear_num_value_heads // heads
        rows = torch.arange(heads * shared * width).unflatten(0, (shared, heads, width))
        return rows.transpose(0, 1).flatten()

    def _values_behind_keys(self) -> Tensor | None:
        """The same where the rows of queries and keys stand before them."""
        if not self._gguf.groups_values:
            return None
        values = self._values(self._config.linear_value_head_dim)
        assert values is not None
        keys = 2 * self._config.linear_num_key_heads * self._config.linear_key_head_dim
        return torch.cat([torch.arange(keys), values + keys])

    def turned(self, name: str, found: re.Match[str]) -> Recipe | None:
        """GPT-2's projections."""
        if not self._gguf.transposed:
            return None
        return Recipe((self.source(name),), change=lambda parts: parts[0].T)


def _as_row(parts: list[Tensor]) -> Tensor:
    return parts[0].reshape(1, -1)


def _keys_and_values(parts: list[Tensor]) -> Tensor:
    """[heads * (keys + values), rank] from [heads, rank, keys] and [heads, values, rank]."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def halves(count: int, heads: int) -> Tensor:
    """int64 [count], the order in which Transformers has rows that llama.cpp rotates by neighbors.

    It rotates row i of a head with row i + head_dim / 2.

    >>> halves(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return torch.arange(count).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten()


def _layer(name: str) -> int:
    found = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])


_MAKE: dict[str, Callable[[Recipes, str, re.Match[str]], Recipe | None]] = {
    r"\.experts\.(?P<part>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?$": Recipes.experts,
    r"\.(e_score_correction_bias|expert_bias)$": Recipes.choice_bias,
    r"\.kv_b_proj\.weight$": Recipes.latent,
    r"\.shared_expert_gate\.weight$": Recipes.shared_gate,
    r"\.conv1d\.weight$|\.conv\.conv\.weight$": Recipes.convolution,
    r"\.A_log$": Recipes.decay,
    r"\.dt_bias$": Recipes.step_bias,
    r"\.mamba\.(D$|norm\.weight$)": Recipes.of_mamba,
    r"\.shared_mlp\.(?P<part>input|output)_linear\.weight$": Recipes.shared_mlp,
    r"\.router\.(?P<part>weight|scale|per_expert_scale)$": Recipes.router,
    r"\.linear_attn\.in_proj_(?P<part>qkv|z|a|b)\.weight$": Recipes.linear_rows,
    r"\.linear_attn\.in_proj_qkvz\.weight$": Recipes.linear_inputs,
    r"\.linear_attn\.out_proj\.weight$": Recipes.linear_output,
    r"\.(c_attn|c_proj|c_fc)\.weight$": Recipes.turned,
}
_SPECIAL = [(re.compile(expression), make) for expression, make in _MAKE.items()]
"""How tensors are made of which more is to be said than their names."""
