"""llama.cpp as a peer, through llama-cpp-python: the same weights as the GGUF file stores them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evals.peers.peer import only_greedy, require
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams

NAME = "llama.cpp"


class LlamaCppPeer:
    """One conversation at a time, on as many threads as torch uses.

    Args:
        path: GGUF file.
        verifier: gives device, length and end tokens.
    """

    name = NAME
    max_concurrency, tau = 1, None

    def __init__(self, path: Path, verifier: Verifier) -> None:
        library: Any = require("llama_cpp", "llama-cpp-python", NAME)
        threads = torch.get_num_threads()
        self.version: str = library.__version__
        self._eos = frozenset(verifier.eos_token_ids)
        self._model = library.Llama(
            model_path=str(path),
            n_ctx=verifier.max_model_len,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0 if verifier.device.type == "cpu" else -1,
            verbose=False,
        )

    def generate(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int) -> list[list[int]]:
        """See `Peer.generate`."""
        only_greedy(self.name, samplings)
        return [self._answer(prompt, sampling.max_tokens) for prompt, sampling in zip(prompts, samplings, strict=True)]

    def _answer(self, prompt: list[int], most: int) -> list[int]:
        self._model.reset()
        output: list[int] = []
        for token in self._model.generate(prompt, temp=0.0):
            output.append(token)
            if len(output) == most or token in self._eos:
                break
        return output


def load(detail: str | None, *, verifier: Verifier) -> LlamaCppPeer:
    """llama.cpp on the embedded model's own file, or on the GGUF file named behind the colon.

    Raises:
        InvalidInputError: not installed, no file, or the target's checkpoint asks for what it has
            otherwise.
    """
    defaults = verifier.defaults
    if defaults.repetition_penalty != 1 or defaults.min_tokens or defaults.min_length:
        raise InvalidInputError(
            f"peer {NAME!r} has no repetition penalty and least length like those that {verifier.name!r} asks for in its"
            " generation_config.json; measure all without, by --generation-config none"
        )
    if detail is None and verifier.name != "embedded":
        raise InvalidInputError(f"peer {NAME!r} needs the GGUF file of {verifier.name!r}; give it as {NAME}:FILE")
    if detail is None:
        from verifiers.weights.embedded import gguf_path

        return LlamaCppPeer(gguf_path(), verifier)
    if not Path(detail).is_file():
        raise InvalidInputError(f"peer {NAME!r} finds no file {detail!r}; give the target's GGUF file")
    return LlamaCppPeer(Path(detail), verifier)
