"""What the driver says of memory, and what a run takes of it:
`python -m tests.checks.amd_first_day.memory`.

Fails when the driver names more free memory than there is, or when an engine with the default
budget leaves less than a twentieth of it.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from specdec.base.config import EngineConfig
from specdec.cli.options import load_decoder, model_options
from specdec.device.device import default_cache_bytes, free_memory, resolve_device

MIN_FREE = 0.05
"""Of the memory of the device."""


def problems(free: int, total: int, left: int) -> list[str]:
    """What is wrong with bytes that are free at first, there at all, and left by a run.

    >>> problems(14, 16, 4), problems(120, 62, 3)
    ([], ['the driver names more free memory than there is', 'less than 5% of it is left'])
    """
    found = []
    if free > total:
        found.append("the driver names more free memory than there is")
    if left < MIN_FREE * total:
        found.append(f"less than {MIN_FREE:.0%} of it is left")
    return found


def main() -> int:
    """Prints the figures; 1 when one of them is out of its bounds, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_options(parser)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    device = resolve_device(args.device)
    if device.type != "cuda":
        print("there is no GPU to ask")
        return 2
    free, total = torch.cuda.mem_get_info(device)
    found = {"free, by the driver": free, "total, by the driver": total}
    found["free, as it counts here"] = free_memory(device)
    found["default budget"] = default_cache_bytes(device)
    decoder = load_decoder(args, None, EngineConfig(max_num_seqs=256))
    text = [{"role": "user", "content": "Count to fifty."}]
    decoder.generate([decoder.tokenize(text)] * 64)
    torch.cuda.synchronize()
    found["allocated at most"] = torch.cuda.max_memory_allocated(device)
    found["free afterwards"] = free_memory(device)
    for name, count in found.items():
        print(f"{name:<26}{count / 2**30:>8.2f} GiB")
    wrong = problems(free, total, found["free afterwards"])
    print("; ".join(wrong) or "all within bounds")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
