"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from specdec.base.chat.thinking import thinking_of
from specdec.base.errors import SpecDecError
from specdec.base.version import __version__
from specdec.grammar.fields import GRAMMAR_FIELDS
from specdec.sampling.params import SamplingParams
from specdec.serve.answers.answer import Answer
from specdec.serve.answers.calls import CallCompletion
from specdec.serve.answers.chat import ChatCompletion, chat_text, unheeded
from specdec.serve.answers.completion import Completion
from specdec.serve.answers.stream import EventStream
from specdec.serve.answers.token_bytes import TokenBytes
from specdec.serve.answers.transport import ClientGone, Defects, Json, Whole, unless_gone
from specdec.serve.bodies import Route
from specdec.serve.errors import RequestError, check_outputs, malformed, refused
from specdec.serve.front import Front
from specdec.serve.guard import Guard
from specdec.serve.limits import MAX_PROMPT_LOGPROBS, TOKENIZED
from specdec.serve.protocol import (
    Chat,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrafterRequest,
    Generation,
    TokenizeRequest,
)
from specdec.serve.responses.answer import ResponseAnswer
from specdec.serve.responses.protocol import ResponsesRequest, own_words
from specdec.serve.sampling import sampling_params
from specdec.serve.state.metrics import CONTENT_TYPE, Metrics
from specdec.serve.state.request_log import HEADER, OUTPUTS, RequestLog
from specdec.serve.state.status import PAGE, status_of
from specdec.serve.texts import SHORT, characters
from specdec.serve.tools import Tools, tool_definitions, tools_of

T = TypeVar("T")

FEW_LOGPROBS = 4096
"""Log-probabilities that an answer is made of in the event loop."""


def make_app(front: Front) -> FastAPI:
    """The application; whoever runs it drains the front at its end."""
    app = FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=Json,
    )
    app.state.front = front
    app.router.route_class = Route
    app.add_middleware(Guard, config=front.config)
    app.add_middleware(Defects)
    if front.config.allowed_origins:
        origins = list(front.config.allowed_origins)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    app.add_middleware(RequestLog, lines=front.config.log_requests)
    _add_errors(app, front)
    _add_generation(app, front)
    _add_tokens(app, front)
    _add_state(app, front)
    if front.config.drafter_updates is not None:
        _add_updates(app, front)
    return app


def _add_generation(app: FastAPI, front: Front) -> None:
    engine, tokenizer = front.engine, front.engine.reader.tokenizer
    tokens_of = TokenBytes(tokenizer)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        prompts = asked.prompt
        _check(front, asked, len(prompts))
        sampling = await _sampling(front, asked)
        for prompt in prompts:
            length = len(prompt) if isinstance(prompt, str) else 0
            front.texts.check_length(length, engine.max_model_len)
        work = _completion_tokens(front, asked)
        made, echoes = await _while_there(http, sum(map(len, prompts)), work)
        _check_prompt_logprobs(sampling, made)
        sampling = await _predicted(front, http, sampling)
        answer = Completion(asked, front.names[0], made, tokens_of, echoes=echoes)
        return await _respond(front, http, answer, sampling)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, http: Request) -> Response:
        tokens, sampling, tools = await _conversation(front, asked, http)
        about = asked, front.names[0], [tokens], tokens_of
        answer = ChatCompletion(*about) if tools is None else CallCompletion(*about, tools=tools)
        return await _respond(front, http, answer, sampling)

    @app.post("/v1/responses")
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        asked = request.chat()
        with own_words():
            tokens, sampling, tools = await _conversation(front, asked, http)
        about, thinking = (asked, front.names[0], [tokens], tokens_of), thinking_of(tokenizer)
        answer = ResponseAnswer(*about, request=request, tools=tools, thinking=thinking)
        return await _respond(front, http, answer, sampling)


