"""Lines of a file as requests: those of OpenAI's batches, and what any line says of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from specdec.base.chat.thinking import thinking_of
from specdec.base.chat.tools import format_of
from specdec.base.checkpoint.hub import unpinned
from specdec.base.errors import InvalidInputError, SpecDecError, shown
from specdec.grammar.fields import GRAMMAR_FIELDS
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.serve.answers.calls import CallCompletion
from specdec.serve.answers.chat import ChatCompletion, chat_text, unheeded
from specdec.serve.answers.completion import Completion
from specdec.serve.answers.token_bytes import TokenBytes
from specdec.serve.config import ServeConfig
from specdec.serve.errors import (
    RequestError,
    check_model,
    check_outputs,
    engine_failed,
    malformed,
    refused,
)
from specdec.serve.processes.setup import last_part
from specdec.serve.protocol import Body, Chat, ChatRequest, CompletionRequest, Generation
from specdec.serve.responses.answer import ResponseAnswer
from specdec.serve.responses.protocol import ResponsesRequest, own_words
from specdec.serve.sampling import SAME, sampling_params, wishes
from specdec.serve.tools import Tools, tools_of
from specdec.session.outputs import GenerationResult
from specdec.session.prompts import PromptReader
from specdec.session.thinking import parts_of

ROUTES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
"""Where the requests of a batch go."""

_OWN = ("n", "top_k", "max_tokens", "prediction")
TEMPLATE_FIELDS = {*Chat.model_fields} - {"messages"}
LINE_FIELDS = TEMPLATE_FIELDS | {
    *Generation.model_fields.keys() & SAME.union(GRAMMAR_FIELDS, _OWN),
    "max_completion_tokens",
}
"""What a line that is no request of a batch may say, in the words of one."""

_LIMITS: Any = ServeConfig.__dataclass_fields__
MAX_OUTPUTS: int = _LIMITS["max_choices"].default
"""Most outputs of a request, as in a server that says nothing else."""

Job = tuple[list[int], SamplingParams]


def _read(kind: type[Body], body: Mapping[str, Any]) -> Any:
    """A request.

    Raises:
        RequestError: it is none, or asks for what cannot be had.
    """
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise malformed([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error
    asked.check_others()
    return asked


def line_wishes(line: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `SamplingParams` that the fields of a line ask for.

    Raises:
        InvalidInputError: one cannot be honored.
    """
    try:
        body = {"messages": [{}], **{name: line[name] for name in line if name in LINE_FIELDS}}
        asked = _read(ChatRequest, body)
        check_outputs(asked.n or 1, MAX_OUTPUTS)
        made = wishes(asked)
        return {name: made[name] for name in made.keys() - {"logprobs", "top_logprobs"}}
    except RequestError as error:
        raise InvalidInputError(error.message) from error


