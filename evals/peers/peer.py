"""Other systems that `specdec bench --peer` measures on the same prompts, in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from evals.report.provenance import checkpoint_folder
from specdec.base.checkpoint.gguf_names import gguf_file
from specdec.base.errors import InvalidInputError, one_line
from specdec.base.registry import resolve
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams

PEERS = {
    "transformers": "evals.peers.transformers:load_plain",
    "transformers-lookup": "evals.peers.transformers:load_lookup",
    "llama.cpp": "evals.peers.llama_cpp:load",
    "vllm": "evals.peers.vllm:load",
}
"""Functions `(detail | None, *, verifier) -> Peer`."""


class Peer(Protocol):
    """Another system with the target's weights.

    Attributes:
        name: as the user gave it.
        version: of the system.
        max_concurrency: conversations it can decode at once; None for any number.
        tau: tokens per verify step of the last `generate`; None where it does not tell.
    """

    name: str
    version: str
    max_concurrency: int | None
    tau: float | None

    def generate(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int
    ) -> list[list[int]]:
        """Output tokens of all prompts, end tokens included, at most `concurrency` at a time.

        The samplings leave nothing to the checkpoint, see `SamplingDefaults.fill`.
        """


def load_peer(name: str, verifier: Verifier) -> Peer:
    """The system called `name`, perhaps with a detail behind a colon, with `verifier`'s weights.

    Raises:
        InvalidInputError: unknown, not installed, or unable to run this target.
    """
    kind, _, detail = name.partition(":")
    peer: Peer = resolve(PEERS, kind, "peer")(detail or None, verifier=verifier)
    return peer


def weights_of(verifier: Verifier) -> tuple[str, str | None]:
    """Where another program finds a target's weights: a folder or a hub name, and the name of the
    GGUF file there, if it is one.
    """
    folder = checkpoint_folder(verifier.name)
    file = None if folder is None else gguf_file(folder)
    if file is not None:
        return str(file.parent), file.name
    return str(folder or verifier.name), None


def require(module: str, package: str, peer: str) -> Any:
    """Imports what a peer needs.

    Raises:
        InvalidInputError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        what = f"peer {peer!r} needs the package {package} ({one_line(error)})"
        raise InvalidInputError(f"{what}; install it or leave the peer out") from error


def only_greedy(peer: str, samplings: Sequence[SamplingParams]) -> None:
    """Refuses sampling, where the random numbers of two systems cannot be the same."""
    hottest = max((sampling.temperature for sampling in samplings), default=0.0)
    if hottest > 0:
        what = f"peer {peer!r} is compared in greedy decoding and the temperature is {hottest:g}"
        raise InvalidInputError(f"{what}; use 0")
