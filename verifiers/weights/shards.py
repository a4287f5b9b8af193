"""What one rank of a group has of a target: which slices of its tensors, and which of its heads
(arXiv 1909.08053).

Attention is divided by heads, feed-forward sublayers and every expert by the numbers between their
two products, the vocabulary by tokens; recurrent layers by their heads. So every rank has the same
work whatever experts are chosen. All else is the same on every rank: norms, routers, what latent
attention caches, embeddings of single layers.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.checkpoint.tensor_files import TensorFiles
from specdec.base.errors import UnsupportedModelError
from specdec.layers.packed.gguf import Quantized
from specdec.parallel.group import Group
from verifiers.config.families import family_of
from verifiers.config.shape import head_shape
from verifiers.config.states import attends, is_recurrent, recurrent_of, sizes_of
from verifiers.description import TRANSPOSED, Description
from verifiers.formats.format import Stored

Kind = Literal["slices", "tokens", "first"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a tensor is divided.

    Attributes:
        axis: which is, counted from the last one.
        parts: how long parts beside each other on that axis are, relative to each other; of each a
            rank has its slice.
        shared: how many heads each part has, where these are fewer than the ranks, so that several
            ranks have the same one. 0 divides the part, and so does a missing entry.
        kind: "tokens" are divided though their number may not be a multiple, "first" is a term of a
            sum, which rank 0 alone adds.
    """

    axis: int = -1
    parts: tuple[int, ...] = (1,)
    kind: Kind = "slices"
    shared: tuple[int, ...] = ()


