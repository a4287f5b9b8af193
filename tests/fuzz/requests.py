"""What clients send: bodies of every route, and the same fields in Python."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from specdec.sampling.params import SamplingParams
from tests.fuzz.draw import any_value, changed, damaged_json
from tests.fuzz.grammars import pattern, rules, schema
from tests.fuzz.kind import Broken, Check, Kind, attempt, line
from tests.fuzz.notation import meant, written
from tests.helpers.live_server import Live, tiny_decoder
from tests.helpers.waiting import HANG

SAMPLING: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [7],
    "logit_bias": {"5": 1.5},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "cache_salt": "a",
}
SHARED: dict[str, Any] = {
    **SAMPLING,
    "n": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
}
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**SHARED, "prompt": ["ab", "cd"], "echo": True, "logprobs": 2},
    "/v1/chat/completions": {**SHARED, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
    "/tokenize": {"prompt": "abc", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
WORDS = [
    "tools", "response_format", "structured_outputs", "guided_choice", "guided_json", "min_tokens",
]  # fmt: skip
WORDS += [
    "ignore_eos", "chat_template_kwargs", "model", "best_of", "suffix", "return_token_ids", "echo",
]  # fmt: skip
LARGE: dict[str, Any] = {
    "n": 10**6,
    "prompt": {"$times": ["a b ", 500_000]},
    "prompts": {"$times": [["a"], 10**5]},
    "stop": {"$each": ["zz%d", 10**5]},
    "logit_bias": {"1" * 5_000: 1},
    "stop_token_ids": {"$times": [[5], 10**5]},
    "guided_choice": {"$each": ["v%d", 10**4]},
    "messages": {"$times": [[{"role": "user", "content": "a"}], 10**4]},
    "tokens": {"$times": [[5], 10**5]},
    "user": {"$deep": ["[", 1, "]", 50_000]},
}


def body(draw: Random) -> dict[str, Any]:
    """A route and what is sent to it."""
    path = draw.choice([*BODIES, "/v1/completions", "/v1/chat/completions"])
    sent: Any = dict(BODIES[path])
    for name in draw.sample(list(SAMPLING), draw.randint(0, len(SAMPLING))):
        sent.pop(name, None)
    way = draw.random()
    if way < 0.15:
        name = draw.choice(list(LARGE))
        sent["prompt" if name == "prompts" else name] = LARGE[name]
    elif way < 0.35:
        grammars = {"guided_json": schema, "guided_regex": pattern, "guided_grammar": rules}
        name = draw.choice(list(grammars))
        sent[name] = grammars[name](draw)
    elif way < 0.95:
        sent = changed(draw, sent, WORDS)
    else:
        sent = damaged_json(draw, sent)
    if isinstance(sent, dict) and "max_tokens" not in sent and draw.random() < 0.8:
        sent["max_tokens"] = 4
    return {"path": path, "body": sent}


def sampling(draw: Random) -> dict[str, Any]:
    """Fields of a request in Python."""
    made = changed(
        draw, SAMPLING, ["min_tokens", "ignore_eos", "logprobs", "top_logprobs", "grammar", "x"]
    )
    return made if isinstance(made, dict) else {"seed": any_value(draw)}


def start_bodies(folder: Path) -> Check:
    """A server with a tiny model, which one connection asks."""
    live = Live(tiny_decoder(max_num_seqs=16, max_model_len=64), drain_seconds=0.0)
    client = Client(live.url)

    def check(one: dict[str, Any]) -> None:
        status, text = client.ask("POST", one["path"], written(one["body"]))
        if not 200 <= status < 500:
            raise Broken(f"status {status}: {text[:300]!r}")
        if status >= 400:
            line(json.loads(text)["error"]["message"])
        status, _ = client.ask("GET", "/health")
        if status != 200 or not live.front.idle:
            raise Broken(
                f"afterwards /health says {status}, and {live.front.num_open} outputs are open"
            )

    return check


class Client:
    """Asks on one connection, as long as the server leaves it open."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=HANG)

    def ask(self, method: str, path: str, text: str = "") -> tuple[int, str]:
        """The status and the whole answer."""
        data = text.encode(errors="surrogatepass")
        headers = {"Content-Type": "application/json"} if text else {}
        self._connection.request(method, path, data, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read().decode()


def start_sampling(folder: Path) -> Check:
    """Fields that are taken are also decoded with."""
    decoder = tiny_decoder(max_num_seqs=1, max_model_len=64)

    def check(fields: dict[str, Any]) -> None:
        values = {name: meant(value) for name, value in fields.items()}
        made = attempt(lambda: SamplingParams(**values)) if values.keys() <= KNOWN else None
        if made is not None:
            attempt(lambda: decoder.generate("abc", made))
        attempt(lambda: decoder.generate("abc", **values))

    return check


KNOWN = set(SamplingParams.__dataclass_fields__)
KINDS = {"bodies": Kind(body, start_bodies, 30), "sampling": Kind(sampling, start_sampling, 40)}