def line_prompt(reader: PromptReader, messages: list[Any], line: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation whose line has words for its template.

    Raises:
        InvalidInputError: the template refuses them.
    """
    try:
        own = {name: line[name] for name in line if name in TEMPLATE_FIELDS}
        asked = Chat.model_validate({"messages": messages, **own})
        return _chat_tokens(reader, asked)
    except RequestError as error:
        raise InvalidInputError(error.message) from error


def _chat_tokens(
    reader: PromptReader, asked: Chat, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    text = chat_text(reader, asked, tools)()
    return reader.tokenize(text, add_special_tokens=bool(asked.add_special_tokens))


def _num_outputs(asked: Generation) -> int:
    prompts = len(asked.prompt) if isinstance(asked, CompletionRequest) else 1
    return prompts * (asked.n or 1)


@dataclass(eq=False)
class BatchLine:
    """A request of an OpenAI batch file, and what becomes of it.

    Attributes:
        record: its line.
        names: by which the model is called.
        asked: the request; None where it is none.
        error: why it cannot be served.
        said: of `SamplingParams`, what no default changes, once its `jobs` are known.
    """

    record: Mapping[str, Any]
    names: Sequence[str]
    asked: Generation | None = None
    error: RequestError | None = None
    said: frozenset[str] = frozenset()
    _tools: Tools | None = None
    _response: ResponsesRequest | None = None

    @classmethod
    def read(cls, record: Mapping[str, Any], model: str) -> BatchLine:
        """The request of a line, to this model; one that cannot be served has an error."""
        made = cls(record, tuple(dict.fromkeys([last_part(unpinned(model)), model])))
        try:
            made.asked = made._request()
        except RequestError as error:
            made.error = error
        return made

    @classmethod
    def wrong(cls, record: Mapping[str, Any], model: str, why: str) -> BatchLine:
        """A line that is no request."""
        return cls(record, (model,), error=RequestError(why, code="invalid_line"))

    def _request(self) -> Generation:
        method, url, body = (self.record.get(name) for name in ("method", "url", "body"))
        if not isinstance(self.custom_id, str):
            what = f"custom_id is {shown(self.custom_id)}"
            raise RequestError(f"{what}; give a text, as all lines of a batch file have")
        if method != "POST" or url not in ROUTES:
            known = " or ".join(ROUTES)
            raise RequestError(f"a line asks {method} {url}; it must be POST {known}")
        if not isinstance(body, Mapping):
            raise RequestError("the body of a line is no JSON object")
        asked: Any = _read(ROUTES[url], body)
        if isinstance(asked, ResponsesRequest):
            self._response, asked = asked, asked.chat()
            asked.check_others()
        if asked.stream:
            raise RequestError("a batch has no streams; leave stream out", "stream")
        check_model(asked.model, self.names, self.names)
        check_outputs(_num_outputs(asked), MAX_OUTPUTS)
        made: Generation = asked
        return made

    @property
    def custom_id(self) -> Any:
        """The line's own name for itself."""
        return self.record.get("custom_id")

    @property
    def num_outputs(self) -> int:
        """Outputs of all prompts; one where there is no request."""
        return 1 if self.asked is None else _num_outputs(self.asked)

    def jobs(
        self,
        reader: PromptReader,
        defaults: SamplingDefaults,
        given: Mapping[str, Any],
        most: int,
        check: Callable[[list[int], SamplingParams], object] = lambda tokens, sampling: None,
    ) -> list[Job]:
        """Token ids and sampling of each output.

        Args:
            given: what else holds where the request says nothing.
            most: tokens of prompt and output together.
            check: raises where an engine would.

        Raises:
            InvalidInputError: a value is out of range, or a prompt cannot be read.
        """
        if self.error is not None:
            raise InvalidInputError(self.error.message)
        asked = self.asked
        assert asked is not None
        try:
            with own_words() if self._response is not None else nullcontext():
                prompts, sampling = self._prepared(asked, reader, defaults, given, most)
                for prompt in prompts:
                    check(prompt, sampling)
        except RequestError as error:
            self.error = error
        except SpecDecError as error:
            self.error = refused(error)
        if self.error is not None:
            raise InvalidInputError(self.error.message)
        self._made, self._sampling = prompts, sampling
        return [(one, sampling.choice(index)) for one in prompts for index in range(asked.n or 1)]

    def _prepared(
        self,
        asked: Generation,
        reader: PromptReader,
        defaults: SamplingDefaults,
        given: Mapping[str, Any],
        most: int,
    ) -> tuple[list[list[int]], SamplingParams]:
        """Token ids of the prompts, and the sampling of the first output of each."""
        self.said = frozenset(wishes(asked)) | given.keys()
        if isinstance(asked, CompletionRequest):
            self.said |= {"max_tokens"}
        sampling = sampling_params(asked, defaults, most=most, given=given)
        sampling = reader.with_prediction(sampling)
        if isinstance(asked, CompletionRequest):
            special = asked.add_special_tokens
            prompts = [reader.tokenize(one, add_special_tokens=special) for one in asked.prompt]
        else:
            assert isinstance(asked, ChatRequest)
            form = format_of(reader.tokenizer)
            self._tools = tools_of(asked, reader.tokenizer, form)
            prompts = [_chat_tokens(reader, asked, self._tools.given if self._tools else ())]
            if self._tools is not None:
                sampling = self._tools.sampling(reader.tokenizer, sampling)
            if asked.max_output is None and "max_tokens" not in given:
                left = max(1, most - len(prompts[0]))
                sampling = replace(sampling, max_tokens=left)
            sampling = sampling.for_chat()
        return prompts, sampling

    def answer(
        self, key: str, results: Sequence[GenerationResult] | None, reader: PromptReader
    ) -> dict[str, Any]:
        """The line that tells of it.

        Args:
            results: of its outputs; None where they were not finished.
        """
        line: dict[str, Any] = {"id": f"batch_req_{key}", "custom_id": self.custom_id}
        if results is None:
            error = {"code": "batch_cancelled", "message": "the run was interrupted"}
            return line | {"response": None, "error": error}
        status, body = 200, {}
        try:
            body = self._body(results, reader)
        except RequestError as error:
            status, body = error.status, error.body
        response = {"status_code": status, "request_id": f"req_{key}", "body": body}
        return line | {"response": response, "error": None}

    def _body(self, results: Sequence[GenerationResult], reader: PromptReader) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        for result in results:
            if result.error is not None:
                error = InvalidInputError(result.error)
                raise refused(error) if result.bad_input else engine_failed(error)
        tokens, name = TokenBytes(reader.tokenizer), self.names[0]
        if isinstance(self.asked, CompletionRequest):
            decode, asked = reader.tokenizer.decode, self.asked
            texts = [one if isinstance(one, str) else str(decode(one)) for one in asked.prompt]
            echoes = texts if asked.echo else None
            return Completion(asked, name, self._made, tokens, echoes=echoes).whole(results)
        assert isinstance(self.asked, ChatRequest)
        about = self.asked, name, self._made, tokens
        tools = self._tools
        chat: ChatCompletion
        if self._response is not None:
            thinking = thinking_of(reader.tokenizer)
            chat = ResponseAnswer(*about, request=self._response, tools=tools, thinking=thinking)
        else:
            chat = CallCompletion(*about, tools=tools) if tools else ChatCompletion(*about)
        if self._sampling.grammar is not None:
            chat.notes = [*chat.notes, *self._sampling.grammar.notes]
        chat.notes = [*chat.notes, *unheeded(self.asked, reader.tokenizer)]
        if chat.parted:
            for result in results:
                parts = parts_of(reader.tokenizer, result, self._sampling, tagged=chat.tagged)
                if parts is not None:
                    result.reasoning, result.content = parts
        return chat.whole(results)
