"""Which operations compute the layers around an attention backend: AITER's, our own in Triton or
C++, or plain torch.
"""

import torch

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.device.self_check import named
from specdec.kernels.native import native
from specdec.layers.ops.cpu import CpuOps
from specdec.layers.ops.exchange import shared_rows
from specdec.layers.ops.fused import FUSED_LAYERS
from specdec.layers.ops.ops import Ops
from specdec.parallel.group import Group


def ops_for(
    backend: AttentionBackend | MlaBackend,
    *,
    mixes: bool = False,
    recurs: bool = False,
    convolves: bool = False,
    group: Group | None = None,
    width: int = 0,
) -> Ops:
    """What computes the layers around `backend`: our kernels where it and the device suit them.

    Around latent attention they compute recurrent layers alone, not yet the others. AITER's take
    the place of some of ours where they are asked for by name.

    Args:
        mixes: layers have experts.
        recurs: layers are recurrent.
        convolves: there are convolutions around sublayers.
        group: ranks that the layers are divided among.
        width: H, of the rows that these add up.
    """
    if backend.differentiable:
        return Ops()
    device, dtype = backend.spec.device, backend.spec.dtype
    fused = (
        not isinstance(backend, MlaBackend)
        and backend.fits_fused_layers
        and FUSED_LAYERS.runs_on(device, dtype)
    )
    if named("aiter_layers"):
        from specdec.layers.aiter.check import takes_aiter_layers

        if takes_aiter_layers(backend, fused=fused):
            from specdec.layers.aiter.ops import AiterOps  # it imports Triton

            return AiterOps(device, dtype, mixes=mixes, recurs=recurs, convolves=convolves)
    if isinstance(backend, MlaBackend) and recurs:
        from specdec.layers.recurrence.check import KERNEL

        if KERNEL.runs_on(device, dtype):
            from specdec.layers.recurrence.ops import RecurrentOps  # it imports Triton

            return RecurrentOps()
    if not fused:
        own = native() if device.type == "cpu" and dtype == torch.bfloat16 else None
        return Ops() if own is None else CpuOps(own)
    from specdec.layers.ops.kernels import TritonOps

    ranks = shared_rows(group, width, device, dtype)
    return TritonOps(device, dtype, mixes=mixes, recurs=recurs, convolves=convolves, ranks=ranks)
