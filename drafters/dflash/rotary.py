"""Rotary position embedding of the drafter, independent of the target's."""

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.dflash.config import DFlashConfig
from specdec.errors import CheckpointError


def rope_frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the amplitude of cosine and sine.

    Raises:
        CheckpointError: the RoPE type needs a value that the configuration lacks.
    """
    # mscale and mscale_all_dim describe the target's attention; drafters are trained with YaRN's plain 1 + 0.1 ln(factor).
    parameters = {name: value for name, value in config.rope_parameters.items() if not name.startswith("mscale")}
    with torch.device("cpu"):
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            return 1.0 / parameters["rope_theta"] ** exponents, 1.0
        try:
            base = Qwen3Config(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=parameters,
            )
            inv_freq, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](base, device="cpu")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"RoPE parameters {dict(config.rope_parameters)} are not complete and valid ({error}); correct them in config.json"
            ) from error
        return inv_freq.float(), float(amplitude)


class Rotary:
    """Cosine and sine of positions. Not a module: its frequencies stay float32 whatever the weights are cast to."""

    def __init__(self, config: DFlashConfig) -> None:
        self.inv_freq, self.amplitude = rope_frequencies(config)

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors [..., 1, head_dim] for `rotate`; the axis of 1 is that of the heads."""
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
        angles = position_ids[..., None, None] * self.inv_freq
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of the last axis of `x` [..., heads, head_dim] against each other."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
