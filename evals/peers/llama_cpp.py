"""llama.cpp as a peer, through llama-cpp-python: the same weights as the GGUF file stores them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.peers.peer import only_greedy, require, weights_of
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams

NAME = "llama.cpp"
MAX_DRAFTS, MIN_PROBABILITY = 16, 0.75


class LlamaCppPeer:
    """One conversation at a time, on as many threads as torch uses.

    Args:
        draft: GGUF file of a draft model, of which up to `MAX_DRAFTS` tokens are taken while it
            gives each at least `MIN_PROBABILITY`, as llama.cpp's own tools do by default.
    """

    name = NAME
    max_concurrency, tau = 1, None

    def __init__(self, path: Path, verifier: Verifier, draft: Path | None = None) -> None:
        library: Any = require("llama_cpp", "llama-cpp-python", NAME)
        threads = torch.get_num_threads()
        self.version: str = library.__version__
        self._eos = frozenset(verifier.eos_token_ids)
        where = verifier.max_model_len, threads, verifier.device.type != "cpu"
        self._model = _Model(library, path, *where)
        self._draft_model = None if draft is None else _Model(library, draft, *where)

    def generate(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int
    ) -> list[list[int]]:
        """See `Peer.generate`."""
        only_greedy(self.name, samplings)
        pairs = zip(prompts, samplings, strict=True)
        return [self._answer(prompt, sampling.max_tokens) for prompt, sampling in pairs]

    def _answer(self, prompt: list[int], most: int) -> list[int]:
        models = [model for model in (self._model, self._draft_model) if model is not None]
        for model in models:
            model.keep(0)
        output = [_best(self._model.read(prompt, 1)[0])]
        if self._draft_model is not None:
            self._draft_model.read(prompt, 1)
        while len(output) < most and output[-1] not in self._eos:
            drafts = self._drafts(prompt + output)
            logits = self._model.read([output[-1], *drafts], len(drafts) + 1)
            for place, row in enumerate(logits):
                output.append(_best(row))
                end = len(output) == most or output[-1] in self._eos
                if end or place == len(drafts) or output[-1] != drafts[place]:
                    break
            for model in models:
                model.keep(len(prompt) + len(output) - 1)
        return output

    def _drafts(self, tokens: list[int]) -> list[int]:
        """The draft model's, as long as it is sure of them."""
        drafts = list[int]()
        if self._draft_model is None:
            return drafts
        left = tokens[self._draft_model.length :]
        while len(drafts) < MAX_DRAFTS:
            logits = self._draft_model.read(left, 1)[0]
            best = _best(logits)
            if float(np.exp(logits[best] - np.logaddexp.reduce(logits))) < MIN_PROBABILITY:
                break
            drafts.append(best)
            left = [best]
        return drafts


class _Model:
    """A model with the context of one conversation, through llama.cpp's C API."""

    def __init__(self, library: Any, path: Path, length: int, threads: int, on_gpu: bool) -> None:
        self._library, self.length = library, 0
        given = {"n_ctx": length, "n_batch": length, "n_gpu_layers": -1 if on_gpu else 0}
        given |= {"n_threads": threads, "n_threads_batch": threads}
        self._model = library.Llama(model_path=str(path), verbose=False, **given)
        self._context = self._model._ctx.ctx
        self._memory = library.llama_get_memory(self._context)
        self._batch = library.llama_batch_init(length, 0, 1)

    def read(self, tokens: list[int], wanted: int) -> list[np.ndarray[Any, Any]]:
        """Reads tokens, and returns the logits [V] behind the last `wanted` ones."""
        batch, first = self._batch, len(tokens) - wanted
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.length + i, i >= first
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if self._library.llama_decode(self._context, batch) != 0:
            raise InvalidInputError(f"peer {NAME!r} cannot read {len(tokens)} tokens more")
        self.length += len(tokens)
        logits, shape = self._library.llama_get_logits_ith, (self._model.n_vocab(),)
        rows = range(first, len(tokens))
        return [np.ctypeslib.as_array(logits(self._context, i), shape=shape) for i in rows]

    def keep(self, length: int) -> None:
        """Forgets what comes after so many tokens."""
        self.length = min(self.length, length)
        self._library.llama_memory_seq_rm(self._memory, 0, self.length, -1)


def _best(logits: np.ndarray[Any, Any]) -> int:
    return int(logits.argmax())


def load(detail: str | None, *, verifier: Verifier) -> LlamaCppPeer:
    """llama.cpp on the target's file, or the GGUF file given, behind a + a draft model's.

    Raises:
        InvalidInputError: not installed, no file, or it has otherwise what the target asks for.
    """
    defaults = verifier.defaults
    if defaults.repetition_penalty != 1 or defaults.min_tokens or defaults.min_length:
        raise InvalidInputError(
            f"peer {NAME!r} has no repetition penalty and least length like those that"
            f" {verifier.name!r} asks for in its"
            " generation_config.json; measure all without, by --generation-config none"
        )
    folder, file = weights_of(verifier)
    if detail is None and file is not None:
        return LlamaCppPeer(Path(folder, file), verifier)
    if detail is None and verifier.name != "embedded":
        what = f"peer {NAME!r} needs the GGUF file of {verifier.name!r}"
        raise InvalidInputError(f"{what}; give it as {NAME}:FILE")
    if detail is None:
        from verifiers.weights.embedded import gguf_path

        return LlamaCppPeer(gguf_path(), verifier)
    paths = [Path(part) for part in detail.split("+")]
    for path in paths:
        if not path.is_file():
            way_out = "give the target's GGUF file"
            raise InvalidInputError(f"peer {NAME!r} finds no file {str(path)!r}; {way_out}")
    return LlamaCppPeer(paths[0], verifier, paths[1] if len(paths) > 1 else None)
