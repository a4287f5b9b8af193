"""Where answers come from: our engine, or a server with OpenAI's API."""

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from specdec.base.config import LoadConfig
from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.base.files import parse_json
from specdec.base.registry import TOKENIZERS, resolve
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from specdec.session.prompts import PromptReader
from specdec.session.provenance import command_line, commit, origin_of_run, versions

Asked = tuple[list[int], SamplingParams]
Answered = Generator[tuple[int, GenerationResult], None, None]
Answering = Callable[[Iterator[Asked]], Answered]
"""Answers prompts, whose numbers come with the answers as they end."""

WAITS = (1.0, 5.0, 25.0)
"""Seconds before a request is sent once more that a server was too busy for."""
_BUSY = (429, 500, 502, 503, 504)
_TIMEOUT = 3600.0  # of an answer, which may wait behind many others


@dataclass(frozen=True, slots=True)
class Source:
    """A target that answers.

    Attributes:
        name: for messages.
        reader: makes tokens of prompts.
        max_model_len: tokens of a prompt and its answer.
        answers: asks.
        origin: what is kept beside the answers.
    """

    name: str
    reader: PromptReader
    max_model_len: int
    answers: Answering
    origin: dict[str, Any]

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self.reader.tokenizer

    @classmethod
    def of_engine(cls, decoder: SpecDecoder) -> "Source":
        """Our engine."""

        def answers(prompts: Iterator[Asked]) -> Answered:
            with closing(decoder.session.map(prompts, text=False)) as chunks:
                for chunk in chunks:
                    assert chunk.result is not None, "only ends are asked for"
                    yield chunk.index, chunk.result

        name, limit = decoder.verifier.name, decoder.engine.max_model_len
        origin = origin_of_run(decoder.verifier, decoder.reader) | {"target": name}
        return cls(name, decoder.reader, limit, answers, origin)

    @classmethod
    def of_server(
        cls,
        url: str,
        model: str,
        *,
        max_model_len: int,
        at_once: int,
        load: LoadConfig | None = None,
    ) -> "Source":
        """A server, which is asked for completions of token ids.

        Args:
            url: with or without /v1; the variable OPENAI_API_KEY is its key.
            model: the target, whose tokenizer is loaded; the server may call it otherwise.
            max_model_len: if the server does not say.
            at_once: requests that it is sent.
            load: whose template the prompts have.

        Raises:
            SpecDecError: nobody answers there.
            InvalidInputError: it has several models, none of this name.
        """
        server = _Server(url)
        models = server.ask("models")["data"]
        known = {one["id"]: one for one in models}
        if model not in known and len(known) != 1:
            what = f"{url} has no model {model!r} (it has {', '.join(known)})"
            way_out = "give its name with --model, or a server of this target alone"
            raise InvalidInputError(f"{what}; {way_out}")
        served = known.get(model) or models[0]
        called = served["id"]
        tokenizer = resolve(TOKENIZERS, "hf", "tokenizer")(model)
        reader = PromptReader.of(tokenizer, model, load or LoadConfig())

        def answers(prompts: Iterator[Asked]) -> Answered:
            pool, running = ThreadPoolExecutor(at_once), dict[Future[GenerationResult], int]()
            numbered = enumerate(prompts)
            try:
                while True:
                    while len(running) < at_once and (one := next(numbered, None)) is not None:
                        number, (ids, sampling) = one
                        future = pool.submit(server.complete, called, tokenizer, ids, sampling)
                        running[future] = number
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

        about = {"target": model, **reader.stated, "server": url, "served_as": called}
        run = {"command": command_line(), "commit": commit(), "versions": versions()}
        origin = run | about
        limit = served.get("max_model_len") or max_model_len
        return cls(model, reader, limit, answers, origin)

    def tokenize(self, prompt: Any) -> list[int]:
        """See `specdec.session.decoder.SpecDecoder.tokenize`."""
        return self.reader.tokenize(prompt)


class _Server:
    """Asks a server, whose address may end with /v1."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def complete(
        self, model: str, tokenizer: Any, ids: list[int], sampling: SamplingParams
    ) -> GenerationResult:
        """An answer. Where the server gives no token ids, its text is split, and the end of a text
        that it stopped at is put behind it.
        """
        wanted = {
            "model": model,
            "prompt": ids,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": (sampling.seed or 0) % 2**31,
            "return_token_ids": True,
        }
        if sampling.stop:
            wanted["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            wanted["stop_token_ids"] = list(sampling.stop_token_ids)
        try:
            choice = self.ask("completions", wanted)["choices"][0]
            text, reason, tokens = choice["text"], choice["finish_reason"], choice.get("token_ids")
        except (LookupError, TypeError, AttributeError) as error:
            raise SpecDecError(f"{self.url} gave no completion ({one_line(error)})") from error
        if tokens is None:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if reason == "stop" and not sampling.stop and tokenizer.eos_token_id is not None:
                tokens = [*tokens, tokenizer.eos_token_id]
        return GenerationResult(ids, text, tokens, reason)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a path answers; SpecDecError: nobody answers, or the server refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{path}", data, self._headers)
        for pause in (*WAITS, None):
            try:
                with urlopen(request, timeout=_TIMEOUT) as answer:
                    return parse_json(answer.read())
            except HTTPError as error:
                said = error.read(1000).decode(errors="replace")
                if error.code not in _BUSY or pause is None:
                    said = one_line(ValueError(said), 300)
                    raise SpecDecError(f"{self.url} refused: {error.code} {said}") from error
            except (URLError, OSError, ValueError) as error:
                if pause is None or body is None:
                    what = f"{self.url} does not answer ({one_line(error)})"
                    raise SpecDecError(f"{what}; run again when it does") from error
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")
