"""Latent attention, sparse or not, against plain torch:
`python -m tests.checks.amd_first_day.latent`.

Heads, keys and values are those of published models, with either cache; the phases, and what an
indexer's choice may cost, are those of the self-check (`specdec.attention.latent_check`).
"""

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specdec.attention.latent_check import check_latent
from specdec.attention.mla import IndexerSpec, MlaSpec
from specdec.attention.selector import select_backend
from specdec.base.errors import BackendError
from specdec.device.device import float8_dtype, resolve_device

SHAPES: dict[str, tuple[int, int, int, IndexerSpec | None]] = {
    "deepseek_v3": (128, 128, 128, None),
    "deepseek_v2_lite": (16, 128, 128, None),
    "glm4_moe_lite": (20, 192, 256, None),
    "deepseek_v32": (128, 128, 128, IndexerSpec(64, 128, 2048)),
    "glm_moe_dsa": (64, 192, 256, IndexerSpec(32, 128, 2048)),
    "tiny": (16, 128, 128, None),
    "tiny-sparse": (16, 128, 128, IndexerSpec(32, 128, 64)),
}
"""Heads, numbers of a key without its rotated part, of a value, and the indexer."""


def specs(names: list[str], device: torch.device) -> Iterator[tuple[str, str, MlaSpec]]:
    """Backend, title and shape of every check."""
    for name in names:
        heads, nope, value, indexer = SHAPES[name]
        for eighths in (False, True):
            cache = float8_dtype(device) if eighths else None
            sizes = (heads, 512, nope, 64, value, 16)
            backend = "rocm_aiter_mla" if indexer is None else "rocm_aiter_mla_sparse"
            title = f"{name}{', 8-bit cache' if eighths else ''}"
            spec = MlaSpec(device, torch.bfloat16, *sizes, cache_dtype=cache, indexer=indexer)
            yield backend, title, spec


def main() -> int:
    """Prints errors beside what is allowed; 1 when one is larger, 2 when no backend serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = [name for name in SHAPES if not name.startswith("tiny")]
    add = parser.add_argument
    add("--shapes", nargs="+", default=known, choices=list(SHAPES), metavar="NAME")
    add("--device", default="auto")
    add("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for name, title, spec in specs(args.shapes, resolve_device(args.device)):
        found: dict[str, Any] = {"backend": name, "case": title}
        try:
            with torch.inference_mode():
                backend = type(select_backend(name, spec))
                found["error"], found["bound"] = check_latent(backend, spec)
            right = found["error"] <= found["bound"]
            found["verdict"] = "right" if right else "WRONG"
        except BackendError as refused:
            print(f"{title:<32}refused: {refused}")
            continue
        except Exception as error:  # whatever a kernel raises: the next one may work
            traceback.print_exc()
            found["verdict"] = f"RAISED: {' '.join(str(error).split())[:200]}"
        table.append(found)
        numbers = "".join(f"{found[key]:>10.2g}" for key in ("error", "bound") if key in found)
        print(f"{title:<32}{numbers}  {found['verdict']}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(table, indent=1))
    return int(any(one["verdict"] != "right" for one in table)) if table else 2


if __name__ == "__main__":
    sys.exit(main())
