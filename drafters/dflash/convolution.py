"""DFlash 2's convolutions as a module: rows of a block mix with those before them."""

import torch
from torch import Tensor, nn

from drafters.dflash.config.config import DFlashConfig
from specdec.layers.ops.grouped_convolution import Side, mix_rows


class DFlashConvolution(nn.Module):
    """`specdec.layers.ops.grouped_convolution` around a sublayer; new ones change nothing."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, taps, group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        assert taps is not None and group is not None
        self.width = config.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * hidden // group, bias=False)
        self.make_identity()

    @torch.no_grad()
    def make_identity(self) -> None:
        """Sets the weights with which both convolutions put out what they are given."""
        self.base_kernel.zero_()[:, 0] = 1
        self.kernel_projection.weight.zero_()

    def kernels(self, hidden: Tensor) -> Tensor:
        """What kernels have of rows [..., H] that the sublayer would be given without one."""
        return self.kernel_projection(hidden)

    def forward(self, x: Tensor, kernels: Tensor, side: Side) -> Tensor:
        """Blocks [..., n * block_size, H], mixed, before the sublayer or after it."""
        return mix_rows(x, kernels, self.base_kernel, self.width, side)
