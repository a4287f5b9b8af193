"""What our Triton kernels take of AMD's machines, as a table: `python -m tests.checks.compile`.
Needs Triton and no GPU.

A cell holds the vector registers of a thread, + those that it spills, and the shared memory of a
program. The status is 1 when a kernel spills on CDNA.
"""

import sys

from tests.helpers.compiled_kernels import TARGETS, Use, kernels, use_of


def main() -> int:
    """Compiles every kernel for every AMD target."""
    targets = {name: target for name, target in TARGETS.items() if target.assembly == "amdgcn"}
    uses: dict[str, dict[str, Use]] = {}
    for name, target in targets.items():
        for title, kernel in kernels(target):
            uses.setdefault(title, {})[name] = use_of(kernel)
    print(f"| kernel | {' | '.join(targets)} |\n|{'---|' * (1 + len(targets))}")
    for title, by_target in uses.items():
        cells = [f" {_cell(by_target[name])} " if name in by_target else " " for name in targets]
        print(f"| {title} |{'|'.join(cells)}|")
    return int(
        any(
            by_target[name].spilled
            for by_target in uses.values()
            for name in targets
            if targets[name].is_cdna
        )
    )


def _cell(use: Use) -> str:
    """A kernel on a target."""
    spilled = f" + {use.spilled}" if use.spilled else ""
    shared = f", {use.shared / 1024:.2g} KiB" if use.shared >= 512 else ""
    return f"{use.registers}{spilled}{shared}"


if __name__ == "__main__":
    sys.exit(main())
