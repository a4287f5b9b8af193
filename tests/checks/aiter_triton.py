"""Runs AITER's real Triton kernels, single calls and whole generations, and compares them with
plain torch.

    python -m tests.checks.aiter_triton --device cuda
        on a GPU: single calls, then the embedded model
    python -m tests.checks.aiter_triton --device cpu
        the same calls in Triton's interpreter, then tiny models
    ... --repository aiter --revisions v0.1.16,v0.1.20
        several versions one after the other, from a git repository

AITER is the sources in the folder that SPECDEC_AITER names, what is exported from a repository, or
the installed `amd-aiter`. Single calls may be as far from float64 as plain torch is
(`tests.helpers.bounds`). The exit status is 1 when a call is wrong, when AITER has mended what
specdec refuses, or when a token differs from the reference's by more than a near-tie.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.kernels import aiter
from tests.checks.aiter_triton_calls import Setting
from tests.checks.aiter_triton_models import PROMPTS, embedded, tiny
from tests.checks.aiter_triton_table import check
from tests.helpers.aiter_real import INTERPRETER, REVISIONS, SOURCES, export, missing, real_aiter
from tests.helpers.attention_case import spec


def each_revision(args: argparse.Namespace, argv: list[str]) -> int:
    """The same command on the sources of each revision; the worst exit status."""
    worst = 0
    for revision in args.revisions.split(","):
        version = revision.removeprefix("v") if revision.startswith("v") else args.aiter_version
        with TemporaryDirectory() as folder:
            export(args.repository, revision, Path(folder))
            print(f"AITER {revision}", flush=True)
            command = [
                sys.executable,
                "-m",
                "tests.checks.aiter_triton",
                *argv,
                "--repository",
                "",
                "--aiter-version",
                version,
            ]
            worst = max(
                worst,
                subprocess.run(command, env=os.environ | {SOURCES: folder}, check=False).returncode,
            )
    return worst


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 when something is wrong, 2 when AITER or Triton is missing."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.aiter_triton", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda, or cpu for Triton's interpreter",
    )
    add("--part", default="all", choices=["all", "calls", "models"])
    add(
        "--every",
        type=int,
        help="of the calls on ordinary heads take every n-th (default 5 on a GPU, 7 in the"
        " interpreter)",
    )
    add(
        "--jobs",
        type=int,
        help="processes for single calls (default 8 on a GPU, 1 in the interpreter)",
    )
    add("--verbose", action="store_true", help="print every call, not only the table")
    add(
        "--repository", default="", help="a git repository of AITER, of which --revisions are taken"
    )
    add(
        "--revisions",
        default=",".join(REVISIONS),
        help="tags or branches of it (default %(default)s)",
    )
    add(
        "--aiter-version",
        default="0.1.20",
        help="of the sources that SPECDEC_AITER names (default %(default)s)",
    )
    add(
        "--architecture",
        default="gfx1100",
        help="to pretend in the interpreter (default %(default)s)",
    )
    add("--target", default="embedded", help="on a GPU: a name or folder (default %(default)s)")
    add(
        "--tiny",
        default="llama,gpt_oss,gemma2",
        help="in the interpreter: which tiny models (default %(default)s)",
    )
    add(
        "--drafter",
        default="shipped",
        help="on a GPU: a DFlash checkpoint, shipped or random (default %(default)s)",
    )
    add(
        "--dtypes",
        help="of the target (default float32,bfloat16 on a GPU, float32 in the interpreter)",
    )
    add("--batches", help="(default 1,8 on a GPU, 3 in the interpreter)")
    add("--prompts", type=int, help="(default 8 on a GPU, 3 in the interpreter)")
    add("--tokens", type=int, help="of each output (default 64 on a GPU, 6 in the interpreter)")
    add("--no-graphs", action="store_true", help="launch steps operation by operation")
    args = parser.parse_args(argv)
    if args.repository:
        return each_revision(args, argv)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    device = torch.device(args.device)
    interpreted = device.type == "cpu"
    # float32 products in float32, not in TF32
    needed = {"TRITON_F32_DEFAULT": "ieee", **(INTERPRETER if interpreted else {})}
    if any(os.environ.get(name) != value for name, value in needed.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.checks.aiter_triton", *argv],
            os.environ | needed,
        )
    args.dtypes = args.dtypes or ("float32" if interpreted else "float32,bfloat16")
    args.batches = args.batches or ("3" if interpreted else "1,8")
    args.jobs = args.jobs or (1 if interpreted else 8)
    args.every = args.every or (7 if interpreted else 5)
    args.prompts = args.prompts or (3 if interpreted else len(PROMPTS))
    args.tokens = args.tokens or (6 if interpreted else 64)

    import triton

    wrong, start = 0, perf_counter()
    if interpreted:
        np.seterr(all="ignore")  # masked rows divide by 0 before they are left out
    with real_aiter(device, version=args.aiter_version, architecture=args.architecture) as calls:
        where = (
            f"Triton's interpreter as {args.architecture}"
            if interpreted
            else torch.cuda.get_device_name(device)
        )
        print(
            f"{where}; torch {torch.__version__}, triton {triton.__version__}, amd-aiter"
            f" {aiter.installed_version()}"
        )
        if reasons := RocmAiterFaBackend.unsupported_reasons(spec(device=device, non_causal=True)):
            print("; ".join(reasons), file=sys.stderr)
            return 2
        if args.part != "models":
            print("single calls against float64")
            setting = Setting(device, args.every, args.aiter_version, args.architecture)
            wrong += check(setting, calls, jobs=args.jobs, verbose=args.verbose)
            print(f"  {perf_counter() - start:.0f} s", flush=True)
        if args.part != "calls":
            start = perf_counter()
            wrong += (tiny if interpreted else embedded)(args, device, calls)
            print(f"  {perf_counter() - start:.0f} s", flush=True)
    print("all right" if not wrong else f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
