"""vLLM as a peer: plain, or with a drafter of the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters.checkpoint import read_checkpoint
from evals.peers import only_greedy, require
from evals.provenance import checkpoint_folder
from specdec.config import SamplingParams
from specdec.core import Verifier
from specdec.errors import InvalidInputError

MEMORY_SHARE = 0.4
"""Of the accelerator; the other system's weights and cache have to fit beside it."""


class VllmPeer:
    """vLLM's offline engine.

    Args:
        name: as the user gave it.
        verifier: names weights and type.
        drafter: folder or hub name of a DFlash checkpoint; None decodes plainly.
    """

    max_concurrency = None

    def __init__(self, name: str, verifier: Verifier, drafter: str | None) -> None:
        self.name = name
        self._library: Any = require("vllm", "vllm", name)
        self.version: str = self._library.__version__
        self._verifier = verifier
        self._options: dict[str, Any] = {}
        if drafter is not None:
            block_size = read_checkpoint(drafter)[0].block_size
            self._options["speculative_config"] = {
                "method": "dflash",
                "model": str(checkpoint_folder(drafter) or drafter),
                "num_speculative_tokens": block_size - 1,
            }
        self._engine: Any = None
        self._concurrency = 0

    def generate(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int) -> list[list[int]]:
        """See `Peer.generate`."""
        only_greedy(self.name, samplings)
        if concurrency != self._concurrency:
            self._start(concurrency)
        results = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                self._library.SamplingParams(
                    temperature=0.0,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=list(self._verifier.eos_token_ids),
                    detokenize=False,
                )
                for sampling in samplings
            ],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]

    def _start(self, concurrency: int) -> None:
        """An engine for this many conversations; vLLM fixes the number when it starts."""
        self._engine = None  # frees the memory of the one before
        verifier = self._verifier
        self._engine = self._library.LLM(
            model=str(checkpoint_folder(verifier.name) or verifier.name),
            dtype=str(verifier.dtype).removeprefix("torch."),
            max_num_seqs=concurrency,
            max_model_len=verifier.max_model_len,
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY_SHARE,
            **self._options,
        )
        self._concurrency = concurrency


def load(detail: str | None, *, verifier: Verifier) -> VllmPeer:
    """vLLM on the target, with the DFlash checkpoint named behind the colon, if any.

    Raises:
        InvalidInputError: not installed, or the target is on a CPU.
    """
    name = "vllm" if detail is None else f"vllm:{detail}"
    if verifier.device.type != "cuda":
        raise InvalidInputError(f"peer {name!r} runs on a GPU and the target is on {verifier.device}; leave it out")
    if detail is not None and "/" not in detail and not Path(detail).exists():
        raise InvalidInputError(f"peer {name!r} names no drafter checkpoint; give a folder or hub name behind the colon")
    return VllmPeer(name, verifier, detail)
