"""The requests of a batch in their slots, and what the host knows of them together."""

from collections.abc import Sequence

from torch import Tensor

from specdec.engine.requests.request import Request
from specdec.sampling.tensors import SamplingPlan, SamplingTensors


class Selection:
    """The requests of a batch in their slots. Stays the same object from step to step while the
    batch has the same requests.

    Attributes:
        requests: the batch.
        slots: theirs.
        plan: what their sampling needs.
        tensors: their slots, int64 [num_reqs], and their sampling on the device; None until a step
            gathers them.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.slots = [request.slot for request in requests]
        self.plan = SamplingPlan.joined(request.plan for request in requests)
        self.tensors: tuple[Tensor, SamplingTensors] | None = None

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether these are its requests, in the slots that they had."""
        return self.requests == requests and self.slots == [request.slot for request in requests]

    @property
    def sampled(self) -> bool:
        """Whether a request samples."""
        return not self.plan.all_greedy

    @property
    def longest(self) -> int:
        """Tokens that each request has in the cache at most, whatever steps in flight accept."""
        return max([request.num_kv_tokens + request.num_in_flight for request in self.requests])

    @property
    def shortest(self) -> int:
        """Tokens that each request has in the cache at least, whatever steps in flight accept."""
        return min([request.num_kv_tokens for request in self.requests])
