"""A decoder that says what it is told to, and programs that run the command line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.base.blocks import BlockShape
from specdec.base.metrics import AcceptanceStats
from specdec.engine.policy.timing import StepTimer
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult, StreamChunk
from tests.helpers.waiting import HANG

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


class FakeDecoder:
    """Gives the chunks it was told to give, and remembers what it was asked."""

    def __init__(
        self, *chunks: StreamChunk | BaseException, chat_template: str | None = "template"
    ) -> None:
        self.chunks = chunks
        self.tokenizer = SimpleNamespace(chat_template=chat_template)
        timer = StepTimer(torch.device("cpu"), enabled=True)
        timer.totals, timer.num_steps = (
            {"draft": 1.0, "verify": 2.0, "schedule": 0.5, "context": 0.25, "accept": 0.25},
            10,
        )
        self.engine = SimpleNamespace(planner=SimpleNamespace(shapes=(BlockShape(3),)), timer=timer)
        self.inputs: Any = None
        self.sampling = SamplingParams()
        self.options: dict[str, Any] = {}

    def stream(self, inputs: Any, sampling: SamplingParams) -> Iterator[StreamChunk]:
        self.inputs, self.sampling = inputs, sampling
        for chunk in self.chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk


def use(monkeypatch: Patch, decoder: Any) -> Any:
    """Makes the command line load `decoder`."""

    def from_pretrained(target: str, **options: Any) -> Any:
        decoder.options = {"target": target, **options}
        return decoder

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    return decoder


def chunk(index: int, text: str, *, done: bool = False, error: str | None = None) -> StreamChunk:
    result = GenerationResult(
        prompt_token_ids=[1, 2],
        text=text,
        token_ids=[7, 8, 9],
        finish_reason="error" if error else "stop",
        error=error,
        logprobs=[-0.5, -1.0, -1.5],
        seed=11,
        stats=AcceptanceStats([3], [1], [2]),
    )
    return StreamChunk(index, text, [7], result if done or error else None)


def one_line(capsys: Capture) -> str:
    """What was printed, when that is a single line on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("specdec: error: ")
    return captured.err


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "timeout": HANG,
    } | options
    return subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False, **options
    )
