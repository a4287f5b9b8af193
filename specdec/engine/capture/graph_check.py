"""The self-check of captured steps: a short generation replayed from graphs, and the same steps
launched one by one.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from specdec.base.config import CacheConfig, DraftSampling, EngineConfig
from specdec.base.errors import BackendError
from specdec.device.deviation import Deviation, worst
from specdec.engine.capture import capture as capturing
from specdec.engine.capture.captured import capture_steps
from specdec.engine.capture.prefill_graphs import MIN_ROWS, max_prefill_rows
from specdec.kv_cache import blocks_for
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams

NUM_DRAFTS = 3
MAX_TOKENS = 7
PROMPTS = (3, 17, 30)
"""Lengths; a batch of three is captured with one row of padding."""
LONGEST = 2 * MIN_ROWS
"""Room for a captured prefill."""


def check_captured_step(make_engine: Callable[..., Any], verifier: Verifier) -> Deviation:
    """Compares tokens, and their log-probabilities, which every logit of a row has a part in.

    Both runs do the same work on the same shapes, so they differ by rounding at most where a
    library adds up in no fixed order.

    Raises:
        BackendError: the device refuses the capture, the tokens differ, or the logits are not
            finite.
    """
    return worst(_deviation(make_engine, verifier, num_drafts) for num_drafts in (0, NUM_DRAFTS))


def _deviation(make_engine: Callable[..., Any], verifier: Verifier, num_drafts: int) -> Deviation:
    """The deviation of steps with so many drafts."""
    capture = capturing.CudaCapture(verifier.device)
    tokens, logprobs = _generate(make_engine, verifier, num_drafts, capture)
    expected_tokens, expected = _generate(make_engine, verifier, num_drafts, LaunchAgain())
    if tokens != expected_tokens:
        raise BackendError(
            "a captured step gives other tokens than the same step launched operation by operation"
        )
    error = max(abs(one - other) for one, other in zip(logprobs, expected, strict=True))
    return Deviation(error, torch.finfo(verifier.dtype).eps * max(map(abs, expected)))


class LaunchAgain:
    """In the place of graphs: launches everything anew; see `Capture`."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """What repeats `launch` is `launch`."""
        launch()
        return launch


class Counting(Drafter):
    """Drafts the token ids that follow the anchor's."""

    max_draft_tokens = NUM_DRAFTS

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[Any],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> BoundDrafter:
        """See `specdec.model.core.Drafter.bind`."""
        return BoundCounting(verifier.vocab_size)


class BoundCounting(BoundDrafter):
    """Drafts that count up, in one engine."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """See `specdec.model.core.BoundDrafter.propose`."""
        steps = torch.arange(1, batch.k + 1, device=batch.anchors.device)
        return DraftOutput((batch.anchors[:, None] + steps) % self._vocab_size)


def _generate(
    make_engine: Callable[..., Any], verifier: Verifier, num_drafts: int, capture: capturing.Capture
) -> tuple[list[list[int]], list[float]]:
    """Tokens of a few requests, and the log-probabilities of all of them, whose steps `capture`
    repeats.
    """
    attention = verifier.attention.spec
    bytes_per_token = sum(spec.bytes_per_token(attention.kv_dtype) for spec in verifier.kv_specs)
    blocks = len(PROMPTS) * (blocks_for(LONGEST, attention.block_size) + 1)
    config = EngineConfig(
        max_num_seqs=len(PROMPTS),
        max_model_len=min(LONGEST, verifier.max_model_len),
        num_draft_tokens=num_drafts,
        graphs=False,
        seed=0,
        cache=CacheConfig(
            memory_bytes=blocks * attention.block_size * bytes_per_token, prefix_caching=False
        ),
    )
    engine = make_engine(verifier, Counting(), config)
    prefill_rows = (
        max_prefill_rows(verifier, len(PROMPTS)) if verifier.attention.captures_prefill else 0
    )
    capture_steps(engine.runner, engine.slots, capture, prefill_rows, required=True)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=True)
    requests = [
        engine.add_request(
            [(7 * start + 11 * place) % verifier.vocab_size for place in range(length)], sampling
        )
        for start, length in enumerate(PROMPTS)
    ]
    while engine.has_work:
        engine.step()
    for request in requests:
        if request.error:
            raise BackendError(request.error)
    return [request.output_token_ids for request in requests], [
        logprob for request in requests for logprob in request.logprobs
    ]
