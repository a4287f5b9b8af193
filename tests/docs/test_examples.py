"""The programs in docs/examples, as a reader would run them."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecDecoder
from specdec.base import registry
from tests.helpers.live_server import live_server, tiny_decoder
from verifiers.weights.embedded import gguf_path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a program with these arguments; gives what it has defined and the lines it prints."""

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], list[str]]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return names, capsys.readouterr().out.splitlines()

    return run


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text()
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert len(names) == 6
    assert [name for name in names if f'shown("{name}"' not in source] == []


@pytest.mark.slow
def test_one_step(shown: Any) -> None:
    """The four functions write what the target alone writes, and accept drafts; in 60 lines."""
    names, lines = shown("one_step")
    decoder: SpecDecoder = names["decoder"]
    output = names["output"]
    alone = decoder.plain().generate(names["prompt"], max_tokens=len(output), ignore_eos=True)
    assert output == list(alone.token_ids)
    assert len(output) > 1.5 * len(lines)
    assert len((EXAMPLES / "one_step.py").read_text().splitlines()) <= 60


@pytest.mark.slow
def test_generate(shown: Any) -> None:
    names, lines = shown("generate")
    result = names["result"]
    assert result.text.splitlines() == lines[: len(result.text.splitlines())]
    assert f"{result.stats.tau:.2f} tokens per step of the target" in lines
    pieces = [line for line in lines if line[:3] in ("0 '", "1 '", '0 "', '1 "')]
    assert {line[0] for line in pieces} == {"0", "1"}


@pytest.mark.slow
def test_local_model(shown: Any) -> None:
    """A real GGUF file."""
    _, lines = shown("local_model", str(gguf_path()))
    assert "identical" in lines
    assert float(lines[-1].split()[0]) > 1


@pytest.mark.slow
def test_own_drafter(shown: Any) -> None:
    try:
        _, lines = shown("own_drafter")
    finally:
        registry.DRAFTERS.pop("followers", None)
    assert "identical" in lines
    assert float(lines[-1].split()[0]) > 1


@pytest.mark.slow
def test_structured_output(shown: Any) -> None:
    pytest.importorskip("xgrammar")
    _, (person, choice) = shown("structured_output")
    assert set(ast.literal_eval(person)) == {"name", "age"}
    assert choice in ("yes", "no")


def test_ask_server(shown: Any) -> None:
    pytest.importorskip("openai")
    decoder = tiny_decoder()
    expected = decoder.generate("Once upon a time", max_tokens=24).text
    with live_server(decoder) as live:
        names, lines = shown("ask_server", live.url)
    assert "\n".join(lines).endswith(expected)
    assert lines[0] == names["answer"].choices[0].message.content.splitlines()[0]
