"""What compares numbers, as other processors compute it: libraries are told which one they run on.

    python -m tests.checks.cpus          # everything that is not slow: `make test-cpus`
    python -m tests.checks.cpus --bits   # what compares bits, in seconds: part of `make test`

NumPy's BLAS, torch's own kernels, oneDNN and MKL choose their code by the processor, and sums by
the number of threads. A bound that holds on one processor by chance fails on another one here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OURS = (
    "specdec/attention", "specdec/engine", "specdec/kv_cache", "specdec/layers", "specdec/model",
    "specdec/sampling", "drafters", "verifiers", "emulation",
)  # fmt: skip
KERNELS = "tests/specdec/kernels"
NUMBERS = [f"tests/{part}" for part in OURS]
"""Where numbers are compared, beside the tests of whole generations and `KERNELS`."""
READERS = (
    "tests/drafters/*/test_keys.py",
    "tests/drafters/test_public_drafters.py",
    "tests/drafters/training/data",
    "tests/specdec/engine/*_worlds.py",
    "tests/specdec/engine/policy",
    "tests/specdec/engine/test_recorded_choice.py",
    "tests/verifiers/test_public_targets.py",
    "tests/verifiers/test_sizes.py",
    "tests/verifiers/test_support.py",
)
"""What of these reads configs and files, or replays times that were measured: a seventh of the
time, and no processor has a say in it.
"""


class Machine(NamedTuple):
    """A processor by what libraries call it; a flag of /proc/cpuinfo that running its code
    takes.
    """

    blas: str
    aten: str
    dnn: str
    mkl: str
    threads: int
    needs: str

    def environment(self) -> dict[str, str]:
        """Makes libraries take this processor for it."""
        return {
            "OPENBLAS_CORETYPE": self.blas,
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.dnn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "OMP_NUM_THREADS": str(self.threads),
            # more threads than cores would spin for each other; sums are parted all the same
            "OMP_WAIT_POLICY": "PASSIVE",
        }


MACHINES = {
    "old": Machine("Prescott", "default", "SSE41", "SSE4_2", 1, "sse4_1"),
    "haswell": Machine("Haswell", "avx2", "AVX2", "AVX2", 1, "avx2"),
    "zen": Machine("Zen", "avx2", "AVX2", "AVX2", 8, "avx2"),
    "skylake": Machine("SkylakeX", "avx512", "AVX512_CORE", "AVX512", 2, "avx512f"),
    "cooperlake": Machine("Cooperlake", "avx512", "AVX512_CORE_BF16", "AVX512", 2, "avx512_bf16"),
}


def flags() -> set[str]:
    """What this processor can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def run(name: str, paths: list[str], options: list[str], workers: int) -> tuple[bool, float, str]:
    """Whether these tests pass on a machine, seconds that they took, and pytest's count of them;
    failures are printed.
    """
    started = time.perf_counter()
    environment = os.environ | MACHINES[name].environment()
    if all(path.startswith(KERNELS) for path in paths):
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-n",
        str(workers), "--dist", "worksteal", *(f"--ignore-glob={ROOT / one}" for one in READERS),
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *options, *paths], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode not in (0, 5):  # 5: none of these tests
        print(
            "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR")))
            or "\n".join(lines[-20:]),
            flush=True,
        )
    told = (line for line in reversed(lines) if re.search(r" in \d.*s\b", line))
    took = time.perf_counter() - started
    return done.returncode in (0, 5), took, next(told, "no test has run")


def main() -> int:
    """Prints a line for each machine; 1 where a test fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bits", action="store_true", help="only what compares bits, as Haswell has it"
    )
    parser.add_argument("--machines", nargs="+", choices=MACHINES, help="these alone")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.bits:
        names, options = ["haswell"], ["-k", "bits", "-m", "not slow"]
        kernels, files = (
            [
                str(path.relative_to(ROOT))
                for part in parts
                for path in sorted((ROOT / part).rglob("test_*.py"))
                if "_bits" in path.read_text()
            ]
            for parts in ([KERNELS], NUMBERS)
        )
    else:
        kernels = [KERNELS]
        names, options = list(MACHINES), ["-m", "not slow"]
        files = [
            *NUMBERS,
            *(
                str(path.relative_to(ROOT))
                for path in sorted((ROOT / "tests").glob("test_*lossless.py"))
            ),
        ]
    right, able = True, flags()
    for name in args.machines or names:
        if MACHINES[name].needs not in able:
            print(f"{name}: left out, this processor lacks {MACHINES[name].needs}", flush=True)
            continue
        parts = {"kernels, interpreted": kernels, "the rest": files}
        # what compares bits takes less time than a worker's start: both parts at once, without any
        at_once, workers = (len(parts), 0) if args.bits else (1, args.workers)
        with ThreadPoolExecutor(at_once) as threads:
            same = map(repeat, (options, workers))
            results = threads.map(run, repeat(name), parts.values(), *same)
            for what, (passed, took, line) in zip(parts, results, strict=True):
                right &= passed
                verdict = "right" if passed else "WRONG"
                print(
                    f"{name:<11} {what:<21} {verdict:<6} {took:5.0f} s  {line.strip('= ')}",
                    flush=True,
                )
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
