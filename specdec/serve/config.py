"""Limits and choices of the server."""

import math
import os
import re
from dataclasses import dataclass

from specdec.errors import InvalidInputError

KEY_VARIABLE = "SPECDEC_API_KEY"
"""Of the environment: the key where no option names one, so that it stands in no list of processes."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where a server listens, and how much it takes on.

    Attributes:
        host: address to listen on; 0.0.0.0 stands for all addresses of the machine.
        port: to listen on; 0 takes a free one.
        served_model_name: name by which requests may call the model, and answers the first of them; none stands for that of the
            target.
        api_key: what clients send as a bearer token; None takes $SPECDEC_API_KEY, and without that nobody is asked.
        max_queue: unfinished outputs, above which new requests get status 503.
        max_queued_tokens: prompt tokens of all unfinished outputs, above which new requests get status 503.
        max_choices: outputs of one request, n times its prompts.
        max_body_bytes: size of a request.
        keep_alive_seconds: how long a connection stays open without a request.
        allowed_origins: web pages from elsewhere that may ask, by scheme and host such as https://chat.example, or * for all.
        drain_seconds: how long unfinished outputs go on after SIGTERM or SIGINT.
        vllm_metrics: give the metrics under vLLM's names, too.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: str | None = None
    max_queue: int = 1024
    max_queued_tokens: int = 4_194_304
    max_choices: int = 256
    max_body_bytes: int = 16_777_216
    keep_alive_seconds: int = 65
    allowed_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        object.__setattr__(self, "allowed_origins", tuple(self.allowed_origins))
        wrong = [one for one in self.allowed_origins if one != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", one)]
        if wrong:
            raise InvalidInputError(
                f"allowed_origins has {wrong[0]!r}; give a scheme and a host, such as https://chat.example, or *"
            )
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(KEY_VARIABLE) or None)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidInputError("the API key is empty or holds what no header can; give printable ASCII characters")
        if not 0 <= self.port < 2**16:
            raise InvalidInputError(f"port is {self.port}; it must lie in [0, 65535], where 0 takes a free one")
        for name in ("max_queue", "max_queued_tokens", "max_choices", "max_body_bytes", "keep_alive_seconds"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not (math.isfinite(self.drain_seconds) and self.drain_seconds >= 0):
            raise InvalidInputError(f"drain_seconds is {self.drain_seconds}; it must be 0 or a positive finite number")
