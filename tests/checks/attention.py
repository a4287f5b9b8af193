"""Single calls of every attention backend that serves this machine, against the definition in
float64.

    python -m tests.checks.attention --save full.pt
    AITER_TRITON_ONLY=1 python -m tests.checks.attention --against full.pt

The second compares the tiers of AITER with each other.

Prints for each call the root mean square error in units of the last place, and how far rounding the
right answer is off. The exit status is 1 when a call is less exact than `tests.helpers.bounds`
allows, or raises.
"""

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.attention.selector import refusals, select_backend
from specdec.base.registry import ATTENTION_BACKENDS
from specdec.device.device import float8_dtype, resolve_device, torch_build
from tests.helpers.attention_case import Case, spec

HEADS = ((32, 8, 128), (9, 3, 64), (8, 2, 96), (16, 4, 256))
EXTRAS = ("-", "window", "sinks", "softcap")
PHASES: dict[str, dict[str, Any]] = {
    "prefill": {"lengths": [37, 5, 64], "widths": [37, 5, 64], "uniform": False},
    "extend, prefill and decode": {
        "lengths": [40, 17, 35, 333, 50],
        "widths": [3, 17, 1, 33, 20],
        "uniform": False,
    },
    "decode": {"lengths": [300, 37, 5], "widths": [1, 1, 1], "uniform": True},
    "verify 4": {"lengths": [300, 37, 5], "widths": [4, 4, 4], "uniform": True},
    "verify 16": {"lengths": [300, 37, 64], "widths": [16, 16, 16], "uniform": True},
    "block of 16": {
        "lengths": [300, 37, 64],
        "widths": [16, 16, 16],
        "uniform": True,
        "causal": False,
    },
}
FEW: dict[str, dict[str, Any]] = {
    "prompts of one token": {"lengths": [1, 1, 1], "widths": [1, 1, 1], "uniform": False},
    "96 at once": {"lengths": [40] * 96, "widths": [1] * 96, "uniform": True},
    "decode past 512": {"lengths": [600, 37, 5], "widths": [1, 1, 1], "uniform": True},
    "decode past 4,096": {"lengths": [5000, 37, 5], "widths": [1, 1, 1], "uniform": True},
    "verify 8 past 4,096": {"lengths": [5000, 37, 64], "widths": [8, 8, 8], "uniform": True},
    "decode past 65,536": {"lengths": [70000, 37], "widths": [1, 1], "uniform": True},
}
"""What is run without extras."""


def cases(
    device: torch.device, dtype: torch.dtype, longest: int
) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Title, requests and layer options of every call; seeds are set, so they are the same in each
    process. No request is longer than `longest` tokens.
    """
    rows = itertools.product(HEADS, PHASES.items(), EXTRAS, (False, True))
    few = itertools.product(HEADS, FEW.items(), EXTRAS[:1], (False, True))
    for (heads, kv_heads, dim), (phase, how), extra, small in (*rows, *few):
        if max(how["lengths"]) > longest:
            continue
        causal = how.get("causal", True)
        shape = spec(
            device=device,
            dtype=dtype,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            cache_dtype=float8_dtype(device) if small else None,
            non_causal=not causal,
            windows=frozenset({40 if extra == "window" else None}),
            sinks=extra == "sinks",
            softcap=20.0 if extra == "softcap" else None,
        )
        layer: dict[str, Any] = {"scale": dim**-0.5}
        if extra == "window":
            layer["window"] = 40
        elif extra == "sinks":
            layer["sinks"] = torch.linspace(-1, 1, heads).to(device)
        elif extra == "softcap":
            layer["softcap"] = 20.0
        title = (
            f"{phase}, {heads}/{kv_heads} heads of {dim}, {extra}{', 8-bit cache' if small else ''}"
        )
        yield title, Case(shape, **how), layer


def check(
    backend: str, title: str, case: Case, layer: dict[str, Any], known: dict[str, Tensor]
) -> dict[str, Any]:
    """Runs and judges one call; `known` gets its output, or has that of another run."""
    found: dict[str, Any] = {"backend": backend, "case": title}
    try:
        got = case.attend(select_backend(backend, case.spec), **layer)
        exact = case.exact(**layer)
        unit = torch.finfo(got.dtype).eps * float(exact.square().mean().sqrt())
        found["error"] = float((got.double() - exact).square().mean().sqrt()) / unit
        found["rounding"] = (
            float((exact.to(got.dtype).double() - exact).square().mean().sqrt()) / unit
        )
        name = f"{backend} {title}"
        if name in known:
            found["apart"] = (
                float((got.cpu().double() - known[name].double()).square().mean().sqrt()) / unit
            )
        known[name] = got.cpu()
        case.check(got, **layer)
        found["verdict"] = "right"
    except AssertionError as error:
        found["verdict"] = f"WRONG: {error}"
    except Exception as error:  # whatever a kernel raises: the next call may work
        traceback.print_exc()
        found["verdict"] = f"RAISED: {' '.join(str(error).split())[:200]}"
    return found


def main() -> int:
    """Runs the command; 1 when a call is wrong, 2 when no backend but torch_ref serves this
    machine.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.checks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--attention", nargs="+", default=list(ATTENTION_BACKENDS), help="backends (default: all)")
    add("--device", default="auto")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    add("--every", type=int, default=1, help="take every n-th call")
    add("--longest", type=int, default=10**6, metavar="N", help="tokens of a request at most")
    add("--save", type=Path, help="write the outputs")
    add("--against", type=Path, help="compare with outputs that another run has saved")
    add("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    device = resolve_device(args.device)
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__} for {torch_build()}; {device}")
    known: dict[str, Tensor] = torch.load(args.against) if args.against else {}
    table: list[dict[str, Any]] = []
    calls = cases(device, getattr(torch, args.dtype), args.longest)
    every = list(itertools.islice(calls, 0, None, args.every))
    for backend in args.attention:
        print(f"\n{backend:<62}{'error':>8}{'rounding':>10}{'apart':>8}")
        for title, case, layer in every:
            if reasons := refusals(case.spec)[backend]:
                print(f"  {title:<60}refused: {'; '.join(reasons)}")
                continue
            found = check(backend, title, case, layer, known)
            table.append(found)
            numbers = "".join(
                f"{found[name]:>{width}.2f}" if name in found else " " * width
                for name, width in (("error", 8), ("rounding", 10), ("apart", 8))
            )
            print(f"  {title:<60}{numbers}  {found['verdict']}", flush=True)
    if args.save:
        torch.save(known, args.save)
    if args.out:
        args.out.write_text(json.dumps(table, indent=1))
    wrong = sum(found["verdict"] != "right" for found in table)
    print(
        f"\n{len(table) - wrong} of {len(table)} calls are right"
        if table
        else "\nno backend serves this machine"
    )
    return 1 if wrong else 0 if table else 2


if __name__ == "__main__":
    sys.exit(main())
