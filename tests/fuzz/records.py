"""Files of earlier runs and of a user's own: journals, reports, configs of training, prompts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from drafters.training.config import build_config
from specdec.cli.main import main
from tests.evals.tiny import save_tiny
from tests.fuzz.draw import changed, damaged, damaged_json
from tests.fuzz.kind import Broken, Check, Kind, attempt, line
from tests.fuzz.notation import written

NUM_PROMPTS = 4
REPORT = json.loads((Path(__file__).parent / "report.json").read_text())
TRAIN = {"out": "run", "prompts": ["a.txt"], "temperatures": [0, 0.7], "lr": 1e-3, "layers": 2}
TRAIN |= {"max_tokens": 64, "kv_memory": "1G", "head": "markov", "skip_long": True, "heldout": 4}
PROMPT = {
    "prompt": "abc",
    "max_tokens": 3,
    "temperature": 0.5,
    "stop": ["x"],
    "seed": 1,
    "logit_bias": {"5": 1},
}


def journal(draw: Random) -> dict[str, Any]:
    """What is done to the lines of a journal: a record's changes by seed,
    and damage to all bytes.
    """
    return {"seed": draw.randrange(2**32), "way": draw.choice(["record", "head", "bytes"])}


def report(draw: Random) -> dict[str, Any]:
    """A report of bench or eval."""
    made = changed(draw, REPORT, ["rows", "tasks", "tau", "speed", "tree_nodes"])
    return {"text": damaged_json(draw, made) if draw.random() < 0.15 else made}


def training(draw: Random) -> dict[str, Any]:
    """A config file of `specdec train`."""
    made = changed(draw, TRAIN, ["revision", "seed", "taps", "block_size", "x"])
    return {
        "text": damaged_json(draw, made) if draw.random() < 0.2 else made,
        "end": draw.choice(["json", "toml"]),
    }


def prompts(draw: Random) -> dict[str, Any]:
    """A file of prompts with fields of their own."""
    row = changed(draw, PROMPT, ["messages", "grammar", "guided_json", "n", "min_tokens"])
    return {"text": damaged_json(draw, row) if draw.random() < 0.2 else row}


def told(*arguments: str | Path) -> None:
    """Runs the command; it ends with a status, and with one line where something is wrong."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*map(str, arguments)])
    errors = [one for one in err.getvalue().split("\n") if one.startswith("specdec: error: ")]
    if status == 2:
        for one in errors:
            line(one)
    most = {0: 0, 1: NUM_PROMPTS, 2: 1}.get(status, 0)
    if (
        status not in (0, 1, 2)
        or not (status == 2) <= len(errors) <= most
        or "Traceback" in err.getvalue()
    ):
        raise Broken(f"status {status}, {len(errors)} lines of errors: {err.getvalue()[-300:]!r}")


def start_journals(folder: Path) -> Check:
    """The file of `generate --out`, which goes on with it."""
    model, asked, out = folder / "model", folder / "asked.txt", folder / "out.jsonl"
    model.mkdir()
    save_tiny(model)
    asked.write_text("".join(f"prompt {number}\n" for number in range(NUM_PROMPTS)))
    words = (
        f"generate --model {model} --file {asked} --raw --out {out} --max-tokens 3"
        " --max-num-seqs 2 --kv-memory 1M --json"
    )
    command = words.split()
    told(*command)
    lines = out.read_text().splitlines()

    def check(one: Mapping[str, Any]) -> None:
        draw, made = Random(one["seed"]), list(lines)
        if one["way"] != "bytes":
            number = 0 if one["way"] == "head" else draw.randrange(1, len(lines))
            entry = changed(draw, json.loads(lines[number]), ["key", "results", "schema"])
            made[number] = written(entry)
        data = "".join(f"{text}\n" for text in made).encode()
        out.write_bytes(damaged(draw, data) if one["way"] == "bytes" else data)
        told(*command)

    return check


def start_reports(folder: Path) -> Check:
    """A report that is shown, and compared with itself."""
    path = folder / "report.json"

    def check(one: Mapping[str, Any]) -> None:
        path.write_text(written(one["text"]), encoding="utf-8", errors="replace")
        told("bench", "show", path)
        told("bench", "compare", path, path)

    return check


def start_training(folder: Path) -> Check:
    """The file after `train --config`."""

    def check(one: Mapping[str, Any]) -> None:
        path, made = folder / f"run.{one['end']}", one["text"]
        toml = one["end"] == "toml" and isinstance(made, dict) and "$raw" not in made
        lines = (
            [f"{name} = {written(value)}" for name, value in made.items()]
            if toml
            else [written(made)]
        )
        path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
        attempt(lambda: build_config({}, str(path)))

    return check


def start_prompts(folder: Path) -> Check:
    """The file after `generate --file`."""
    path = folder / "asked.jsonl"
    save_tiny(folder)

    def check(one: Mapping[str, Any]) -> None:
        path.write_text(written(one["text"]) + "\n", encoding="utf-8", errors="replace")
        told(
            "generate",
            "--model",
            folder,
            "--file",
            path,
            "--raw",
            "--max-tokens",
            "3",
            "--kv-memory",
            "1M",
        )

    return check


KINDS = {
    "journals": Kind(journal, start_journals, 6),
    "reports": Kind(report, start_reports, 30),
    "training": Kind(training, start_training, 30),
    "prompts": Kind(prompts, start_prompts, 12),
}