def _add_tokens(app: FastAPI, front: Front) -> None:
    engine, tokenizer = front.engine, front.engine.reader.tokenizer
    most = max(engine.max_model_len, TOKENIZED)

    def check_count(name: str, tokens: list[int]) -> None:
        if len(tokens) > most:
            what = f"{name} holds {len(tokens):,} tokens and the limit is {most:,}"
            raise RequestError(f"{what}; give fewer", name)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> Response:
        front.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if asked.prompt is None:
            tools = await asyncio.to_thread(tool_definitions, asked.tools)
            front.texts.check_length(characters([asked.messages, tools]), most)
            tokens = await _chat_tokens(front, asked, most, tools)
        elif asked.prompt:
            tokens = await front.texts.tokens(
                asked.prompt, special=asked.add_special_tokens is not False, most=most
            )
        else:
            tokens = []
        check_count("messages" if asked.prompt is None else "prompt", tokens)
        made = {"count": len(tokens), "max_model_len": front.max_total_tokens, "tokens": tokens}
        if asked.return_token_strs:
            made["token_strs"] = await front.texts.run(
                len(tokens), tokenizer.convert_ids_to_tokens, tokens
            )
        return Json(made)

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        front.check_model(asked.model)
        check_count("tokens", asked.tokens)
        if asked.tokens:
            engine.admission.check_tokens(asked.tokens)
        return {"prompt": await front.texts.run(len(asked.tokens), tokenizer.decode, asked.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": engine.admission.verifier.vocab_size,
            "max_model_len": front.max_total_tokens,
            **{name: getattr(tokenizer, name, None) for name in names},
        }


def _add_updates(app: FastAPI, front: Front) -> None:
    @app.post("/update_drafter")
    async def update_drafter(asked: DrafterRequest) -> dict[str, Any]:
        await front.update_drafter(asked.drafter)
        return {"drafter": asked.drafter}


def _add_state(app: FastAPI, front: Front) -> None:
    metrics = Metrics(front, ["specdec", "vllm"] if front.config.vllm_metrics else ["specdec"])
    start = time.monotonic()

    def described(name: str) -> dict[str, Any]:
        own = {
            "owned_by": "specdec",
            "root": front.names[0],
            "parent": None,
            "max_model_len": front.max_total_tokens,
        }
        return {"id": name, "object": "model", "created": front.created, **own}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in front.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        front.check_model(name)
        return described(name)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        state = {"avg_spec_accept_length": front.count().tau}
        return {**front.described(), "internal_states": [state]}

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD"])
    async def health() -> Response:
        front.check_open()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.get("/status")
    async def numbers() -> dict[str, Any]:
        return status_of(front, time.monotonic() - start)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI, front: Front) -> None:
    def answer(error: RequestError) -> Response:
        return Json(error.body, error.status, error.headers)

    @app.exception_handler(RequestError)
    async def refuse(http: Request, error: RequestError) -> Response:
        return answer(error)

    @app.exception_handler(SpecDecError)
    async def refuse_value(http: Request, error: SpecDecError) -> Response:
        made = refused(error)
        made.message = front.without_folder(made.message)
        return answer(made)

    @app.exception_handler(RequestValidationError)
    async def refuse_form(http: Request, error: RequestValidationError) -> Response:
        return answer(malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def refuse_route(http: Request, error: HTTPException) -> Response:
        what = f"{http.method} {http.url.path}: {str(error.detail).lower()}"
        if error.status_code == 404:
            routes = [one.path for one in app.routes if isinstance(one, APIRoute)]
            asked = ", ".join(one for one in routes if one.startswith("/v1/") and "{" not in one)
            what = f"{what}; there are {asked}"
        made = answer(RequestError(what, status=error.status_code))
        made.headers.update(error.headers or {})  # the methods that there are
        return made

    @app.exception_handler(ClientGone)
    async def forget(http: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # which nobody reads


def _check(front: Front, asked: Generation, num_prompts: int) -> None:
    """What costs nothing to know, before anything is made of the request."""
    front.check_open()
    front.check_model(asked.model)
    asked.check_others()
    budget, tokenizer = asked.thinking_token_budget, front.engine.reader.tokenizer
    if budget is not None and thinking_of(tokenizer) is None:
        message = "the model has no token that is known to end a thinking; leave it out"
        raise RequestError(f"thinking_token_budget: {message}", "thinking_token_budget")
    check_outputs(num_prompts * (asked.n or 1), front.config.max_choices)


def _check_prompt_logprobs(sampling: SamplingParams, prompts: list[list[int]]) -> None:
    """Raises:
    RequestError: they would be too many.
    """
    each = 0 if sampling.prompt_logprobs is None else sampling.prompt_logprobs + 1
    count = each * sum(map(len, prompts))
    if count > MAX_PROMPT_LOGPROBS:
        what = f"{count:,} log-probabilities of prompts are asked for"
        what = f"{what} and the limit is {MAX_PROMPT_LOGPROBS:,}"
        raise RequestError(f"{what}; give fewer prompts at once, or lower logprobs", "logprobs")


async def _sampling(front: Front, asked: Generation) -> SamplingParams:
    """How to decode a request. A schema, or what is as long, is looked at in a thread."""
    defaults = front.engine.admission.verifier.defaults
    make = partial(sampling_params, asked, defaults, most=front.max_total_tokens)
    asked_for = (getattr(asked, name) for name in GRAMMAR_FIELDS)
    if all(one is None or (isinstance(one, str) and len(one) <= SHORT) for one in asked_for):
        return make()
    return await asyncio.to_thread(make)


async def _predicted(front: Front, http: Request, sampling: SamplingParams) -> SamplingParams:
    """The sampling with the tokens of what the request predicts."""
    text = sampling.prediction
    if not isinstance(text, str):
        return sampling
    work = front.texts.predicted(sampling, text, most=front.engine.max_model_len)
    return await _while_there(http, len(text), work)


async def _while_there(http: Request, size: int, work: Coroutine[Any, Any, T]) -> T:
    """What comes of a text, unless it is long and the client goes meanwhile."""
    return await (work if size <= SHORT else unless_gone(http.receive, work))


async def _conversation(
    front: Front, asked: ChatRequest, http: Request
) -> tuple[list[int], SamplingParams, Tools | None]:
    """Tokens of a chat, how it goes on, and what it may call."""
    engine = front.engine
    _check(front, asked, 1)
    sampling, tools = await _sampling(front, asked), await _tools(front, asked)
    given = tools.given if tools else []
    size = characters([asked.messages, given])
    front.texts.check_length(size, engine.max_model_len)
    made = _chat_tokens(front, asked, engine.max_model_len, given)
    tokens = await _while_there(http, size, made)
    if asked.max_output is None:
        sampling = replace(sampling, max_tokens=max(1, front.max_total_tokens - len(tokens)))
    sampling = await _predicted(front, http, sampling)
    if tools is not None:
        sampling = tools.sampling(engine.reader.tokenizer, sampling)
    return tokens, sampling.for_chat(), tools


async def _completion_tokens(
    front: Front, asked: CompletionRequest
) -> tuple[list[list[int]], list[str] | None]:
    """Tokens of the prompts, and their texts where they are wanted."""
    texts, engine = front.texts, front.engine
    most, special = engine.max_model_len, asked.add_special_tokens
    made = [await texts.tokens(prompt, special=special, most=most) for prompt in asked.prompt]
    if not asked.echo:
        return made, None
    decode = engine.reader.tokenizer.decode
    return made, [
        one if isinstance(one, str) else str(await texts.run(len(one), decode, one))
        for one in asked.prompt
    ]


async def _tools(front: Front, asked: ChatRequest) -> Tools | None:
    """The tools of a chat. They are looked at in a thread."""
    if not asked.tools and asked.tool_choice is None:
        return None
    tokenizer = front.engine.reader.tokenizer
    return await asyncio.to_thread(tools_of, asked, tokenizer, front.tool_format)


async def _chat_tokens(
    front: Front, asked: Chat | TokenizeRequest, most: int, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Tokens of a chat."""
    size = characters([asked.messages, asked.chat_template_kwargs, list(tools)])
    render, special = chat_text(front.engine.reader, asked, tools), bool(asked.add_special_tokens)
    return await front.texts.chat(size, render, special=special, most=most)


async def _respond(
    front: Front, http: Request, answer: Answer, sampling: SamplingParams
) -> Response:
    """Submits the outputs and responds. What cannot be followed is refused before a status."""
    if sampling.grammar is not None:
        await unless_gone(http.receive, front.wait_for_grammar(sampling))
        answer.notes = [*answer.notes, *sampling.grammar.notes]
    if isinstance(answer.asked, ChatRequest):
        answer.notes = [*answer.notes, *unheeded(answer.asked, front.engine.reader.tokenizer)]
    asked = [(tokens, sampling.choice(n)) for tokens in answer.prompts for n in range(answer.n)]
    stream = bool(answer.asked.stream)
    outputs = front.submit(asked, incremental=stream, parted=answer.parted, tagged=answer.tagged)
    http.scope[OUTPUTS] = outputs
    if stream:
        return EventStream(outputs, answer)
    try:
        results = await outputs.results(http.receive)
        if answer.num_logprobs(results) <= FEW_LOGPROBS:
            return Json(answer.whole(results))
        count = answer.num_logprobs(results)
        return await front.texts.run(count, lambda: Whole(answer.whole(results)))
    finally:
        outputs.close()
