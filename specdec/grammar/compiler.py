"""Compiling grammars for one tokenizer, in threads, so that no step waits for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidInputError
from specdec.grammar.grammar import Grammar
from specdec.grammar.progress import GrammarProgress
from specdec.grammar.rules import rules_of
from specdec.packages import install_command

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

THREADS = 2
"""Grammars that are compiled at once."""

CACHE_BYTES = 2**29
"""Of compiled grammars that are kept for the next request; those of unfinished requests come on top. A schema takes a few MB."""


class GrammarCompiler:
    """Compiles grammars and keeps them.

    Args:
        tokenizer: of the target.
        vocab_size: V, numbers in a row of the target's logits.
        eos_token_ids: what may follow a complete output, and ends it.
        in_threads: compile beside the engine's steps; otherwise at once, so that engines that are to do the same can.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int], *, in_threads: bool = True
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._in_threads = in_threads
        self._compiled: dict[Grammar, Future[xgrammar.CompiledGrammar]] = {}
        self._lock = Lock()

    def check(self) -> None:
        """Whether there can be grammars.

        Raises:
            InvalidInputError: xgrammar is not installed, or the target has no end-of-sequence token.
        """
        if find_spec("xgrammar") is None:
            raise InvalidInputError(f"a grammar needs xgrammar, which is not installed; run: {install_command('grammar')}")
        if not self._eos_token_ids:
            raise InvalidInputError("a grammar needs an end-of-sequence token and the target has none; decode without a grammar")

    def start(self, grammar: Grammar) -> GrammarProgress:
        """Where an output stands before its first token. Its grammar may be ready only later."""
        return GrammarProgress(self.compiled(grammar), self._eos_token_ids)

    def compiled(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """The grammar as soon as it is compiled, or why it cannot be: an `InvalidInputError`."""
        with self._lock:
            future = self._compiled.pop(grammar, None) or self._submit(grammar)
            self._compiled[grammar] = future  # the latest come last
            self._forget()
        return future

    def after_fork(self) -> None:
        """In a child process: no thread of the parent's compiles anything here, and no lock is held."""
        self._lock = Lock()
        self.__dict__.pop("_threads", None)
        self._compiled = {grammar: future for grammar, future in self._compiled.items() if future.done()}

    def _forget(self) -> None:
        """Lets go of those that were not asked for the longest, as far as they take too much; under the lock."""
        done = {grammar: future for grammar, future in self._compiled.items() if future.done()}
        failed = [grammar for grammar, future in done.items() if future.exception()]
        for grammar in failed:
            del self._compiled[grammar], done[grammar]
        sizes = {grammar: future.result().memory_size_bytes for grammar, future in done.items()}
        excess = sum(sizes.values()) - CACHE_BYTES
        for grammar, size in sizes.items():
            if excess <= 0:
                break
            excess -= size
            del self._compiled[grammar]

    def _submit(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        if self._in_threads:
            return self._threads.submit(self._compile, grammar)
        future: Future[xgrammar.CompiledGrammar] = Future()
        try:
            future.set_result(self._compile(grammar))
        except InvalidInputError as error:
            future.set_exception(error)
        return future

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="specdec grammar")

    @cached_property
    def _special_token_ids(self) -> frozenset[int]:
        return frozenset(token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special)

    @cached_property
    def _library(self) -> Any:
        """xgrammar's compiler for this tokenizer. What is made of its vocabulary takes a moment, so it is made once."""
        import xgrammar

        stop = list(self._eos_token_ids)
        read = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=stop)
        # Special tokens would pass as the text that they are written with, such as <s> in a string, and decoding leaves them out.
        texts = [b"" if token in self._special_token_ids else text for token, text in enumerate(read.decoded_vocab)]
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=stop,
            add_prefix_space=read.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compiles; in a thread.

        Raises:
            InvalidInputError: xgrammar refuses the grammar.
        """
        for note in grammar.notes:
            logger.warning("a JSON schema asks for more than outputs are held to: %s", note)
        try:
            return self._library.compile_grammar(rules_of(grammar))
        except InvalidInputError:
            raise
        except Exception as error:  # of the library's own types, and others
            said = (str(error).strip().splitlines() or [""])[-1]
            reason = re.sub(r"^.*\.cc:\d+: ", "", said) or type(error).__name__
            raise InvalidInputError(f"the grammar of kind {grammar.kind} cannot be compiled: {reason}") from error


def wait_for(futures: Iterable[Future[Any]], seconds: float) -> None:
    """Waits until one of them is done, but no longer than so many seconds."""
    wait(list(futures), timeout=seconds, return_when=FIRST_COMPLETED)
