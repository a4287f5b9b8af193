"""Limits and choices of the server."""

import math
import os
import re
from dataclasses import dataclass

from specdec.base.chat.tools import FORMATS
from specdec.base.files import user_path
from specdec.base.validation import require

KEY_VARIABLE = "SPECDEC_API_KEY"
"""A variable with the key where no option names one, so that no list of processes shows it."""

MAX_FRONTS = 64
"""Most processes that speak HTTP."""


def fronts_for(max_num_seqs: int, cores: int) -> int:
    """How many front processes serve that many requests decoded at once: one writes some 80,000
    tokens per second of 256 streams, and needs a core.
    """
    return max(1, min(4, cores // 4, math.ceil(max_num_seqs / 64)))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where a server listens, and how much it takes on.

    Attributes:
        host: address to listen on; 0.0.0.0 stands for all addresses of the machine.
        port: port to listen on; 0 takes a free one.
        front_processes: processes that speak HTTP and tokenize, beside the engine's; None takes one
            for every 64 requests decoded at once, at most one for every 4 cores, and at most 4.
        served_model_name: name of the model in requests, the first also in answers; without one the
            name is the target's.
        api_key: what clients must send as a bearer token; None takes $SPECDEC_API_KEY, and without
            that anybody may ask.
        max_queue: most unfinished outputs; more requests get status 503.
        max_queued_tokens: most prompt tokens of all unfinished outputs; more requests get status
            503.
        max_choices: most outputs of one request, n times its prompts.
        max_body_bytes: most bytes of a request.
        max_body_values: most values of JSON in a request, where an object or an entry of one counts
            as four.
        max_open_body_bytes: most bytes that unfinished requests hold together, each value of JSON
            counted as 64 more; 64 KiB of a request are always taken. Above it the largest that
            still comes is refused.
        max_connections: most connections; above it the longest idle ones are closed.
        header_seconds: most time for the head of a request, from the connection on or from its
            first byte.
        body_seconds: most time for the body of a request, or in which a client reads nothing of its
            answer.
        keep_alive_seconds: most time that a connection stays open without a request.
        allowed_hosts: host names by which clients may reach the server; addresses and localhost are
            always right. Other names are refused only where names are given, or where the server
            listens on this machine alone and has no key.
        allowed_origins: web pages of other sites that may ask, by scheme and host such as
            https://chat.example, or * for all.
        drain_seconds: most time for unfinished outputs after SIGTERM, SIGINT or SIGHUP.
        log_requests: write a line about each request to standard error: its name, tokens, seconds
            and tau.
        vllm_metrics: give the metrics under vLLM's names, too.
        tool_format: how the model writes calls of tools; None takes what its chat template shows.
        drafter_updates: folder of checkpoints, whose weights POST /update_drafter may put in the
            place of the drafter's, with the key; None means no such route.
        learn_from_requests: folder, closed to other users, in which finished requests are kept to
            train the drafter on; None means no such folder. Requests that say `store: false`, or
            have a `cache_salt`, are never kept.
        learn_limit: most bytes of kept requests; the oldest are deleted.
        learn_device: device of a process that trains the drafter on kept requests and hands better
            weights over; None means no training.
        learn_every: output tokens kept between two trainings.
        learn_nice: niceness of the training process: 0 takes as much of the processors as the
            server, 19 what is left.
        learn_config: file with options of `specdec train`, which override those of its recipe
            learn.toml.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    front_processes: int | None = None
    served_model_name: tuple[str, ...] = ()
    api_key: str | None = None
    max_queue: int = 1024
    max_queued_tokens: int = 4_194_304
    max_choices: int = 256
    max_body_bytes: int = 8_388_608
    max_body_values: int = 524_288
    max_open_body_bytes: int = 67_108_864
    max_connections: int = 1024
    header_seconds: float = 30.0
    body_seconds: float = 60.0
    keep_alive_seconds: int = 65
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    log_requests: bool = False
    vllm_metrics: bool = False
    tool_format: str | None = None
    drafter_updates: str | None = None
    learn_from_requests: str | None = None
    learn_limit: int = 67_108_864
    learn_device: str | None = None
    learn_every: int = 32_768
    learn_nice: int = 19
    learn_config: str | None = None

    def __post_init__(self) -> None:
        for name in ("served_model_name", "allowed_hosts", "allowed_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in self.served_model_name:
            require(name != "", "served_model_name is empty; give a name, or leave it out")
            is_text = name == name.encode(errors="replace").decode()
            require(is_text, f"served_model_name has {name!r}, which is no text")
        for name in self.allowed_hosts:
            way_out = "give a name alone, such as chat.example"
            fits = bool(re.fullmatch(r"[A-Za-z0-9._-]+", name))
            require(fits, f"allowed_hosts has {name!r}; {way_out}")
        for name in self.allowed_origins:
            way_out = "give a scheme and a host, such as https://chat.example, or *"
            fits = bool(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", name))
            require(fits, f"allowed_origins has {name!r}; {way_out}")
        known = self.tool_format in (None, *FORMATS)
        way_out = f"choose one of {', '.join(FORMATS)}"
        require(known, f"tool_format is {self.tool_format!r}; {way_out}")
        updates = self.drafter_updates
        what = f"drafter_updates is {updates!r}, which is no folder"
        there = updates is None or user_path(updates).is_dir()
        require(there, f"{what}; name one that will have checkpoints")
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(KEY_VARIABLE) or None)
        key = self.api_key
        fits = key is None or (key.strip() == key != "" and key.isascii() and key.isprintable())
        what = "the API key is empty, begins or ends with a blank, or holds what no header can"
        require(fits, f"{what}; give printable ASCII characters")
        what = "drafter_updates lets clients change the drafter, so it needs a key"
        require(updates is None or bool(key), f"{what}; set ${KEY_VARIABLE}, or leave it out")
        nice = self.learn_nice
        require(0 <= nice <= 19, f"learn_nice is {nice}; it must lie in [0, 19]")
        pairs = {"learn_device": "learn_from_requests", "learn_config": "learn_device"}
        for name, needed in pairs.items():
            value, other = getattr(self, name), getattr(self, needed)
            fits = value is None or other is not None
            require(fits, f"{name} is {value!r} without {needed}; give both")
        line = f"port is {self.port}; it must lie in [0, 65535], where 0 takes a free one"
        require(0 <= self.port < 2**16, line)
        limits = [name for name in self.__dataclass_fields__ if name.startswith("max_")]
        for name in ("front_processes", "keep_alive_seconds", "learn_every", *limits):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")
        line = f"front_processes is {self.front_processes}; it must be at most {MAX_FRONTS}"
        require(self.num_fronts <= MAX_FRONTS, line)
        for name in ("header_seconds", "body_seconds", "drain_seconds"):
            seconds = getattr(self, name)
            allowed = seconds > 0 or (name == "drain_seconds" and seconds == 0)
            fits = math.isfinite(seconds) and allowed
            require(fits, f"{name} is {seconds}; it must be a positive finite number")

    @property
    def num_fronts(self) -> int:
        """Processes that speak HTTP; one where nobody has said."""
        return self.front_processes or 1
