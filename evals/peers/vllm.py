"""vLLM as a peer: plain, or with a drafter of the same checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

from packaging.version import Version

from drafters.convert import convert
from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.shipped import located
from evals.peers.peer import only_greedy, require, weights_of
from evals.report.provenance import checkpoint_folder
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams

MEMORY_SHARE = 0.4
"""Share of the accelerator's memory; the other system's weights and cache have to fit beside it."""

KNOWS_HEADS = Version("0.25")
"""The first release that corrects drafts by a Markov head (DSpark)."""

CONCURRENCY = 256
"""Conversations that vLLM is started for, so that one start serves a sweep."""

_alive: WeakSet[VllmPeer] = WeakSet()
"""At most one: two engines in a process disturb each other, and a start is in no timed pass."""


def import_vllm(peer: str) -> Any:
    """The library, with the parts that peers use.

    Raises:
        InvalidInputError: not installed.
    """
    # standard output is for the report
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    library = require("vllm", "vllm", peer)
    for part in ("inputs", "sampling_params"):
        import_module(f"vllm.{part}")
    return library


class VllmPeer:
    """vLLM's offline engine.

    Args:
        drafter: folder or hub name of a DFlash checkpoint; None decodes plainly.
    """

    max_concurrency = None

    def __init__(self, name: str, verifier: Verifier, drafter: str | None) -> None:
        self.name = name
        self._library: Any = import_vllm(name)
        self.version: str = self._library.__version__
        self._verifier = verifier
        self._options: dict[str, Any] = {}
        self.tau: float | None = None  # where an accepted draft behind an output's end counts
        self._written: TemporaryDirectory[str] | None = None
        if drafter is not None:
            self._options = {"speculative_config": self._speculation(drafter)}
            self._options["disable_log_stats"] = False
        place, file = weights_of(verifier)
        self._links = None if file else _without_other_weights(Path(place))
        self._model = self._links.name if self._links else str(Path(place, file or ""))
        self._engine: Any = None
        self._most = 0
        self._request_ids = count()

    def _speculation(self, drafter: str) -> dict[str, Any]:
        """vLLM's options for a drafter where it lies; one with a head is first written anew.

        Raises:
            SpecDecError: the drafter cannot be read, or vLLM would draft otherwise.
        """
        config = read_checkpoint(drafter)[0]
        check_drafter(self.name, config, self._verifier, self.version)
        method, model = "dflash", str(checkpoint_folder(drafter) or drafter)
        if config.head is not None:
            self._written = TemporaryDirectory(prefix="specdec-vllm-")
            method, model = "dspark", self._written.name
            target = self._verifier.name if config.tied_tables else None
            convert(drafter, model, "speculators", target=target)
        return {"method": method, "model": model, "num_speculative_tokens": config.max_draft_tokens}

    def generate(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int
    ) -> list[list[int]]:
        """See `Peer.generate`. A new conversation begins as soon as one has ended, as in ours."""
        only_greedy(self.name, samplings)
        if concurrency > self._most:
            self._start(max(concurrency, CONCURRENCY))
        engine = self._engine.llm_engine
        numbers = iter(range(len(prompts)))
        before = self._draft_counts()
        places: dict[str, int] = {}
        answers: dict[int, list[int]] = {}
        while len(answers) < len(prompts):
            for place in islice(numbers, concurrency - len(places)):
                request_id = str(next(self._request_ids))
                places[request_id] = place
                tokens = self._library.inputs.tokens_input(prompts[place])
                engine.add_request(request_id, tokens, self._params(samplings[place]))
            for output in engine.step():
                if output.finished:
                    answers[places.pop(output.request_id)] = list(output.outputs[0].token_ids)
        pairs = zip(self._draft_counts(), before, strict=True)
        steps, accepted = (now - then for now, then in pairs)
        self.tau = 1 + accepted / steps if steps else None
        return [answers[place] for place in range(len(prompts))]

    def _draft_counts(self) -> tuple[float, float]:
        """Steps with drafts of all requests so far, and drafts accepted in them, or 0."""
        metrics = self._engine.get_metrics() if self._options else []
        counts = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
        start = "vllm:spec_decode_num_"
        return counts.get(f"{start}drafts", 0.0), counts.get(f"{start}accepted_tokens", 0.0)

    def _params(self, sampling: SamplingParams) -> Any:
        library = self._library
        ends = () if sampling.ignore_eos else self._verifier.eos_token_ids
        return library.SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            stop_token_ids=[*ends, *sampling.stop_token_ids],
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            min_tokens=sampling.min_tokens or 0,
            detokenize=False,
            output_kind=library.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _start(self, most: int) -> None:
        """An engine for so many conversations; vLLM fixes that at its start, of a minute."""
        self._stop()
        verifier = self._verifier
        self._engine = self._library.LLM(
            model=self._model,
            skip_tokenizer_init=True,
            dtype=str(verifier.dtype).removeprefix("torch."),
            max_num_seqs=most,
            max_model_len=verifier.max_model_len,
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY_SHARE,
            **self._options,
        )
        self._most = most

    def _stop(self) -> None:
        """Frees the engine's memory, which dropping the reference does not do in this process."""
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()
        self._engine, self._most = None, 0


