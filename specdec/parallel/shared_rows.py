"""Memory of several GPUs in which their ranks add up rows, each within the kernel that goes on with
the sum.
"""

from typing import Any

import torch
import torch.distributed as dist

MAX_ROWS = 64
"""Most rows of a sum: as many programs of a kernel wait for those of other ranks, so all of them
have to run at once.
"""


class SharedRows:
    """Made by all ranks together, once; `specdec.kernels.triton_exchange` says how it is used.

    Args:
        rank, size: of the group.
        process_group: of torch, over the devices.
        device: of this rank, NVIDIA's.
        width: H, of a row.
        dtype: of its numbers.

    Attributes:
        rank, size, width, dtype: the same.
        places: int64 [size], where the memory of each rank lies, as this rank sees it.
        epochs: int32 [MAX_ROWS], how many sums each program has made.

    Raises:
        RuntimeError: the devices do not share memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        process_group: Any,
        device: torch.device,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.size, self.width, self.dtype = rank, size, width, dtype
        # Rows of odd sums and of even ones, so that a rank may be one ahead of the others; then the
        # flags.
        nbytes = 2 * MAX_ROWS * width * dtype.itemsize + MAX_ROWS * size * 4
        self._memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        found = symmetric.rendezvous(self._memory, process_group)
        pointers = [int(place) for place in found.buffer_ptrs]
        self.places = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(process_group)  # no rank writes before all have zeros
