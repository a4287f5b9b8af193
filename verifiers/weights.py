"""Where a decoder's tensors come from, and joining them into the layers that it runs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.errors import CheckpointError
from specdec.layers.linear import FourBitWeight, Linear, linear

Reorder = Callable[[Tensor], Tensor]
"""Puts the rows of a tensor [out, ...] into another order."""


COMPUTED = ("inv_freq", "embed_scale")
"""How buffers of transformers' modules end that no checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by the names that transformers gives them, on their device and in their type.

    Each is taken once and given up, so that nothing is stored twice once it is joined or laid out anew.

    Attributes:
        tensors: which are left; each is popped, and emptied where it is a model's parameter.
        prefix: before every name.
    """

    tensors: dict[str, Tensor]
    prefix: str = ""

    @classmethod
    def of_model(cls, model: nn.Module) -> "Weights":
        """Those of a transformers model, whose parameters are left empty as they are taken."""
        return cls(dict(model.named_parameters()) | dict(model.named_buffers()))

    def under(self, scope: str) -> "Weights":
        """Those whose names begin with this."""
        return Weights(self.tensors, self.prefix + scope)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self.prefix + name in self.tensors

    def optional(self, name: str) -> Tensor | None:
        """A tensor, or None where there is none."""
        tensor = self.tensors.pop(self.prefix + name, None)
        if tensor is None:
            return None
        taken = tensor.detach()
        tensor.data = taken.new_empty(0)  # whoever else holds the parameter does not keep its memory
        return taken

    def check_all_taken(self) -> None:
        """Whether anything is left beside what transformers computes from the config.

        Raises:
            CheckpointError: a tensor that nobody took, such as a bias, would be missing from what the model computes.
        """
        left = sorted(name for name in self.tensors if not name.endswith(COMPUTED))
        if left:
            raise CheckpointError(
                f"our layers have no use for {len(left)} tensors of the target, the first being {left[0]!r};"
                " load it with fuse=False, which runs it through transformers' modules"
            )

    def tensor(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        found = self.optional(name)
        if found is None:
            raise CheckpointError(f"the target has no tensor {self.prefix + name!r}; fetch the whole checkpoint again")
        return found

    def linear(self, *names: str, reorder: tuple[Reorder | None, ...] = ()) -> Linear:
        """Projections as one, with what they have of biases and four-bit forms.

        Args:
            names: of the projections; the first may be one that the checkpoint joined already, followed by none.
            reorder: one per projection, None where its rows stay; nothing leaves all as they are.
        """
        orders = reorder or (None,) * len(names)
        parts = {field: self._parts(names, field, orders) for field in ("weight", "bias", "codes", "scale", "minimum")}
        weight = parts["weight"]
        assert weight is not None
        four_bit = [part for field in ("codes", "scale", "minimum") if (part := parts[field]) is not None]
        return linear(weight, parts["bias"], four_bit=FourBitWeight(*four_bit) if four_bit else None)

    def _parts(self, names: tuple[str, ...], field: str, orders: tuple[Reorder | None, ...]) -> Tensor | None:
        """One field of all projections; None where they have none."""
        get = self.tensor if field == "weight" else self.optional
        found = [get(f"{name}.{field}") for name in names]
        if any(part is None for part in found):
            return None
        parts = [part if order is None else order(part) for part, order in zip(found, orders, strict=True) if part is not None]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
