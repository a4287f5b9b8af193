"""Weights of a local checkpoint, quantized or not, read one by one without transformers."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.base.checkpoint.gguf_names import gguf_file
from specdec.base.checkpoint.tensor_files import TensorFiles
from specdec.base.errors import CheckpointError
from specdec.base.files import user_path
from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.weight import PackedWeight
from specdec.parallel.collectives import all_agree
from specdec.parallel.group import Group
from verifiers.config.families import family_of
from verifiers.config.names import EMBEDDING, HEAD, name_of
from verifiers.config.places import EXPERT, place_of
from verifiers.config.shape import expert_counts
from verifiers.config.wrappers import class_facts, shapes_of, wide_names
from verifiers.description import TRANSPOSED
from verifiers.formats.format import Format, Stored, check_finite, check_floats, check_known
from verifiers.formats.method import format_of, quantization_of
from verifiers.gguf.file import GgufFiles
from verifiers.weights.gguf import read_gguf
from verifiers.weights.shards import Shard

logger = logging.getLogger(__name__)

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What joined experts are made of, outputs of one after the other."""

WITHOUT_GATES = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""The same of experts without gates."""

CONVOLUTIONS = re.compile(r"^(.*\.)q_conv1d\.weight$")
"""Convolutions of queries; transformers has one convolution for queries, keys and values."""


def read_weights(
    path: str | Path,
    config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool,
    shard: Shard | None = None,
) -> dict[str, Stored]:
    """All weights of a target; arguments as of `read_named`, but the folder may be a GGUF file's.

    Returns:
        See `read_named`. The names are those that transformers gives the parameters of the causal
        language model. A head that is tied to the embeddings is left out.

    Raises:
        CheckpointError: see `read_named`.
    """
    path = user_path(path)
    if (file := gguf_file(path)) is not None:
        part = None if shard is None else shard.part
        whole = partial(read_gguf, GgufFiles(file), config, shapes_of(config), part=part)
        weights = whole(device=device, dtype=dtype, as_stored=as_stored)
    else:
        name = partial(name_of, config=config, ignored=class_facts(config).ignored)
        weights = read_named(
            path, config, name, device=device, dtype=dtype, as_stored=as_stored, shard=shard
        )
    _settle_head(weights, config, None if shard is None else shard.group)
    return weights


def read_named(
    path: Path,
    config: Any,
    name: Callable[[str], str | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool,
    shard: Shard | None = None,
) -> dict[str, Stored]:
    """Weights of a checkpoint that `name` has a name for.

    Args:
        config: of the model; of a composite that of its text part.
        name: what a tensor of the files is called here; None leaves it out.
        dtype: of the model. Parameters that its class keeps in float32 stay so.
        as_stored: quantized weights stay packed where a packed form says the same; otherwise all
            become numbers of `dtype`.
        shard: what is wanted of each tensor. Of plain ones nothing else is read; quantized ones are
            read whole, one by one, since their formats differ in what lies where. None for all.

    Returns:
        Tensors by name, for `verifiers.weights.weights.Weights`. Packed experts are [E, out, in]
        whichever way round transformers has them.

    Raises:
        CheckpointError: files or tensors are missing or damaged, or the weights are quantized in a
            way that is not read.
    """
    quantization = quantization_of(path, config)
    form = format_of(quantization) if quantization else None
    files = TensorFiles(path)
    return _Reader(files, config, name, form, device, dtype, as_stored, shard).read_all()


class _Reader:
    """Reads a checkpoint.

    Args:
        files: its tensors.
        form: of quantized weights; None where there are none.
        name, device, dtype, as_stored, shard: see `read_named`.
    """

    def __init__(
        self,
        files: TensorFiles,
        config: Any,
        name: Callable[[str], str | None],
        form: Format | None,
        device: torch.device,
        dtype: torch.dtype,
        as_stored: bool,
        shard: Shard | None,
    ) -> None:
        self._files, self._format, self._device, self._dtype = files, form, device, dtype
        self._as_stored, self._shard = as_stored, shard
        experts = family_of(config).experts
        self._transposed = experts in TRANSPOSED
        self._projections = WITHOUT_GATES if experts == "ungated" else PROJECTIONS
        self._num_experts = (expert_counts(config) or (0, 0))[0]
        self._wide = wide_names(config, dtype)
        self._parts: dict[str, dict[str, str]] = {}  # names in the files, by module and part
        self._plain: dict[str, str] = {}
        for source in files.names:
            target = name(source)
            if target is None:
                continue
            module, part = place_of(target)
            if part is None or (form is None and part != "weight"):
                self._plain[target] = source
            else:
                self._parts.setdefault(module, {})[part] = source
        if form is not None:
            packed = {one for one, parts in self._parts.items() if parts.keys() != {"weight"}}
            check_known(self._plain, packed)
        self._listed: list[str] = []
        self._widened: list[str] = []

    def read_all(self) -> dict[str, Stored]:
        """Every tensor of the model, experts joined."""
        plain = ((name, self._part(name, source)) for name, source in self._plain.items())
        weights: dict[str, Stored] = {name: self._number(name, tensor) for name, tensor in plain}
        experts = self._experts()
        lone = {module for layer in experts.values() for modules in layer for module in modules}
        for module in self._parts:
            if module not in lone:
                weights[self._name(module)] = self._finished(self._stored(module))
        for name, layer in experts.items():
            weights[name] = self._finished(self._joined(layer), one_by_one=True)
        for scope in [found[1] for name in weights if (found := CONVOLUTIONS.match(name))]:
            parts = [self._dense(weights.pop(f"{scope}{part}_conv1d.weight")) for part in "qkv"]
            weights[f"{scope}conv1d.weight"] = torch.cat(parts)
        if self._listed:
            logger.warning(
                "%d modules are quantized though the config lists them as plain, the first being"
                " %s; their scales are used",
                len(self._listed),
                self._listed[0],
            )
        if self._widened:
            logger.warning(
                "%d quantized weights become plain numbers, which take more memory: no packed form"
                " of ours has what %s stores",
                len(self._widened),
                self._widened[0],
            )
        return weights

    def _experts(self) -> dict[str, list[list[str]]]:
        """Modules of experts that lie one by one, by the name of what they are joined to: a list of
        projections for each expert.
        """
        found: dict[tuple[str, str], dict[int, str]] = {}
        for module in self._parts:
            if expert := EXPERT.match(module):
                found.setdefault((expert[1], expert[3]), {})[int(expert[2])] = module
        experts = {}
        for scope in dict.fromkeys(scope for scope, _ in found):
            for joined, projections in self._projections.items():
                parts = {one: found.get((scope, one), {}) for one in projections}
                if not any(parts.values()):
                    continue  # joined in the file
                last = max(number for modules in parts.values() for number in modules)
                if last >= self._num_experts:
                    what = f"{scope} has an expert {last}, but the config says {self._num_experts}"
                    raise CheckpointError(f"{what}; fetch the whole checkpoint again")
                wanted = product(range(self._num_experts), parts)
                for number, projection in wanted:
                    if number not in parts[projection]:
                        what = f"there is no {scope}.{number}.{projection}"
                        raise CheckpointError(f"{what}; fetch the whole checkpoint again")
                experts[f"{scope}.{joined}"] = [
                    [modules[number] for modules in parts.values()]
                    for number in range(self._num_experts)
                ]
        return experts

    def _joined(self, experts: Sequence[Sequence[str]]) -> Stored:
        """[E, out, in] from the modules of each expert."""
        outputs, any_packed = list[Stored](), False
        for modules in experts:
            parts = [self._stored(module) for module in modules]
            if not self._as_stored:
                parts = [self._dense(part) for part in parts]
            any_packed = any_packed or any(isinstance(part, PackedWeight) for part in parts)
            outputs.append(self._side_by_side(parts))
        packed = [output for output in outputs if isinstance(output, PackedWeight)]
        if len(packed) == len(outputs) and PackedWeight.alike(packed):
            return PackedWeight.stacked(packed)
        if any_packed:
            text = "experts of %s are stored in several ways and become plain numbers"
            logger.warning(text, experts[0][0])
        return torch.stack([self._dense(output) for output in outputs])

    def _side_by_side(self, parts: Sequence[Stored]) -> Stored:
        """[out, in] of one expert from its projections."""
        packed = [part for part in parts if isinstance(part, PackedWeight)]
        if len(packed) == len(parts) and PackedWeight.alike(packed):
            return PackedWeight.joined(packed)
        return torch.cat([self._dense(part) for part in parts])

    def _stored(self, module: str) -> Stored:
        """The weight of one linear layer or of joined experts, on the device."""
        sources = self._parts[module]
        name = self._name(module)
        if set(sources) == {"weight"}:
            plain = self._part(name, sources["weight"])
            check_floats({module: plain})
            return self._number(name, plain)
        parts = {part: self._files.read(one).to(self._device) for part, one in sources.items()}
        assert self._format is not None
        source = next(iter(sources.values())).rpartition(".")[0]
        if self._format.lists_as_plain(source):
            self._listed.append(source)
        stored = self._format.weight(source, parts, self._dtype)
        if isinstance(stored, Tensor):
            stored = stored.to(self._dtype)
            if self._as_stored:
                self._widened.append(source)
        if self._shard is None:
            return stored
        # Of plain numbers a rank can have any part.
        return self._shard.part(name, stored if self._as_stored else self._dense(stored))

    def _part(self, name: str, source: str) -> Tensor:
        """What is wanted of a tensor that is not quantized, on the CPU."""
        if self._shard is None:
            return self._files.read(source)
        return self._shard.read(name, self._files, source)

    @staticmethod
    def _name(module: str) -> str:
        """Name of a module's weight; joined experts have the module's own."""
        joined = module.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        return module if joined else f"{module}.weight"

    def _number(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that is not quantized, on the device and in its type."""
        if not tensor.is_floating_point():
            return tensor.to(self._device)
        check_floats({name: tensor})
        check_finite(name, tensor)
        wide = self._wide is not None and self._wide.search(name)
        return tensor.to(self._device, torch.float32 if wide else self._dtype)

    def _dense(self, weight: Stored) -> Tensor:
        """In plain numbers, of experts one by one: they take several times their room."""
        if not isinstance(weight, Quantized):
            return weight.to(self._dtype)
        if len(weight.shape) == 2:
            return weight.dequantized(self._dtype)
        numbers = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
        for expert, target in enumerate(numbers):
            target.copy_(weight.expert(expert).dequantized(self._dtype))
        return numbers

    def _finished(self, weight: Stored, *, one_by_one: bool = False) -> Stored:
        """As `read_weights` returns it: plain experts that were packed, or lay one by one, the way
        round that transformers has them.
        """
        packed = isinstance(weight, Quantized)
        if (packed and self._as_stored) or not (packed or one_by_one):
            return weight
        dense = self._dense(weight)
        return dense.transpose(1, 2).contiguous() if self._transposed and dense.ndim == 3 else dense


def _settle_head(weights: dict[str, Stored], config: Any, group: Group | None) -> None:
    """Leaves out a head that is tied, and makes sure of one that is not; ranks that have parts of
    them do the same.
    """
    own = "model.embeddings.weight"  # as Nemotron-H calls it
    embedding, head = weights.get(EMBEDDING, weights.get(own)), weights.get(HEAD)
    if not getattr(config, "tie_word_embeddings", False):
        if head is None:
            what = f"there is no {HEAD!r} and it is not tied to the embeddings"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again")
    elif embedding is None and head is not None:
        weights[EMBEDDING] = weights.pop(HEAD)
    elif isinstance(embedding, Tensor) and isinstance(head, Tensor):
        same = all_agree(torch.equal(embedding, head), group)
        if same:
            del weights[HEAD]
