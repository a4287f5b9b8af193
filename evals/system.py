"""What answers the prompts of an evaluation: an engine here, or the engines of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from evals.bench.config import MAX_WARMUP
from evals.divergence import Divergence, Parting, explain_divergence
from evals.runner import nothing_old_collected, num_captured
from specdec.cluster.pool import Pool
from specdec.cluster.rows import Row
from specdec.engine.capture.warmup import set_serving
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from specdec.session.prompts import PromptReader

WARMUP_TOKENS = 24
"""Output tokens, at most, that requests of a warm-up have while others wait; half of the last ones
have as many, half of the others twice as many, and so on, each one more than the one before.
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer.

    Attributes:
        number: of its prompt.
        result: what it is.
        seconds: since the same engine's answer before it; their sum is the time of decoding.
    """

    number: int
    result: GenerationResult
    seconds: float


class System(Protocol):
    """A target with a drafter, wherever it decodes.

    Attributes:
        name: of the target.
        reader: makes tokens of its prompts.
        settings: k, max_num_seqs and max_model_len, as far as answers depend on them.
    """

    name: str
    reader: PromptReader
    settings: dict[str, Any]

    def plain(self) -> System:
        """The system without a drafter."""

    def warm_up(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> None:
        """Answers some of these prompts briefly, so that no answer's time has what only the first
        one of its kind takes, such as compiling kernels and capturing steps.
        """

    def answers(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
    ) -> Iterator[Timed]:
        """Answers as they are finished, of prompts that each have their own sampling.

        Raises:
            SpecDecError: see the system.
        """

    def explain(self, partings: Sequence[Parting]) -> list[Divergence]:
        """What the target made of the tokens before each parting."""


class LocalSystem:
    """One engine; a prompt that cannot be served raises before anything is decoded."""

    def __init__(self, decoder: SpecDecoder) -> None:
        engine = decoder.engine
        self.decoder, self.name, self.reader = decoder, decoder.verifier.name, decoder.reader
        self.settings = {
            "k": engine.k,
            "max_num_seqs": engine.config.max_num_seqs,
            "max_model_len": engine.max_model_len,
        }

    def plain(self) -> LocalSystem:
        """See `SpecDecoder.plain`."""
        return LocalSystem(self.decoder.plain())

    def warm_up(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> None:
        """See `System`. Twice as many as there are at once end one by one, so that steps of every
        size are captured, and prefills beside others; without captures a short one is enough.
        """
        engine, brief = self.decoder.engine, list[tuple[list[int], SamplingParams]]()
        at_once = engine.config.max_num_seqs
        pairs = list(zip(prompts, samplings, strict=True))[: 2 * at_once]
        if engine.runner.graphs is None:
            pairs = [([self.reader.tokenizer.eos_token_id], SamplingParams(ignore_eos=True))]
        for number, (prompt, sampling) in enumerate(pairs):
            left = min(len(pairs) - number, at_once)
            halvings = at_once.bit_length() - left.bit_length() + 1
            most = WARMUP_TOKENS * halvings + number % at_once
            brief.append((prompt, sampling.at_most(most)))
        for _ in range(MAX_WARMUP):
            captured = num_captured(engine)
            for chunk in self.decoder.session.map(brief, text=False):
                assert chunk.result is not None, "only the end of an answer is asked for"
            if num_captured(engine) == captured:
                break
        engine.reset()  # no answer may copy what the warm-up wrote
        set_serving(engine, True)

    def answers(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
    ) -> Iterator[Timed]:
        """See `System`; closing the iterator early cancels what is unfinished."""
        pairs, last = list(zip(prompts, samplings, strict=True)), time.perf_counter()
        for prompt, sampling in pairs:
            self.decoder.engine.admission.check(prompt, sampling)
        with nothing_old_collected(), closing(self.decoder.session.map(pairs)) as chunks:
            for chunk in chunks:
                assert chunk.result is not None, "only the end of an answer is asked for"
                now = time.perf_counter()
                yield Timed(chunk.index, chunk.result, now - last)
                last = now

    def explain(self, partings: Sequence[Parting]) -> list[Divergence]:
        """See `System`."""
        return _explain(self.decoder, partings)


class ClusterSystem:
    """Engines of a cluster; seconds are those of all of them together.

    Args:
        origin: what every engine has to say of itself; another one's answers are refused.
    """

    def __init__(self, pool: Pool, reader: PromptReader, origin: dict[str, Any]) -> None:
        self.name, self.reader = pool.spec.model, reader
        self.settings = {name: origin[name] for name in ("k", "max_num_seqs", "max_model_len")}
        self._pool, self._origin = pool, origin

    def plain(self) -> ClusterSystem:
        """See `System`."""
        return ClusterSystem(
            replace(self._pool, spec=self._pool.spec.plain()), self.reader, self._origin | {"k": 0}
        )

    def warm_up(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> None:
        """Nothing, because every engine does so when it is made."""

    def answers(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
    ) -> Iterator[Timed]:
        """See `System`; an answer may be an error."""
        rows = [Row(str(n), *one) for n, one in enumerate(zip(prompts, samplings, strict=True))]
        for answer in self._pool.answers(rows, self._origin):
            yield Timed(int(answer.key), answer.results[0], answer.seconds)

    def explain(self, partings: Sequence[Parting]) -> list[Divergence]:
        """See `System`; one of the machines does it."""
        return self._pool.call(_explain, partings) if partings else []


def _explain(decoder: SpecDecoder, partings: Sequence[Parting]) -> list[Divergence]:
    return [explain_divergence(decoder, parting) for parting in partings]
