"""Optimizers on float32 masters of a model in a lower precision, and the learning rate."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

ADAMW = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each weight."""


class MasterOptimizer:
    """An optimizer of float32 copies, from which the model's weights are cast after each step.

    The model trains in exactly the type it will draft in, and small updates are not lost to
    rounding. Gradients of several backward passes and of all processes are summed in float32.

    Several processes share the work by weights: each keeps the copies, gradients and moments of
    some (ZeRO, arXiv 1910.02054), and gives all others the new weights. Of weights that are
    sharded (`drafters.training.loss.sharding`) each process's part is its float32 copy.

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
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shards = {n: p for n, p in trained.items() if isinstance(p, DTensor)}
        named = {n: p for n, p in trained.items() if n not in self._shards}
        self._weights: dict[str, nn.Parameter] = named
        self._shared = dist.is_initialized() and dist.get_world_size() > 1
        world, self._rank = (dist.get_world_size(), dist.get_rank()) if self._shared else (1, 0)
        sizes = {name: weight.numel() for name, weight in named.items()}
        self.owners = owners_of(sizes, world)
        self.masters: dict[str, Tensor] = {
            name: weight.detach().float().clone()
            for name, weight in named.items()
            if self.owners[name] == self._rank
        }
        self.masters |= {name: shard.to_local().detach() for name, shard in self._shards.items()}
        self._ema, self._steps = ema, 0
        self._means = {name: m.clone() for name, m in self.masters.items()} if ema else {}
        for name, master in self.masters.items():
            master.grad = None if name in self._shards else torch.zeros_like(master)
        self._by_muon = {n for n, w in named.items() if kind == "muon" and w.ndim == 2}
        rest = [m for name, m in self.masters.items() if name not in self._by_muon]
        tables = {"params": [m for m in rest if m.ndim >= 2], "weight_decay": weight_decay}
        groups = [tables, {"params": [m for m in rest if m.ndim < 2], "weight_decay": 0.0}]
        self.lr, self._clip = lr, clip
        adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self._parts: list[torch.optim.Optimizer] = [adam]
        matrices = [m for name, m in self.masters.items() if name in self._by_muon]
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)

    def accumulate(self) -> None:
        """Adds the model's gradients to the masters' and clears them, but for shards."""
        for name, weight in self._weights.items():
            found = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradient, weight.grad = found.float(), None
            if self._shared:
                dist.reduce(gradient, self.owners[name])
            if name in self.masters:
                kept = self.masters[name].grad
                assert kept is not None
                kept += gradient

    def step(self, weight_sum: Tensor, factor: float) -> Tensor:
        """Updates the weights with the mean gradient: sums divided by the loss weights' sum.

        Args:
            weight_sum: float32 scalar, of this process.
            factor: of the peak learning rate.

        Returns:
            Norm of the mean gradient before clipping, a scalar on the device.
        """
        for name, shard in self._shards.items():
            found, shard.grad = shard.grad, None
            master = self.masters[name]
            summed = found.to_local() if isinstance(found, DTensor) else torch.zeros_like(master)
            master.grad = summed
        masters, gradients = list(self.masters.values()), self._gradients()
        if self._shared:
            weight_sum = weight_sum.clone()
            dist.all_reduce(weight_sum)
        torch._foreach_mul_(gradients, 1.0 / weight_sum.clamp(min=1e-6))
        norm = nn.utils.get_total_norm(gradients)
        if self._shared:
            squared = norm.square()
            dist.all_reduce(squared)
            norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(masters, self._clip, norm)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr * factor
            part.step()
        self._steps += 1
        if self._means:
            share = 1 - min(self._ema, (1 + self._steps) / (10 + self._steps))
            torch._foreach_lerp_(list(self._means.values()), masters, share)
        self.publish()
        torch._foreach_zero_(gradients)
        for name in self._shards:
            self.masters[name].grad = None
        return norm

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all weights are; the last step's are in no loss yet."""
        shards = [self.masters[name] for name in self._shards]
        norms = torch.stack(torch._foreach_norm([*self._weights.values(), *shards]))
        wrong = (~norms.isfinite()).sum()
        if shards:
            dist.all_reduce(wrong)
        return not wrong

    @torch.no_grad()
    def publish(self) -> None:
        """Casts the masters into the model."""
        self._give(self.masters)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the running mean of the weights for a while, if there is one."""
        if self._ema:
            self._give(self._means)
            self._exchange()
        try:
            yield
        finally:
            if self._ema:
                self._exchange()
            self.publish()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The running means of shards and the shards: the model has no others."""
        for name in self._shards:
            kept = self.masters[name].clone()
            self.masters[name].copy_(self._means[name])
            self._means[name].copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """By name, masters, `means` if there are any, and the optimizers' own numbers; all
        processes call it, and the first has what was saved whatever their number.
        """
        names = [*self._weights, *self._shards]
        kinds = {"masters": {name: self._whole(name, self.masters) for name in names}}
        if self._ema:
            kinds["means"] = {name: self._whole(name, self._means) for name in names}
        own = {name: self._state_of(name) for name in self.masters}
        for kind in (*ADAMW, "momentum_buffer") if self._steps else ():
            some = [n for n in names if (kind == "momentum_buffer") == (n in self._by_muon)]
            mine = {name: own[name][kind] for name in some if name in own}
            kinds[kind] = {name: self._whole(name, mine, of_one=kind == "step") for name in some}
        return {**kinds, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, and casts it into the model."""
        for name, master in self.masters.items():
            master.copy_(self._part(name, state["masters"][name]))
            if self._means:
                self._means[name].copy_(self._part(name, state["means"][name]))
            kinds = ("momentum_buffer",) if name in self._by_muon else ADAMW
            for kind in kinds if state["steps"] else ():
                value = self._part(name, state[kind][name])
                self._state_of(name)[kind] = value.to(master.device).clone()
        self._steps = state["steps"]
        self.publish()

    def _state_of(self, name: str) -> dict[str, Tensor]:
        """What the optimizer of a master keeps for it."""
        part = self._parts[-1 if name in self._by_muon else 0]
        found: dict[str, Tensor] = part.state[self.masters[name]]
        return found

    @torch.no_grad()
    def _give(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            if name in values:
                weight.copy_(values[name])
            if self._shared:
                dist.broadcast(weight.detach(), self.owners[name])

    @torch.no_grad()
    def _whole(self, name: str, mine: Mapping[str, Tensor], *, of_one: bool = False) -> Tensor:
        """A tensor that the owner of a weight has, of the weight's shape or `of_one` number; on the
        CPU where several processes share them, as room for all is not the first one's.
        """
        shard = self._shards.get(name)
        if not self._shared or (of_one and shard is not None):
            return mine[name]
        if shard is not None:
            assert isinstance(shard, DTensor)
            where = shard.device_mesh, shard.placements
            sizes: dict[str, Any] = {"shape": shard.shape, "stride": shard.stride()}
            value = DTensor.from_local(mine[name], *where, **sizes).full_tensor()
            shape = shard.shape
        else:
            weight = self._weights[name]
            shape = torch.Size() if of_one else weight.shape
            value = weight.new_empty(shape, dtype=torch.float32)
            if name in mine:
                value.copy_(mine[name])
            dist.broadcast(value, self.owners[name])
        return value.cpu() if self._rank == 0 else value[:0] if shape else value

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """What this process keeps of a tensor of a weight's shape, or of one number."""
        shard = self._shards.get(name)
        if shard is None or not whole.ndim:
            return whole
        assert isinstance(shard, DTensor)
        where = shard.device_mesh, shard.placements
        return distribute_tensor(whole.to(shard.device), *where, src_data_rank=None).to_local()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]


def owners_of(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The process that keeps each weight, so that all keep about as many numbers.

    >>> owners_of({"fc": 6, "q": 4, "k": 1, "up": 6}, 2)
    {'fc': 0, 'up': 1, 'q': 0, 'k': 1}
    """
    loads, found = [0] * world, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


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
