"""What a format of quantized checkpoints does: it makes a linear layer's weight of tensors."""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError, SpecDecError, one_line
from specdec.layers.packed.gguf import Quantized
from verifiers.formats.lists import Listed

Stored = Tensor | Quantized
"""A weight [..., out, in] in plain numbers or as the checkpoint stores it."""

Parts = Mapping[str, Tensor]
"""Tensors of one linear layer by what follows its name, such as "weight" and "weight_scale"."""

HARMLESS = re.compile(r"bias|scale|zero_point|amax|shape|observer")
"""In last parts of names beside a quantized weight: read elsewhere, or of activations."""

ROTATION = re.compile(r"rotation|hadamard|had_matrix")

INTEGERS = ("tid2eid",)
"""How names of integer tensors end in a model: the experts of each token in DeepSeek-V4."""


class Format(ABC):
    """One way to store weights; each makes itself of a config's `quantization_config`.

    Args:
        bits: see below.
        plain: modules that the config says are not quantized.
        group, stays_packed, widens: see below.

    Attributes:
        required: of each tuple one part has to be there.
        bits: of a number in memory where weights stay packed, with its part of a scale.
        group: most inputs that share a scale where not all do; None also where unknown.
        stays_packed: a packed form of ours says the same; otherwise weights become plain numbers
            when they are read.
        widens: codes take more room in memory than in files.
    """

    required: Sequence[tuple[str, ...]]

    def __init__(
        self,
        bits: float,
        plain: Listed | None = None,
        *,
        group: int | None = None,
        stays_packed: bool = True,
        widens: bool = False,
    ) -> None:
        self.bits, self.group, self.stays_packed, self.widens = bits, group, stays_packed, widens
        self._plain = plain or Listed([])

    @abstractmethod
    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        """The weight of a linear layer, or of all experts of a layer.

        Args:
            module: its name in the checkpoint.
            parts: its tensors, those of `required` among them.

        Returns:
            [..., out, in]: packed, or float32 where our packed form cannot say it.

        Raises:
            CheckpointError: shapes, types or settings that do not go together.
        """

    def weight(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        """As `read`; whatever the tensors are, an error is one line."""
        self.check(module, parts)
        try:
            return self.read(module, parts, dtype)
        except (SpecDecError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"tensors of {module!r} do not go together ({one_line(error)})"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again") from error

    def lists_as_plain(self, module: str) -> bool:
        """Whether the checkpoint's config says that this module is not quantized."""
        return module in self._plain

    def check(self, module: str, parts: Parts) -> None:
        """Whether the tensors are there that this format has.

        Raises:
            CheckpointError: one is missing.
        """
        for names in self.required:
            if not any(name in parts for name in names):
                what = f"{module!r} has {', '.join(sorted(parts))} but no {' or '.join(names)}"
                raise CheckpointError(f"{what}; fetch the whole checkpoint again")


def check_known(others: Iterable[str], quantized: Container[str]) -> None:
    """Whether nothing is known of a quantized layer that its weight leaves out, such as a rotation
    or a product to be added.

    Args:
        others: names of tensors that are no parts of a weight.
        quantized: names of layers whose weights are.

    Raises:
        CheckpointError: such a tensor; biases and scales are none.
    """
    for name in others:
        module, _, last = name.rpartition(".")
        if (module in quantized and not HARMLESS.search(last)) or ROTATION.search(name):
            what = f"{name!r} changes what a quantized layer computes and is not read"
            raise CheckpointError(f"{what}; take another checkpoint")


def check_floats(weights: Mapping[str, Stored]) -> None:
    """Whether none of the weights is of codes, which the model would take for what they stand for.

    Args:
        weights: by name, those alone that are numbers in the model.

    Raises:
        CheckpointError: the first that is.
    """
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or name.endswith(INTEGERS):
            continue
        if weight.is_floating_point() and weight.element_size() == 1:
            what = f"{name!r} holds 8-bit floats without a scale"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again")
        if not weight.is_floating_point():
            raise CheckpointError(
                f"{name!r} holds {str(weight.dtype)[6:]} where floats belong, and no"
                f" quantization_config tells what they stand for; take a checkpoint in floats, or"
                f" fetch config.json again"
            )


def per_output(scale: Tensor, module: str, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    """One scale for each output and group of inputs, from one for each block of outputs and inputs.

    Args:
        scale: [..., ceil(out / outputs), ceil(in / inputs)], or those in fewer dimensions.
        shape: [..., out, in] of the weight.
        block: outputs and inputs of a block; the last ones of a weight may be smaller.

    Returns:
        [..., out, ceil(in / inputs)].

    Raises:
        CheckpointError: there are more or fewer scales than blocks.
    """
    *leading, out_features, in_features = shape
    outputs, inputs = block
    grid = [*leading, -(-out_features // outputs), -(-in_features // inputs)]
    odd = scale.ndim >= len(grid) and list(scale.shape) != grid
    if odd or scale.numel() != torch.Size(grid).numel():
        raise CheckpointError(
            f"scales of {module!r} are {list(scale.shape)}, but its weight {list(shape)} has {grid}"
            f" blocks of {outputs} x {inputs}; check quantization_config, or fetch the checkpoint"
            f" again"
        )
    scale = scale.reshape(grid)
    if outputs == 1:
        return scale
    return scale.repeat_interleave(outputs, dim=-2)[..., :out_features, :].contiguous()


def as_number(scale: Tensor) -> Tensor:
    """Scales as float32 or bfloat16, exactly; bytes are powers of two, as in OCP's MX formats.

    Raises:
        TypeError: they are neither floats nor bytes.

    >>> as_number(torch.tensor([0, 126, 129], dtype=torch.uint8)).tolist()
    [5.877471754111438e-39, 0.5, 4.0]
    """
    if scale.dtype != torch.uint8 and not scale.is_floating_point():
        raise TypeError(f"scales are {scale.dtype}")
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return scale if scale.dtype == torch.bfloat16 else scale.float()


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuses a vector with NaN or infinite numbers.

    Those of a matrix end in logits that are not finite; in a bias of experts they would choose
    others without a word.

    Raises:
        CheckpointError: it has some.
    """
    if tensor.ndim < 2 and not (tensor < torch.inf).all():
        what = f"{name!r} holds NaN or infinite numbers"
        raise CheckpointError(f"{what}; fetch the whole checkpoint again")
