"""Where a decoder's tensors come from, and joining them into the layers that it runs."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specdec.base.errors import CheckpointError
from specdec.layers.linear import DenseLinear, Linear
from specdec.layers.linear_choice import linear
from specdec.layers.packed.gguf import GgufWeight, Quantized, alike, joined
from specdec.layers.sharded import SummedLinear
from specdec.parallel.group import Group

logger = logging.getLogger(__name__)

Reorder = Callable[[Tensor], Tensor]
"""Puts the rows of a tensor [out, ...] into another order."""


COMPUTED = ("inv_freq", "embed_scale", "mup_vector")
"""How buffers of transformers' modules end that no checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by the names that transformers gives them, on their device and in their type.

    Each is taken once and given up, so that nothing is stored twice once joined or laid out anew.

    Attributes:
        tensors: which are left; each is popped, and emptied where it is a model's parameter.
            Weights of linear layers and of experts may be packed, as the checkpoint stores them.
        prefix: before every name.
        group: the ranks that tensors are divided among, of which this is one; None for whole ones.
        trained: each stays as it is for who trains it, and gradients reach it.
    """

    tensors: dict[str, Tensor | Quantized]
    prefix: str = ""
    group: Group | None = None
    trained: bool = False

    @classmethod
    def of_model(cls, model: nn.Module) -> "Weights":
        """Weights of a transformers model, whose parameters are left empty as they are taken."""
        return cls({**dict(model.named_parameters()), **dict(model.named_buffers())})

    def under(self, scope: str) -> "Weights":
        """Weights whose names begin with this."""
        return replace(self, prefix=self.prefix + scope)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self.prefix + name in self.tensors

    def optional(self, name: str) -> Tensor | None:
        """A tensor, of a packed weight its numbers [..., out, in], or None where there is none."""
        tensor = self.tensors.pop(self.prefix + name, None)
        if tensor is None:
            return None
        if isinstance(tensor, Quantized):
            return tensor.dequantized()
        if self.trained:
            return tensor
        taken = tensor.detach()
        # whoever else holds the parameter does not keep its memory
        tensor.data = taken.new_empty(0)
        return taken

    def check_all_taken(self) -> None:
        """Whether anything is left beside what transformers computes from the config.

        Raises:
            CheckpointError: a tensor that nobody took, such as a bias, would be missing from what
                the model computes.
        """
        left = sorted(name for name in self.tensors if not name.endswith(COMPUTED))
        if left:
            raise CheckpointError(
                f"our layers have no use for {len(left)} tensors of the target, the first being"
                f" {left[0]!r}; load it with fuse=False, which runs it through transformers'"
                f" modules"
            )

    def rename(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Replaces in all names what expressions match, in this order."""
        for name in list(self.tensors) if pairs else ():
            renamed = name
            for expression, replacement in pairs:
                renamed = re.sub(expression, replacement, renamed)
            self.tensors[renamed] = self.tensors.pop(name)

    def scale(self, factors: Sequence[tuple[str, float | Tensor]]) -> None:
        """Multiplies those of these names that there are; packed ones become plain numbers, unless
        they are multiplied by 1.
        """
        for name, factor in factors:
            if self.has(name) and not (torch.as_tensor(factor) == 1).all():
                tensor = self.tensor(name)
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                scaled = wide * torch.as_tensor(factor, dtype=wide.dtype, device=wide.device)
                self.tensors[self.prefix + name] = scaled.to(tensor.dtype)

    def tensor(self, name: str) -> Tensor:
        """A tensor, of a packed weight its numbers [..., out, in].

        Raises:
            CheckpointError: there is none of that name.
        """
        found = self.optional(name)
        if found is None:
            what = f"the target has no tensor {self.prefix + name!r}"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again")
        return found

    def blocks(self, name: str) -> GgufWeight | None:
        """A weight in GGUF's blocks; None, and left where it is, if it is stored in another way."""
        stored = self.tensors.get(self.prefix + name)
        if isinstance(stored, GgufWeight):
            del self.tensors[self.prefix + name]
            return stored
        return None

    def split(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Replaces a projection by several, each of which has the rows int64 [n] of it that are
        named beside it.
        """
        for field in ("weight", "bias"):
            whole: Tensor | Quantized | None = self._packed_one(f"{name}.{field}")
            whole = self.optional(f"{name}.{field}") if whole is None else whole
            if whole is None:
                continue
            for part, rows in parts.items():
                own = whole[rows] if isinstance(whole, Tensor) else _chosen(whole, rows)
                self.tensors[f"{self.prefix}{part}.{field}"] = own

    def experts(self, name: str, *, transposed: bool) -> Tensor | Quantized:
        """The weights [E, out, in] of all experts, packed if the checkpoint is.

        Args:
            transposed: transformers has them as [E, in, out]; packed ones never are.

        Raises:
            CheckpointError: there is none of that name.
        """
        if (stored := self._packed_one(name)) is not None:
            return stored
        weight = self.tensor(name)
        return weight.transpose(1, 2).contiguous() if transposed else weight

    def _packed_one(self, name: str) -> Quantized | None:
        """A packed weight; None, and left where it is, if it is stored in another way."""
        stored = self.tensors.get(self.prefix + name)
        if not isinstance(stored, Quantized):
            return None
        del self.tensors[self.prefix + name]
        return stored

    def alike(self, *names: str) -> bool:
        """Whether projections can be joined as they are stored: packed in one way, or all of them
        in plain numbers.
        """
        found = [self.tensors.get(f"{self.prefix}{name}.weight") for name in names]
        packed = [weight for weight in found if isinstance(weight, Quantized)]
        return not packed or (len(packed) == len(names) and alike(packed))

    def linear(self, *names: str, reorder: tuple[Reorder | None, ...] = ()) -> Linear:
        """Projections as one, with what they have of biases, packed where they are.

        Args:
            names: of the projections; the first may be one that the checkpoint joined already,
                followed by none.
            reorder: one per projection, None where its rows stay; nothing leaves all as they are.

        Raises:
            CheckpointError: a weight is missing.
        """
        orders = reorder or (None,) * len(names)
        bias = self._bias(names, orders)
        packed = self._packed(names, orders)
        if packed is not None:
            return linear(packed, bias)
        make = DenseLinear if self.trained else linear
        return make(self._parts(names, "weight", orders), bias)

    def output(self, name: str) -> Linear:
        """A projection back to the width of the model, of which ranks have parts."""
        return self.summed(self.linear(name))

    def summed(self, part: Linear) -> Linear:
        """A projection whose products are added up over the ranks."""
        return part if self.group is None else SummedLinear(part, self.group)

    def _packed(self, names: Sequence[str], orders: Sequence[Reorder | None]) -> Quantized | None:
        """All projections as one packed weight; None, and all left where they are, unless all are
        packed in one way.
        """
        scoped = [f"{self.prefix}{name}.weight" for name in names]
        stored = [self.tensors.get(name) for name in scoped]
        found = [weight for weight in stored if isinstance(weight, Quantized)]
        if len(found) < len(names) or not alike(found):
            if found:
                text = "%s are stored in several ways and become plain numbers"
                logger.warning(text, ", ".join(scoped))
            return None
        for name in scoped:
            del self.tensors[name]
        parts = [
            part if order is None else _chosen(part, order(torch.arange(part.out_features)))
            for part, order in zip(found, orders, strict=True)
        ]
        return parts[0] if len(parts) == 1 else joined(parts)

    def _bias(self, names: Sequence[str], orders: Sequence[Reorder | None]) -> Tensor | None:
        """The biases of all projections, while their weights are here; zeros for one without, and
        None if all are.
        """
        if not any(self.has(f"{name}.bias") for name in names):
            return None
        for name in names:
            weight = self.tensors.get(f"{self.prefix}{name}.weight")
            if not self.has(f"{name}.bias") and weight is not None:
                self.tensors[f"{self.prefix}{name}.bias"] = torch.zeros(
                    weight.shape[0], dtype=weight.dtype, device=weight.device
                )
        return self._parts(names, "bias", orders)

    def _parts(self, names: Sequence[str], field: str, orders: Sequence[Reorder | None]) -> Tensor:
        """One field of all projections."""
        found = [self.tensor(f"{name}.{field}") for name in names]
        pairs = zip(found, orders, strict=True)
        parts = [part if order is None else order(part) for part, order in pairs]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _chosen(weight: Quantized, rows: Tensor) -> Quantized:
    """Outputs of a packed weight."""
    return weight.select(rows.to(weight.device))