class Shard:
    """One rank's shard of a target.

    Args:
        config: of the whole text model.
        description: of its family, from the config as `sharded` gives it.
        name: how to call the target in messages.

    Raises:
        UnsupportedModelError: there are heads that the ranks do not divide.
    """

    def __init__(self, config: Any, description: Description, group: Group, *, name: str) -> None:
        self.group, self.description, self._name = group, description, name
        for what, count, shared in _heads(config):
            self._check(what, count, shared=shared)
        self._rules = [
            (re.compile(rf"(?:^|\.){expression}$"), rule)
            for expression, rule in _rules(config, description, group.size)
        ]
        self._transposed = description.experts in TRANSPOSED

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's part of a tensor, called `name` by transformers, of this shape.

        Raises:
            UnsupportedModelError: the ranks do not divide it.
        """
        rule, local = self._rule(name), list(shape)
        if rule is not None and rule.kind != "first" and -rule.axis <= len(shape):
            size = shape[rule.axis]
            if rule.kind == "tokens":
                local[rule.axis] = -(-size // self.group.size)
            else:
                local[rule.axis] = sum(map(len, self._slices(name, rule, size)))
        return tuple(local)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Whether the ranks divide all tensors, whose shapes these are, before one is read; errors
        are those of `shape`.
        """
        for name, shape in shapes.items():
            self.shape(name, shape)

    def read(self, name: str, files: TensorFiles, source: str) -> Tensor:
        """This rank's part of a tensor called `source` in the files; nothing else of it is read,
        where it is divided at all.
        """
        rule, shape = self._rule(name), files.shape(source)
        if rule is None or rule.kind == "first" or -rule.axis > len(shape):
            whole = files.read(source)
            return whole if rule is None else self._plain_part(name, rule, whole)
        axis = len(shape) + rule.axis
        parts = [files.read(source, axis, piece) for piece in self._slices(name, rule, shape[axis])]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
        return self._padded(rule, whole, shape[axis])

    def part(self, name: str, whole: Stored) -> Stored:
        """This rank's part of a tensor that is there; a copy.

        Raises:
            UnsupportedModelError: the ranks do not divide it.
        """
        rule = self._rule(name)
        if rule is None:
            return whole
        if isinstance(whole, Quantized):
            return self._packed_part(name, rule, whole)
        return self._plain_part(name, rule, whole)

    def _plain_part(self, name: str, rule: _Rule, whole: Tensor) -> Tensor:
        if -rule.axis > whole.ndim:
            return whole  # which will be refused for its shape
        if rule.kind == "first":
            return whole if self.group.rank == 0 else torch.zeros_like(whole)
        size = whole.shape[rule.axis]
        pieces = self._slices(name, rule, size)
        parts = [whole.narrow(rule.axis, piece.start, len(piece)) for piece in pieces]
        return self._padded(rule, torch.cat(parts, dim=rule.axis), size)

    def _packed_part(self, name: str, rule: _Rule, whole: Quantized) -> Quantized:
        # Packed experts lie as [E, out, in] whichever way round transformers has them.
        axis = -3 - rule.axis if self._transposed and len(whole.shape) == 3 else rule.axis
        pieces = self._slices(name, rule, whole.shape[axis])
        if axis == -2:
            rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
            return whole.select(rows.to(whole.device))
        (piece,) = pieces
        if not (whole.divides(piece.start) and whole.divides(piece.stop)):
            raise self._undivided(name, whole.group, whole.in_features)
        return whole.inputs(piece.start, piece.stop)

    def check_groups(self, name: str, shape: Sequence[int], group: int) -> None:
        """Whether the ranks divide a packed tensor with a scale for every `group` inputs; the rest
        is as in `shape`.
        """
        rule = self._rule(name)
        if rule is None or rule.kind != "slices":
            return
        inputs = shape[rule.axis]
        outputs = -2 if not (self._transposed and len(shape) == 3) else -1
        if rule.axis != outputs and group < inputs and inputs // self.group.size % group:
            raise self._undivided(name, group, inputs)

    def _undivided(self, name: str, group: int, inputs: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{name!r} of target {self._name!r} has scales for groups of {group} of its {inputs}"
            f" inputs, which {self.group.size} ranks do not divide; start fewer ranks, or unpack"
            f" them: weights 'bfloat16'"
        )

    def _rule(self, name: str) -> _Rule | None:
        for expression, replacement in self.description.names:
            name = re.sub(expression, replacement, name)
        return next((rule for expression, rule in self._rules if expression.search(name)), None)

    def _slices(self, name: str, rule: _Rule, size: int) -> list[range]:
        """Slices of an axis of that size that this rank has, in order."""
        if rule.kind == "tokens":
            each = -(-size // self.group.size)
            ends = [min(rank * each, size) for rank in (self.group.rank, self.group.rank + 1)]
            return [range(*ends)]
        slices, start, unit = [], 0, sum(rule.parts)
        for part, heads in zip_longest(rule.parts, rule.shared, fillvalue=0):
            length = size * part // unit
            group = self._of_heads(heads) if heads else self.group
            if size % unit or length % group.size:
                self._check(f"{length} numbers on axis {rule.axis} of {name!r}", length)
            own = group.shard(length)
            slices.append(range(start + own.start, start + own.stop))
            start += length
        return slices

    def _of_heads(self, heads: int) -> Group:
        """Ranks as if they were as many as there are heads: those that share one are the same."""
        return replace(self.group, rank=self.group.rank * heads // self.group.size, size=heads)

    def _padded(self, rule: _Rule, part: Tensor, size: int) -> Tensor:
        """With zeros for tokens that there are not."""
        if rule.kind != "tokens":
            return part
        missing = -(-size // self.group.size) - part.shape[rule.axis]
        return F.pad(part, (0, 0) * (-1 - rule.axis) + (0, missing)) if missing else part

    def _check(self, what: str, count: int, *, shared: bool = False) -> None:
        ranks = self.group.size
        if count % ranks and not (shared and ranks % count == 0):
            raise UnsupportedModelError(
                f"target {self._name!r} has {what}, which {ranks} ranks do not divide; start"
                f" {gcd(count, ranks)} or another divisor{' or multiple' * shared} of {count}"
            )


def sharded(config: Any, group: Group | None) -> Any:
    """The config as `verifiers.config.shape` and `verifiers.building.recurrent` read it: with as
    many heads as a rank has of them.
    """
    if group is None:
        return config
    local = copy.copy(config)
    local.ranks = group.size
    return local


def _heads(config: Any) -> Iterator[tuple[str, int, bool]]:
    """What has to divide, in words, its number, and whether more ranks may share each."""
    for layer in range(config.num_hidden_layers):
        if attends(config, layer):
            heads, kv_heads, *_ = head_shape(config, layer)
            yield f"{heads} attention heads", heads, False
            if not family_of(config).latent:
                yield f"{kv_heads} key and value heads", kv_heads, True
        if is_recurrent(config, layer) and recurrent_of(config).rule != "convolution":
            sizes = sizes_of(config)
            yield f"{sizes.value_heads} heads of recurrent layers", sizes.value_heads, False
            yield f"{sizes.key_heads} groups of such heads that share keys", sizes.key_heads, False


def _rules(config: Any, description: Description, ranks: int) -> Iterator[tuple[str, _Rule]]:
    """Ends of names, once a family's are those of `Description.names`, and how such tensors are
    divided; the first one counts.
    """
    tables = ("embed_tokens", "lm_head")
    yield from ((rf"{name}\.weight", _Rule(-2, kind="tokens")) for name in tables)
    yield r"lm_head\.bias", _Rule(-1, kind="tokens")
    yield from _key_rules(config, description, ranks)
    pairs = (1, 1)
    outputs: list[tuple[str, tuple[int, ...]]] = [
        (r"self_attn\.(?:q|g|q_b|kv_b)_proj", (1,)),
        (r"self_attn\.linear_q_adapter_list\.\d+\.1", (1,)),
        (r"gate_up_proj_adapter_list\.\d+\.1", pairs),
        (r"(?:mlp|feed_forward|shared_experts?|experts\.\d+)\.(?:gate|up)_proj", (1,)),
        (r"(?:mlp|feed_forward|shared_experts?)\.gate_up_proj", pairs),
    ]
    if any(is_recurrent(config, layer) for layer in range(config.num_hidden_layers)):
        yield from _recurrent_rules(config)
        outputs += _recurrent_outputs(config)
    for name, parts in outputs:
        yield rf"{name}\.weight", _Rule(-2, parts)
        yield rf"{name}\.bias", _Rule(-1, parts)
    yield r"(?:o|down|out)_proj\.weight", _Rule(-1)
    yield r"(?:o|down|out|fc2_latent)_proj\.bias", _Rule(kind="first")
    yield r"self_attn\.sinks", _Rule()
    if description.norms_of_queries == "all heads":
        yield r"self_attn\.q_norm\.weight", _Rule()
    turned = description.experts in TRANSPOSED
    gate_up = (1,) if description.experts == "interleaved" else pairs
    yield r"experts\.gate_up_proj", _Rule(-1 if turned else -2, gate_up)
    yield r"experts\.gate_up_proj_bias", _Rule(-1, gate_up)
    yield r"experts\.up_proj", _Rule(-2)
    yield r"experts\.down_proj", _Rule(-2 if turned else -1)
    yield r"experts\.down_proj_bias", _Rule(kind="first")


def _key_rules(config: Any, description: Description, ranks: int) -> Iterator[tuple[str, _Rule]]:
    """Rules for keys and values; layers of other heads than the first one's have their own."""
    shapes = [head_shape(config, layer) for layer in range(config.num_hidden_layers)]
    first, *_ = shapes
    others = {layer: shape for layer, shape in enumerate(shapes) if shape[:2] != first[:2]}
    places = [*((rf"layers\.{layer}\.", shape) for layer, shape in others.items()), ("", first)]
    for where, (heads, kv_heads, *_) in places:
        shared = kv_heads if kv_heads < ranks else 0
        one, three = _Rule(-2, shared=(shared,)), (heads, kv_heads, kv_heads)
        keys = _Rule(-2, three, shared=(0, shared, shared))
        for name, rule in (
            (r"[kv]_proj", one),
            (r"linear_[kv]_adapter_list\.\d+\.1", one),
            (r"qkv_proj", keys),
        ):
            yield rf"{where}self_attn\.{name}\.weight", rule
            yield rf"{where}self_attn\.{name}\.bias", replace(rule, axis=-1)
        if description.norms_of_queries == "all heads":
            yield rf"{where}self_attn\.k_norm\.weight", _Rule(shared=(shared,))


def _recurrent_rules(config: Any) -> Iterator[tuple[str, _Rule]]:
    """Rules for tensors of recurrent layers that are no projections."""
    rule, sizes = recurrent_of(config).rule, sizes_of(config)
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    channels = {"convolution": (1,), "mamba": (values, keys, keys)}.get(rule, (keys, keys, values))
    if rule == "mamba":  # whose norm has a weight for each number
        yield r"linear_attn\.norm\.weight", _Rule()
    yield r"linear_attn\.conv1d\.weight", _Rule(-3, channels)
    yield r"linear_attn\.conv1d\.bias", _Rule(-1, channels)
    yield r"linear_attn\.[qkv]_conv1d\.weight", _Rule(-3)
    # Kimi's is [1, 1, heads, 1].
    yield r"linear_attn\.A_log", _Rule(-2 if rule == "key decay" else -1)
    yield r"linear_attn\.(?:dt_bias|D)", _Rule()


def _recurrent_outputs(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Rules for projections of recurrent layers."""
    rule, sizes = recurrent_of(config).rule, sizes_of(config)
    if rule == "convolution":
        return [(r"linear_attn\.in_proj", (1, 1, 1))]
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    if rule == "mamba":
        return [(r"linear_attn\.in_proj", (values, values, keys, keys, sizes.value_heads))]
    if rule == "key decay":  # the few numbers of decays and gates are the same on every rank
        return [(r"linear_attn\.(?:q_proj|k_proj|v_proj|in_proj_b|a_proj|z_proj)", (1,))]
    return [
        (r"linear_attn\.in_proj_qkv", (keys, keys, values)),
        (r"linear_attn\.(?:[qkv]_proj|in_proj_(?:qkvz|ba|z|a|b))", (1,)),
    ]
