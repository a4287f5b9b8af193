"""Compiling grammars for one tokenizer, beside the engine's steps and within limits."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from specdec.base.chat.thinking import Phase, Thinking, thinking_of
from specdec.base.errors import InvalidInputError
from specdec.base.packages import install_command
from specdec.grammar.calls import MARKER
from specdec.grammar.grammar import Grammar
from specdec.grammar.limits import QUICK_SECONDS
from specdec.grammar.process import Answer, Ended, Vocabulary, ask, reason_of
from specdec.grammar.progress import GrammarProgress
from specdec.grammar.queues import Job, queues
from specdec.grammar.rules import rules_of
from specdec.grammar.thinking import ThinkingProgress

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

CACHE_BYTES = 2**29
"""Bytes of compiled grammars kept beside those of unfinished requests; a schema takes a few MB."""


@dataclass(frozen=True, slots=True)
class _Library:
    """xgrammar for one vocabulary."""

    info: xgrammar.TokenizerInfo
    compiler: Any
    vocabulary: Vocabulary


class GrammarCompiler:
    """Compiles grammars and keeps them.

    Args:
        vocab_size: V, numbers in a row of the target's logits.
        eos_token_ids: what may follow a complete output, and ends it.
        in_threads: compile beside the engine's steps; else at once, as engines in lockstep do.
        limited: keep to the limits: compile most in another process first; or a rank has.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        in_threads: bool = True,
        limited: bool = True,
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._in_threads, self._limited = in_threads, limited
        self._libraries: dict[frozenset[int], _Library] = {}  # by markers
        self._jobs: dict[Grammar, Job] = {}
        self._lock = Lock()

    def check(self) -> None:
        """Whether there can be grammars.

        Raises:
            InvalidInputError: xgrammar is missing, or the target has no end token.
        """
        if find_spec("xgrammar") is None:
            what = "a grammar needs xgrammar, which is not installed"
            raise InvalidInputError(f"{what}; run: {install_command('grammar')}")
        if not self._eos_token_ids:
            what = "a grammar needs an end-of-sequence token and the target has none"
            raise InvalidInputError(f"{what}; decode without a grammar")

    def start(self, grammar: Grammar) -> GrammarProgress:
        """Where an output stands before its first token. Its grammar may be ready only later.

        Raises:
            CapacityError: too many wait to be compiled.
            InvalidInputError: it cannot be compiled, where that is done at once.
        """
        compiled = self.compiled(grammar)
        if not self._in_threads:
            compiled.result()
        return GrammarProgress(compiled, self._eos_token_ids)

    @property
    def thinking(self) -> Thinking | None:
        """How the target thinks, if it does."""
        return thinking_of(self._tokenizer)

    def follow(
        self,
        prompt: Sequence[int],
        grammar: Grammar | None,
        *,
        after_thinking: bool | None,
        budget: int | None,
    ) -> GrammarProgress | ThinkingProgress | None:
        """Where an output stands before its first token; None where all may follow.

        Args:
            prompt: token ids, which may have opened or closed the thinking.
            after_thinking: the grammar begins behind the thinking; None says so with a budget.
        """
        answer = None if grammar is None else self.start(grammar)
        after_thinking = budget is not None if after_thinking is None else after_thinking
        thinking = self.thinking if after_thinking or budget is not None else None
        if thinking is None:
            return answer
        place = thinking.behind_prompt(prompt)
        if place.phase is Phase.BEHIND:
            return answer
        return ThinkingProgress(thinking, place, budget, answer, self._eos_token_ids)

    def compiled(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """The grammar as soon as it is compiled, or why it cannot be: an `InvalidInputError`, or
        where that is not who asked's fault another. Who cancels this waits no longer, and a grammar
        for which nobody waits is not compiled.

        Raises:
            CapacityError: too many wait to be compiled.
        """
        with self._lock:
            job = self._jobs.pop(grammar, None)
            own = None if job is None else job.join()
            while job is None or own is None:
                job = self._new_job(grammar)
                own = job.join()
            self._jobs[grammar] = job  # the latest come last
            self._forget()
        return own

    def after_fork(self) -> None:
        """In a child process: no thread of the parent's compiles here, and no lock is held."""
        self._lock = Lock()
        self._jobs = {grammar: job for grammar, job in self._jobs.items() if job.result.done()}

    def _new_job(self, grammar: Grammar) -> Job:
        job = Job(len(grammar.text), partial(self._compile, grammar))
        if self._limited:
            queues().add(job)
        else:
            job.run(QUICK_SECONDS)
        return job

    def _forget(self) -> None:
        """Lets go of those not asked for the longest that are too much; under the lock."""
        done = {grammar: job.result for grammar, job in self._jobs.items() if job.result.done()}
        sizes = {grammar: 4 * len(grammar.text) for grammar in done}
        for grammar, result in done.items():
            if result.cancelled() or not isinstance(result.exception(), InvalidInputError | None):
                del self._jobs[grammar], sizes[grammar]
            elif not result.exception():
                sizes[grammar] += result.result().memory_size_bytes
        excess = sum(sizes.values()) - CACHE_BYTES
        for grammar, size in sizes.items():
            if excess <= 0:
                break
            excess -= size
            del self._jobs[grammar]

    @cached_property
    def _special_token_ids(self) -> frozenset[int]:
        return frozenset(
            token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special
        )

    @cached_property
    def _read(self) -> Any:
        """The tokens as the library reads them. It takes a moment, so it is made once."""
        import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=list(self._eos_token_ids)
        )

    def _library(self, markers: frozenset[int]) -> _Library:
        """The library for a vocabulary in which calls are written with these special tokens."""
        import xgrammar

        if markers not in self._libraries:
            read = self._read
            # Special tokens would pass as their text, as <s> in a string, and decoding omits them.
            others = dict.fromkeys(self._special_token_ids, b"")
            others |= dict.fromkeys(markers, MARKER.encode())
            vocabulary = enumerate(read.decoded_vocab)
            texts = [others.get(token, text) for token, text in vocabulary]
            info = xgrammar.TokenizerInfo(
                texts,
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=list(self._eos_token_ids),
                add_prefix_space=read.add_prefix_space,
            )
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            self._libraries[markers] = _Library(info, compiler, Vocabulary(info.serialize_json))
        return self._libraries[markers]

    def _compile(self, grammar: Grammar, job: Job, seconds: float) -> xgrammar.CompiledGrammar:
        """Compiles; in a thread.

        Raises:
            InvalidInputError: the library refuses the grammar, or it takes too much.
        """
        for note in grammar.notes if seconds == QUICK_SECONDS else ():
            logger.warning("a JSON schema asks for more than outputs are held to: %s", note)
        library = self._library(grammar.markers)
        try:
            if grammar.is_quick or not self._limited or not hasattr(os, "fork"):
                return library.compiler.compile_grammar(rules_of(grammar))
        except Exception as error:
            raise InvalidInputError(reason_of(grammar.kind, error)) from error
        answer = self._asked(library.vocabulary, grammar, job, seconds)
        for note in answer.notes:
            logger.warning("%s", note)
        if answer.again:
            return library.compiler.compile_grammar(answer.text)
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(answer.text, library.info)

    def _asked(self, vocabulary: Vocabulary, grammar: Grammar, job: Job, seconds: float) -> Answer:
        """What another process makes of a grammar."""
        for _ in range(2):  # the first may have been ended by something else
            with suppress(Ended), queues().process.open(vocabulary) as link:
                job.on_stop = partial(_shut, link)
                if not job.stopped:
                    return ask(link, vocabulary, grammar, seconds)
            if job.stopped:
                raise CancelledError
        what = "the process that compiles grammars has ended twice"
        raise RuntimeError(f"{what}; is there memory for it?")


def _shut(link: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        link.shutdown(socket.SHUT_RDWR)


def wait_for(futures: Iterable[Future[Any]], seconds: float) -> None:
    """Waits until one of them is done, but no longer than so many seconds."""
    wait(list(futures), timeout=seconds, return_when=FIRST_COMPLETED)
