"""vLLM as far as benches use it, and a clock that does not go by itself."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evals.peers import vllm_steps

Patch = pytest.MonkeyPatch


class Clock:
    """Stands in for the module `time`: every reading is written down,
    and nothing passes by itself.
    """

    def __init__(self, log: list[Any]) -> None:
        self.now, self.log = 0.0, log

    def perf_counter(self) -> float:
        self.log.append("clock")
        return self.now


class FakeVllm:
    """The library as far as it is used: each step prefills one prompt in 100 s, or decodes all in 1
    s.

    Attributes:
        started: options of the engine.
        prompts: of every request.
        open: engines not shut down.
    """

    def __init__(self, monkeypatch: Patch) -> None:
        self.clock = Clock([])
        self.started: dict[str, Any] = {}
        self.prompts: list[list[int]] = []
        self.waiting: list[str] = []
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.open = 0
        library = ModuleType("vllm")
        library.__version__, library.LLM, library.SamplingParams = (  # type: ignore[attr-defined]
            "0.0",
            self.start,
            lambda **options: options,
        )
        library.inputs, library.sampling_params = (  # type: ignore[attr-defined]
            ModuleType("vllm.inputs"),
            ModuleType("vllm.sampling_params"),
        )
        library.inputs.tokens_input = list
        library.sampling_params.RequestOutputKind = SimpleNamespace(CUMULATIVE="cumulative")
        for module in (library, library.inputs, library.sampling_params):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(vllm_steps, "time", self.clock)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
        monkeypatch.setenv("VLLM_LOGGING_STREAM", "")

    def start(self, **options: Any) -> SimpleNamespace:
        self.started = options | {
            "config": json.loads(Path(options["model"], "config.json").read_text())
        }
        self.open += 1
        return SimpleNamespace(llm_engine=self)

    @property
    def engine_core(self) -> Any:
        return self

    def shutdown(self) -> None:
        self.open -= 1

    def add_request(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> None:
        assert params["output_kind"] == "cumulative"
        assert params["ignore_eos"]
        self.prompts.append(prompt)
        self.waiting.append(request_id)
        self.most[request_id] = params["max_tokens"]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Any]:
        """A prefill decodes nobody else here, as it may in the library; so the first requests are
        ahead of the last.
        """
        decoding = dict(self.running)
        if self.waiting:
            self.clock.now += 100
            self.running[self.waiting.pop(0)] = 1
        else:
            self.clock.now += len(decoding)  # an ended request would make the step shorter
        self.running |= {name: count + 1 for name, count in decoding.items()}
        outputs = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.running.items()
        ]
        self.running = {
            name: count for name, count in self.running.items() if count < self.most[name]
        }
        return outputs
