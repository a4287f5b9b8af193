"""The routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from specdec import __version__
from specdec.engine.outputs import GenerationResult
from specdec.errors import SpecDecError
from specdec.sampling_params import SamplingParams
from specdec.serve.answer import Answer
from specdec.serve.chat import ChatCompletion, chat_tokens
from specdec.serve.completion import Completion
from specdec.serve.errors import RequestError, malformed, refused
from specdec.serve.front import Front, Outputs
from specdec.serve.guard import Guard
from specdec.serve.metrics import CONTENT_TYPE, Metrics
from specdec.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from specdec.serve.sampling import sampling_params
from specdec.serve.status import PAGE, Status
from specdec.serve.token_bytes import TokenBytes
from specdec.serve.transport import ClientGone, Defects, EventStream, unless_gone


def make_app(front: Front) -> FastAPI:
    """The application; whoever runs it drains the front at its end."""
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.front = front
    app.add_middleware(Guard, config=front.config)
    app.add_middleware(Defects)
    if front.config.allowed_origins:
        origins = list(front.config.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    _add_errors(app)
    _add_generation(app, front)
    _add_tokens(app, front)
    _add_state(app, front)
    return app


def _add_generation(app: FastAPI, front: Front) -> None:
    decoder = front.decoder
    tokens_of = TokenBytes(decoder.tokenizer)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        _check(front, asked)
        prompts = _prompts(asked.prompt)
        made = [await _completion_tokens(front, prompt, asked) for prompt in prompts]
        sampling = sampling_params(asked, decoder.verifier.defaults, most=decoder.engine.max_model_len)
        echoes = None
        if asked.echo:
            decode = decoder.tokenizer.decode
            echoes = [one if isinstance(one, str) else str(await front.in_thread(decode, one)) for one in prompts]
        answer = Completion(asked, front.names[0], made, tokens_of, echoes=echoes)
        return await _respond(front, http, answer, sampling)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, http: Request) -> Response:
        _check(front, asked)
        tokens = await front.in_thread(chat_tokens, decoder, asked)
        sampling = sampling_params(asked, decoder.verifier.defaults, most=max(1, decoder.engine.max_model_len - len(tokens)))
        return await _respond(front, http, ChatCompletion(asked, front.names[0], [tokens], tokens_of), sampling)


def _add_tokens(app: FastAPI, front: Front) -> None:
    decoder, tokenizer = front.decoder, front.decoder.tokenizer

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        front.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError(400, "give either prompt or messages", param="prompt")
        if asked.prompt is None:
            tokens = await front.in_thread(chat_tokens, decoder, asked)
        elif asked.prompt:
            tokens = await front.in_thread(decoder.tokenize, asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
        else:
            tokens = []
        names = {"token_strs": tokenizer.convert_ids_to_tokens(tokens)} if asked.return_token_strs else {}
        return {"count": len(tokens), "max_model_len": decoder.engine.max_model_len, "tokens": tokens, **names}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        front.check_model(asked.model)
        if asked.tokens:
            decoder.engine.admission.check_tokens(asked.tokens)
        return {"prompt": await front.in_thread(tokenizer.decode, asked.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": decoder.verifier.vocab_size,
            "max_model_len": decoder.engine.max_model_len,
            **{name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "chat_template": getattr(tokenizer, "chat_template", None),
        }


def _add_state(app: FastAPI, front: Front) -> None:
    metrics = Metrics(front, ["specdec", "vllm"] if front.config.vllm_metrics else ["specdec"])
    status = Status(front)

    def described(name: str) -> dict[str, Any]:
        most = front.decoder.engine.max_model_len
        own = {"owned_by": "specdec", "root": front.names[0], "parent": None, "max_model_len": most}
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
        front.count()
        return {"internal_states": [{"avg_spec_accept_length": front.totals.tau}]}

    @app.get("/health")
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
        return status.numbers()

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    def answer(error: RequestError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestError)
    async def refuse(http: Request, error: RequestError) -> Response:
        return answer(error)

    @app.exception_handler(SpecDecError)
    async def refuse_value(http: Request, error: SpecDecError) -> Response:
        return answer(refused(error))

    @app.exception_handler(RequestValidationError)
    async def refuse_form(http: Request, error: RequestValidationError) -> Response:
        return answer(malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def refuse_route(http: Request, error: HTTPException) -> Response:
        return answer(RequestError(error.status_code, f"{http.method} {http.url.path}: {str(error.detail).lower()}"))

    @app.exception_handler(ClientGone)
    async def forget(http: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # which nobody reads


def _check(front: Front, asked: Generation) -> None:
    front.check_open()
    front.check_model(asked.model)
    asked.check_others()


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a completion one by one."""
    if isinstance(given, str):
        return [given]
    if not given or isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return list(given)


async def _completion_tokens(front: Front, prompt: str | list[int], asked: CompletionRequest) -> list[int]:
    decoder = front.decoder
    tokens: list[int] = await front.in_thread(decoder.tokenize, prompt, add_special_tokens=asked.add_special_tokens)
    return tokens


async def _respond(front: Front, http: Request, answer: Answer, sampling: SamplingParams) -> Response:
    """Submits the outputs and makes the response. What cannot be followed is refused before there is a status."""
    if sampling.grammar is not None:
        await unless_gone(http.receive, front.wait_for_grammar(sampling))
        answer.notes = sampling.grammar.notes
    asked = [(tokens, sampling.choice(number)) for tokens in answer.prompts for number in range(answer.n)]
    if answer.asked.stream:
        outputs = front.submit(asked, incremental=True)
        options = answer.asked.stream_options
        return EventStream(_events(outputs, answer, usage=options is not None and options.include_usage), outputs.close)
    outputs = front.submit(asked, incremental=False)
    try:
        return JSONResponse(answer.whole(await unless_gone(http.receive, outputs.results())))
    finally:
        outputs.close()


async def _events(outputs: Outputs, answer: Answer, *, usage: bool) -> AsyncIterator[dict[str, Any]]:
    results: dict[int, GenerationResult] = {}
    for event in answer.openings():
        yield event
    async for chunk in outputs.chunks():
        if chunk.result is not None:
            results[chunk.index] = chunk.result
        for event in answer.events(chunk):
            yield event
    if usage:
        yield answer.closing([results[index] for index in sorted(results)])
