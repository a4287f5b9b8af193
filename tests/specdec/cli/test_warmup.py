"""`specdec warmup` as a user meets it: progress, what took long, what failed,
and an interruption.
"""

import pytest

from specdec.cli import warmup
from specdec.cli.main import main
from specdec.engine.capture.warmup import WarmUpShape
from tests.evals.tiny import save_tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save_tiny(tmp_path_factory.mktemp("model"))
    sizes = [
        "--max-num-seqs", "2", "--max-model-len", "48", "--max-prefill-tokens", "16", "-k", "2",
    ]  # fmt: skip
    return [
        "warmup", "--model", str(model), "--drafter", "ngram", "--device", "cpu", "--dtype",
        "float32", *sizes,
    ]  # fmt: skip


def use(monkeypatch: pytest.MonkeyPatch, *shapes: WarmUpShape) -> None:
    monkeypatch.setattr(
        "specdec.engine.capture.warmup.warm_up_shapes", lambda engine, sampling: list(shapes)
    )


def test_every_shape_is_launched(command: list[str], capsys: Capture) -> None:
    assert main(command) == 0
    captured = capsys.readouterr()
    total = int(captured.out.split()[0])
    assert captured.out.startswith(f"{total} of {total} shapes are warm, after ") and total > 10
    assert f"warm-up  [########################] {total}/{total}" in captured.err


def test_what_took_long_and_what_failed(
    command: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each; a shape that fails does not keep the others from being warmed up, and shows in
    the exit status.
    """

    def fail() -> None:
        raise RuntimeError("hipcc:\n not found")

    now = [0.0]
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: now[0])

    def slow_down() -> None:
        now[0] += 2 * warmup.SLOW

    use(
        monkeypatch,
        WarmUpShape("fast", lambda: None),
        WarmUpShape("broken", fail),
        WarmUpShape("slow", slow_down),
    )
    assert main(command) == 1
    captured = capsys.readouterr()
    broken, slow, bar = captured.err.splitlines()[-3:]
    assert (
        broken == "  failed: broken: hipcc: not found"
        and slow.endswith(" s  slow")
        and bar.endswith("] 3/3")
    )
    assert "fast" not in captured.err
    assert captured.out.startswith("2 of 3 shapes are warm")


def test_interrupted(command: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    use(
        monkeypatch,
        WarmUpShape("one", lambda: None),
        WarmUpShape("two", interrupt),
        WarmUpShape("three", lambda: None),
    )
    assert main(command) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(
        "specdec: 1 of 3 shapes are warm; the same command goes on from there\nspecdec:"
        " interrupted\n"
    )


def test_options_are_those_of_generate(capsys: Capture) -> None:
    """All that say what is decoded and how, since each of them can decide what is compiled."""

    def options(verb: str) -> set[str]:
        assert main([verb, "--help"]) == 0
        return {
            word
            for word in capsys.readouterr().out.replace(",", " ").split()
            if word.startswith("--")
        }

    assert options("generate") - options("warmup") == {
        "--file", "--system", "--raw", "--prediction", "--stream", "--json", "--out", "--compare",
        "--repeats", "--ray", "--engines", "--gpus-per-engine", "--cpus-per-engine",
    }  # fmt: skip
