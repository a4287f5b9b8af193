"""What public clients make of a server: the first things that their manuals show, tools included.

    python -m venv /tmp/clients && /tmp/clients/bin/pip install openai litellm langchain-openai \
        llama-index-llms-openai-like instructor pydantic-ai-slim[openai] llm
    /tmp/clients/bin/python -m tests.checks.clients --serve python
    python -m tests.checks.clients --url http://127.0.0.1:8000 --node FOLDER

Clients that are not installed here are said to be so: they want other versions of the same
packages, so each may have an environment of its own. `--serve` names the interpreter that has
specdec, which serves the embedded model with a template that tells of tools; `--url` a server that
runs. `--node` names a folder in which npm has installed openai, ai, @ai-sdk/openai-compatible,
@ai-sdk/openai and zod. Answers are bounded by their schemas, so that any model will do; what is
looked at is their form.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.checks.clients.examples import PACKAGES, Served
from tests.checks.clients.programs import NODE, PROGRAMS, run_node, run_program


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def rows_of(
    at: Served, node: Path | None, tokenizer: str, verbose: bool
) -> Iterator[tuple[str, str, str, str]]:
    """Client, version, example and what came of it."""
    for name, examples in PACKAGES.items():
        version = installed(name)
        for example in examples if version else ():
            try:
                example(at)
                result = "works"
            except Exception as error:
                result = (
                    f"FAILS: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                )
                if verbose:
                    traceback.print_exc()
            yield name, version or "", example.__name__.rpartition("_")[2], result
        if not version:
            yield name, "", "", "not installed"
    for name, words in PROGRAMS.items():
        version = installed(name) or ("of a folder" if importlib.util.find_spec(name) else None)
        yield (
            name,
            version or "",
            "",
            run_program(at, words, tokenizer) if version else "not installed",
        )
    for name, script in NODE.items():
        yield name, "", "", run_node(at, node, script) if node else "not installed (see --node)"


@contextmanager
def _served(python: str) -> Iterator[str]:
    """The embedded model, served by another interpreter; gives the address."""
    template = Path(__file__).parents[3] / "docs" / "examples" / "tools.jinja"
    words = [python, "-m", "specdec", "serve", "--port", "0", "--max-num-seqs", "4"]
    words += ["--max-model-len", "2048", "--chat-template", str(template)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if " at http" in line)
            yield line.rpartition(" at ")[2].strip().removesuffix("/v1")
        finally:
            server.terminate()
            server.communicate()


def main() -> int:
    """Prints the table; 1 where something fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs, without /v1")
    parser.add_argument("--model", help="its name there; the embedded one otherwise")
    parser.add_argument("--serve", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--node", type=Path, metavar="FOLDER")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of the model, for programs")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    failed = 0
    with nullcontext(args.url) if args.url else _served(args.serve) as url:
        at = Served(f"{url}/v1", args.model or "embedded")
        print("| client | version | example | result |\n|---|---|---|---|")
        for row in rows_of(at, args.node, args.tokenizer or at.model, args.verbose):
            failed += row[-1].startswith("FAILS")
            print(f"| {' | '.join(row)} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