def _without_other_weights(folder: Path) -> TemporaryDirectory[str] | None:
    """Links to the files of `folder`, without weights that Transformers leaves aside; or None.

    Without an index, Transformers reads `model.safetensors` alone and vLLM every safetensors file.
    """
    weights = folder / "model.safetensors"
    others = [file for file in folder.glob("*.safetensors") if file != weights]
    if not others or not weights.exists() or (folder / "model.safetensors.index.json").exists():
        return None
    links = TemporaryDirectory(prefix="specdec-vllm-")
    for file in folder.iterdir():
        if file not in others:
            Path(links.name, file.name).symlink_to(file.resolve())
    return links


def check_drafter(peer: str, config: DFlashConfig, verifier: Verifier, version: str) -> None:
    """Refuses what vLLM passes over, drafting otherwise than is meant; read in 0.23 and 0.26.

    Raises:
        InvalidInputError: the drafter is neither plain DFlash nor, where vLLM knows it, DSpark.
    """
    scale = config.input_embedding_scale
    scale = verifier.embedding_scale if scale is None else scale
    knows = Version(version) >= KNOWS_HEADS and config.algorithm == "dspark"
    knows = knows and getattr(config.head, "kind", None) == "vanilla"
    unknown = {
        "a sliding window": any(config.windows),
        "causal layers": any(config.causal),
        "sample_from_anchor": config.sample_from_anchor,
        f"an embedding scale of {scale:g}": scale != 1,
        f"an output multiplier of {config.output_multiplier:g}": config.output_multiplier != 1,
        "a softcap": config.final_logit_softcapping is not None,
        "a head": config.head is not None and not knows,
    }
    if found := [name for name, there in unknown.items() if there]:
        raise InvalidInputError(
            f"peer {peer!r}: the drafter has {', '.join(found)}, which vLLM {version} does not"
            f" know; measure vllm without it"
        )


def load(detail: str | None, *, verifier: Verifier) -> VllmPeer:
    """vLLM on the target, with the DFlash drafter named behind the colon, if any.

    Raises:
        InvalidInputError: not installed, no GPU, vLLM cannot run the drafter, or one is in use.
    """
    name = "vllm" if detail is None else f"vllm:{detail}"
    if verifier.device.type != "cuda":
        what = f"peer {name!r} runs on a GPU and the target is on {verifier.device}"
        raise InvalidInputError(f"{what}; leave it out")
    drafter = None if detail is None else located(detail)
    if drafter is not None and "/" not in drafter and not Path(drafter).exists():
        what = f"peer {name!r} names no drafter checkpoint"
        raise InvalidInputError(f"{what}; give a folder or a hub name behind the colon")
    if other := next(iter(_alive), None):
        what = f"a process can hold one vLLM engine and has peer {other.name!r}"
        raise InvalidInputError(f"{what}; measure {name!r} in a run of its own")
    peer = VllmPeer(name, verifier, drafter)
    _alive.add(peer)
    return peer
