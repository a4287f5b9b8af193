"""The Python API: load a target and a drafter, generate or stream, see how drafts fared."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from torch import Tensor

from specdec.base.chat.messages import check_variables, template_variables
from specdec.base.config import (
    DEFAULT_BLOCK_SIZE,
    CacheDtype,
    EngineConfig,
    GenerationSource,
    LoadConfig,
    PrefillDtype,
    WeightForm,
)
from specdec.base.errors import InvalidInputError, SpecDecError, one_line, shown
from specdec.device.device import resolve_device
from specdec.engine.capture.compiled import Progress
from specdec.engine.capture.warmup import Seconds, get_ready
from specdec.engine.lockstep import make_engine
from specdec.model.core import Drafter, Verifier
from specdec.model.scratch import next_token_logits
from specdec.parallel.executor import Executor, collective_rpc, executor_of
from specdec.sampling.params import SamplingParams
from specdec.session.drafter_choice import DrafterChoice, find_drafter, stage
from specdec.session.loading import load_target
from specdec.session.outputs import GenerationResult, StreamChunk
from specdec.session.prompts import PromptReader
from specdec.session.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Tensor | Sequence[dict[str, Any]]
"""Raw text, token ids (also in an array or a tensor), or messages with `role` and `content`."""

Sampling = SamplingParams | Sequence[SamplingParams] | None
Prompts = (
    list[str]
    | list[list[int]]
    | list[list[dict[str, Any]]]
    | tuple[str, ...]
    | Sequence[Sequence[int]]
    | list[Prompt]
)
"""Many of them."""


class SpecDecoder:
    """Accelerated generation with exactly the target's own output.

    Args:
        verifier: the target.
        tokenizer: the target's tokenizer.
        drafter: proposes drafts; None decodes plainly.
        config: limits and choices of the engine.
        chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`,
            where a call does not say them itself.

    Example:
        >>> decoder = SpecDecoder.from_pretrained()  # doctest: +SKIP
        >>> decoder.generate("Once upon a time", max_tokens=32).text  # doctest: +SKIP
    """

    def __init__(
        self,
        verifier: Verifier,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            what = f"the engine's config is a {type(config).__name__}"
            raise InvalidInputError(f"{what}; give an EngineConfig")
        if drafter is not None and (isinstance(drafter, type) or not hasattr(drafter, "bind")):
            what = f"drafter is {shown(drafter)}"
            raise InvalidInputError(f"{what}; give a Drafter, or a name to from_pretrained")
        self.verifier = verifier
        self.tokenizer = tokenizer
        self._variables = template_variables(chat_template_kwargs)
        self.engine = make_engine(verifier, drafter, config, tokenizer)
        self.session = Session(self.engine, tokenizer)
        self._ranks: Executor | None = None
        self._updating = threading.Lock()

    @property
    def reader(self) -> PromptReader:
        """What makes tokens of prompts."""
        return PromptReader(self.tokenizer, self.verifier.name, self._variables)

    @property
    def ranks(self) -> Executor | None:
        """The processes that compute the target together; None where this one does alone."""
        return executor_of(self.verifier)

    def get_ready(self, progress: Progress) -> Seconds:
        """Compiles and captures what a server may need, see `specdec.engine.capture.warmup`."""
        return get_ready(self.engine, progress)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path = "embedded",
        *,
        drafter: DrafterChoice = "auto",
        device: str = "auto",
        dtype: str = "auto",
        attention: str = "auto",
        block_size: int = DEFAULT_BLOCK_SIZE,
        kv_dtype: CacheDtype = "auto",
        prefill_dtype: PrefillDtype = "auto",
        weights: WeightForm = "as-stored",
        tensor_parallel: int | None = None,
        generation_config: GenerationSource = "model",
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | str | None = None,
        engine: EngineConfig | None = None,
    ) -> SpecDecoder:
        """Loads a target and a drafter.

        Args:
            target: "embedded", a local folder, a GGUF file, or a hub name: owner/name,
                owner/name:folder or owner/name:Q4_K_M, with @revision at its end.
            drafter: "auto", "smollm2-dflash" (comes with the package, for the embedded model),
                "ngram", "suffix", the folder or hub name of a checkpoint, several of these with +
                between them, a drafter of your own (see `find_drafter`), or None. "auto" takes
                smollm2-dflash for the embedded model and n-gram lookup for all others.
            device, dtype, attention, block_size, kv_dtype, prefill_dtype, weights,
            generation_config,
                chat_template, chat_template_kwargs: see `specdec.base.config.LoadConfig`.
            tensor_parallel: processes that compute the target together, this one among them:
                docs/tensor-parallel.md. They are started here, or by `torchrun`. None is this one
                alone.
            engine: limits and choices.

        Raises:
            SpecDecError: one line about an argument, a checkpoint or their combination.
        """
        load = LoadConfig(
            device=device,
            dtype=dtype,
            attention=attention,
            block_size=block_size,
            kv_dtype=kv_dtype,
            prefill_dtype=prefill_dtype,
            weights=weights,
            tensor_parallel=tensor_parallel,
            generation_config=generation_config,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,  # type: ignore[arg-type]  # made JSON there
        )
        where, make_drafter = resolve_device(load.device), find_drafter(drafter)
        with load_target(target, load, where) as (verifier, tokenizer, ranks):
            variables = PromptReader.of(tokenizer, verifier.name, load).variables
            decoder = cls(verifier, tokenizer, make_drafter(verifier), engine, variables)
        decoder._ranks = ranks
        return decoder

    def update_drafter(self, drafter: DrafterChoice) -> None:
        """Replaces the drafter's weights while it is in use. Requests go on, and no output depends
        on it; their prompts and outputs so far are prefilled once more, since nothing that was
        cached with the old weights is used with the new ones. From any thread; it returns once the
        new weights draft.

        Args:
            drafter: a checkpoint with the same `config.json`, `coupling` aside; see
                `from_pretrained`. In a composition it takes the place of the part that is made
                alike.

        Raises:
            SpecDecError: it cannot be loaded, or is made otherwise; the old weights stay.
        """
        with self._updating:
            error = collective_rpc(self.verifier, stage, self.engine, drafter)
            if error is not None:
                raise error
            assert self.engine.staged is not None
            self.session.between_steps(partial(self.engine.exchange, self.engine.staged))

    def __enter__(self) -> Self:
        """The decoder, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is unfinished, and ends the target's other processes, for good."""
        self.session.close()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.let_go()

    def plain(self) -> SpecDecoder:
        """This target without a drafter, with a cache of its own: the baseline of every ratio."""
        return self.variant(None, self.engine.config.plain())

    def variant(self, drafter: Drafter | None, config: EngineConfig) -> SpecDecoder:
        """This target with another drafter and engine."""
        return SpecDecoder(self.verifier, self.tokenizer, drafter, config, self._variables)

    @overload
    def generate(
        self,
        inputs: Prompt,
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        inputs: Prompts,
        sampling: Sampling = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> list[GenerationResult]: ...
    def generate(
        self,
        inputs: Prompt | Prompts,
        sampling: Sampling = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generates for one prompt, or for many at once.

        Args:
            inputs: a string (raw text, no chat template), token ids, chat messages, or a list of
                these.
            sampling: how to decode; a list has one for each of many inputs.
            chat_template_kwargs: variables of the chat template, over those of the decoder.
            **overrides: fields of `SamplingParams`, by name; `max_new_tokens` is another name of
                `max_tokens`.

        Returns:
            A result for one input; a list in the order of the inputs for many.

        Raises:
            SpecDecError: a value is out of range, or the only input cannot be served. Of many
                inputs, one that cannot be served gets a result with `finish_reason` "error", and
                the others go on.
        """
        prompts, single = _as_prompts(inputs)
        ways = _samplings(sampling, overrides, len(prompts))
        chunks = self._chunks(prompts, single, ways, chat_template_kwargs, incremental=False)
        results = {chunk.index: chunk.result for chunk in chunks if chunk.result is not None}
        return results[0] if single else [results[index] for index in range(len(prompts))]

    def stream(
        self,
        inputs: Prompt | Prompts,
        sampling: Sampling = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Iterator[StreamChunk]:
        """Like `generate`, as chunks that arrive meanwhile; those of many inputs interleave.

        Closing the iterator early cancels what is unfinished.
        """
        prompts, single = _as_prompts(inputs)
        ways = _samplings(sampling, overrides, len(prompts))
        return self._chunks(prompts, single, ways, chat_template_kwargs, incremental=True)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        template: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of one prompt; chat messages go through the tokenizer's chat template.

        Args:
            add_special_tokens: such as a first token that begins every text; None adds them to
                texts and not to chats, whose templates have them.
            template: options of the chat template in place of `add_generation_prompt=True`.
            chat_template_kwargs: variables of the chat template, over those of the decoder.

        Raises:
            InvalidInputError: the prompt is empty or no Unicode text, holds what is no token id, or
                is a chat that the tokenizer has no template for.
        """
        variables = template_variables(chat_template_kwargs)
        check_variables(variables, self.tokenizer)
        template = {**(template or {"add_generation_prompt": True}), **variables}
        special = add_special_tokens
        return self.reader.tokenize(_listed(prompt), add_special_tokens=special, template=template)

    def next_token_logits(self, prompt: Prompt) -> Tensor:
        """The target's unprocessed logits after a prompt, float32 [V], with their own cache."""
        ids = self.tokenize(prompt)
        self.engine.admission.check_tokens(ids)
        return collective_rpc(self.verifier, next_token_logits, self.verifier, ids)

    def _chunks(
        self,
        prompts: list[Prompt],
        single: bool,
        samplings: list[SamplingParams],
        variables: Mapping[str, Any] | None,
        *,
        incremental: bool,
    ) -> Iterator[StreamChunk]:
        """Chunks of all prompts; those that cannot be served come first, as errors."""
        variables = template_variables(variables)
        check_variables(variables, self.tokenizer)
        pairs = zip(prompts, samplings, strict=True)
        samplings = [one.for_chat() if _is_chat(prompt) else one for prompt, one in pairs]
        wrong = self._wrong_grammars(samplings)
        predicting = cache(self.reader.with_prediction)  # many prompts may have one way
        served: list[tuple[int, list[int]]] = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            try:
                if sampling.grammar in wrong:
                    raise wrong[sampling.grammar]
                token_ids = self.tokenize(prompt, chat_template_kwargs=variables)
                samplings[index] = sampling = predicting(sampling)
                self.engine.admission.check(token_ids, sampling)
                served.append((index, token_ids))
            except SpecDecError as error:
                if single:
                    raise
                yield StreamChunk(index, "", [], GenerationResult.refused(error))
        prepared = ((token_ids, samplings[index]) for index, token_ids in served)
        # early, if this one is closed early
        with closing(self.session.map(prepared, incremental=incremental)) as chunks:
            for chunk in chunks:
                chunk.index = served[chunk.index][0]
                yield chunk

    def _wrong_grammars(self, samplings: Sequence[SamplingParams]) -> dict[object, SpecDecError]:
        """Grammars that cannot be compiled; raises where all prompts have the one."""
        wrong: dict[object, SpecDecError] = {}
        by_grammar = {sampling.grammar: sampling for sampling in samplings}
        for grammar, sampling in by_grammar.items():
            try:
                self.engine.admission.wait_for_grammar(sampling)
            except SpecDecError as error:
                if len(by_grammar) == 1:
                    raise
                wrong[grammar] = error
        return wrong


_BYTES = bytes | bytearray | memoryview
_FORMS = "a prompt is a string, a list of token ids or a list of messages"


def _as_prompts(inputs: Prompt | Prompts) -> tuple[list[Prompt], bool]:
    """The inputs as a list, and whether there was just one."""
    items = _listed(inputs)
    if isinstance(items, str):
        return [items], True
    if not items:
        raise InvalidInputError(
            "there is no prompt; give a string, token ids, chat messages, or a list of these"
        )
    if any(all(isinstance(item, kind) for item in items) for kind in (int, dict)):
        return [items], True
    for index, item in enumerate(items):
        if not isinstance(item, str | list | tuple | range):
            raise InvalidInputError(f"input {index} is a {type(item).__name__}; {_FORMS}")
    return items, False


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _listed(inputs: Any) -> Any:
    """A string as it is; anything in an order as a list, arrays and numbers as Python's own."""
    inputs = _numbers(inputs)
    if isinstance(inputs, str):
        return inputs
    if isinstance(inputs, Mapping | Set | _BYTES) or not isinstance(inputs, Iterable):
        raise InvalidInputError(f"the input is a {type(inputs).__name__}; {_FORMS}")
    return [_numbers(item) for item in inputs]


def _numbers(given: Any) -> Any:
    """Arrays and numbers as Python's own, anything else as it is."""
    if not hasattr(given, "tolist") or isinstance(given, _BYTES):
        return given
    try:
        return given.tolist()
    except RuntimeError as error:  # of torch, for a tensor without data or in another layout
        what = f"a {type(given).__name__} of the input cannot be read ({one_line(error)})"
        raise InvalidInputError(f"{what}; {_FORMS}") from error


def _samplings(sampling: Sampling, overrides: dict[str, Any], count: int) -> list[SamplingParams]:
    """One per input."""
    if not isinstance(sampling, Sequence):
        return [_with(sampling, overrides)] * count
    if len(sampling) != count:
        what = f"{len(sampling)} samplings are given for {count} inputs"
        raise InvalidInputError(f"{what}; give one, or one for each")
    return [_with(one, dict(overrides)) for one in sampling]


def _with(sampling: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
    if sampling is not None and not isinstance(sampling, SamplingParams):
        what = f"sampling is a {type(sampling).__name__}"
        raise InvalidInputError(f"{what}; give a SamplingParams, or its fields by name")
    if "max_new_tokens" in overrides:
        if "max_tokens" in overrides:
            what = "max_tokens is given twice, once as max_new_tokens"
            raise InvalidInputError(f"{what}; give one of them")
        overrides["max_tokens"] = overrides.pop("max_new_tokens")
    known = SamplingParams.__dataclass_fields__
    unknown = [name for name in overrides if name not in known]
    if unknown:
        names = ", ".join(known)
        raise InvalidInputError(f"unknown sampling value {unknown[0]!r} (known: {names})")
    return replace(sampling or SamplingParams(), **overrides)
