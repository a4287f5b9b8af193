"""Optimizers on float32 masters of a model that computes in a lower precision, and the learning
rate over the run.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


class MasterOptimizer:
    """An optimizer whose weights are float32 copies; the model's own weights are cast from them
    after every step.

    The model trains in exactly the type it will draft in, and small updates are not lost to
    rounding. Gradients of several backward passes and of all processes are summed in float32.

    Args:
        model: what is trained, in any floating-point type.
        lr: peak learning rate; each step gives its own factor.
        weight_decay: on matrices.
        clip: largest norm of the gradient.
        ema: decay of a running mean of the masters, 0 for none. It rises to that, so that the first
            weights are soon forgotten.
        kind: "adamw"; or "muon", which moves matrices by their orthogonalized momentum
            (https://kellerjordan.github.io/posts/muon), scaled to the size of AdamW's steps (arXiv
            2502.16982), and the rest by AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        clip: float,
        kind: str = "adamw",
        ema: float = 0.0,
    ) -> None:
        self.names = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._weights: list[Tensor] = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.masters: list[Tensor] = [weight.detach().float().clone() for weight in self._weights]
        self._ema, self._steps = ema, 0
        self._means = [master.clone() for master in self.masters] if ema else []
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        by_muon = [kind == "muon" and master.ndim == 2 for master in self.masters]
        rest = [master for master, chosen in zip(self.masters, by_muon, strict=True) if not chosen]
        groups = [
            {"params": [m for m in rest if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in rest if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.lr, self._clip = lr, clip
        self._parts: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        }
        if any(by_muon):
            matrices = [
                master for master, chosen in zip(self.masters, by_muon, strict=True) if chosen
            ]
            self._parts["muon"] = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def accumulate(self) -> None:
        """Adds the model's gradients to the masters' and clears them."""
        gradients = [
            weight.grad if weight.grad is not None else torch.zeros_like(weight)
            for weight in self._weights
        ]
        torch._foreach_add_(self._gradients(), [gradient.float() for gradient in gradients])
        for weight in self._weights:
            weight.grad = None

    def step(self, weight_sum: Tensor, factor: float) -> Tensor:
        """Updates the weights with the mean gradient, the sums divided by the sum of the loss
        weights.

        Args:
            weight_sum: float32 scalar, of this process.
            factor: of the peak learning rate.

        Returns:
            Norm of the mean gradient before clipping, a scalar on the device.
        """
        gradients = self._gradients()
        if dist.is_initialized():
            flat = torch.cat(
                [gradient.flatten() for gradient in gradients] + [weight_sum.reshape(1)]
            )
            dist.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients] + [1])
            torch._foreach_copy_(
                gradients, [part.view_as(g) for part, g in zip(parts[:-1], gradients, strict=True)]
            )
            weight_sum = parts[-1][0]
        torch._foreach_mul_(gradients, 1.0 / weight_sum.clamp(min=1e-6))
        norm = nn.utils.clip_grad_norm_(self.masters, self._clip)
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = self.lr * factor
            part.step()
        self._steps += 1
        if self._means:
            share = 1 - min(self._ema, (1 + self._steps) / (10 + self._steps))
            torch._foreach_lerp_(self._means, self.masters, share)
        self.publish()
        torch._foreach_zero_(gradients)
        return norm

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all weights are; the last step's are in no loss yet."""
        return bool(torch.stack(torch._foreach_norm(self.masters)).isfinite().all())

    @torch.no_grad()
    def publish(self) -> None:
        """Casts the masters into the model."""
        torch._foreach_copy_(self._weights, self.masters)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the running mean of the weights for a while, if there is one."""
        with torch.no_grad():
            if self._means:
                torch._foreach_copy_(self._weights, self._means)
            try:
                yield
            finally:
                self.publish()

    def state_dict(self) -> dict[str, Any]:
        """Masters by name, the optimizers' own state, and `means` if there are any."""
        states: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        if self._means:
            states["means"] = dict(zip(self.names, self._means, strict=True))
        masters = dict(zip(self.names, self.masters, strict=True))
        return states | {"masters": masters, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, and casts it into the model."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state["masters"][name])
        for name, mean in zip(self.names, self._means, strict=bool(self._means)):
            mean.copy_(state["means"][name])
        self._steps = state["steps"]
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.publish()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters if master.grad is not None]


def lr_factor(progress: float, *, warmup: float, floor: float, linear: bool = False) -> float:
    """Factor of the peak learning rate at `progress` in [0, 1]: a linear rise over `warmup`, then
    half a cosine, or a line, down to `floor`.

    >>> [round(lr_factor(p, warmup=0.1, floor=0.0), 3) for p in (0.05, 0.1, 0.55, 1.0, 1.2)]
    [0.5, 1.0, 0.5, 0.0, 0.0]
    >>> round(lr_factor(0.325, warmup=0.1, floor=0.0, linear=True), 3)
    0.75
    """
    if progress < warmup:
        return progress / warmup
    done = min((progress - warmup) / max(1 - warmup, 1e-9), 1.0)
    height = 1 - done if linear else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (1 - floor) * height
