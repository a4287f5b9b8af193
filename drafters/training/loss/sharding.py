"""The drafter's weights divided over processes: torch's FSDP2 (arXiv 2304.11277).

Divided is what most of a drafter is: the projection of the features, and of each layer the query
and output projections and the MLP. The rest stays whole: the context's keys are made of all layers'
projections at once, and the loss reads the head's tables itself.
"""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from drafters.dflash.model import DFlashModel

PARTS = "self_attn.q_proj", "self_attn.o_proj", "mlp"
"""What is divided of a layer."""


def is_sharded(name: str) -> bool:
    """Whether the weight of this name is divided.

    >>> is_sharded("layers.0.mlp.up_proj.weight"), is_sharded("layers.0.self_attn.k_proj.weight")
    (True, False)
    """
    kind, _, rest = name.partition(".")
    own = rest.partition(".")[2]
    of_layer = kind == "layers" and any(own.startswith(f"{part}.") for part in PARTS)
    return of_layer or kind == "fc"


def shard(model: DFlashModel, dtype: torch.dtype) -> None:
    """Divides the weights of a float32 model over all processes; they are whole, and of `dtype`,
    while their layer runs, and gradients are summed in float32.
    """
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    rest = {p for name, p in model.named_parameters() if not is_sharded(name)}
    assert model.fc is not None, "such a drafter is not trained"
    groups: list[list[nn.Module]] = [[model.fc]]
    groups += [[layer.get_submodule(part) for part in PARTS] for layer in model.layers]
    for group in groups:
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=rest)  # has the others wait
    for method in ("context_state", "block_forward"):  # in which what is divided is read
        register_fsdp_forward_method(model, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums
            module.set_force_sum_reduction_for_comms(True)
