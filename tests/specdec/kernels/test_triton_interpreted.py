"""The tests of Triton kernels, in Triton's interpreter and processes of its own; see `tests.helpers.triton_interpreter`."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["layers", "activation", "argmax", "sampler", "exchange"],
        ["recurrence", "recurrence_chunks", "gated_norm", "short_convolution", "grouped_convolution"],
        ["amd", "router", "experts"],
        ["fa", "tree_attention", "prefill"],
        ["packed", "packed_experts"],
        [
            "aiter_layers",
            "candidates",
            "trees",
            "tries",
            "matches",
            "forecasts",
            "block_rows",
            "acceptance",
            "cache_rows",
            "masks",
            "edges",
        ],
    ],
)
def test_kernels_in_the_interpreter(names: list[str]) -> None:
    """Kernels are right on CPU tensors, whatever this machine has."""
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.7 needs numpy before 2.4")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    files = [str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
