"""Makes AITER's real Triton kernels importable: from the installed package or from sources, on a
GPU or in Triton's interpreter.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import specdec.device.device
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.kernels import aiter, aiter_triton_only

SOURCES = "SPECDEC_AITER"
"""Environment variable that names a folder with AITER's sources, the one that holds the folder
`aiter`.
"""

REPOSITORY = "SPECDEC_AITER_REPOSITORY"
"""Environment variable that names a git repository of AITER with its tags, from which tests take
several versions.
"""

REVISIONS = ("v0.1.16", "v0.1.20", "main")
"""What of it is taken: the oldest that imports without its compiled part, a release, and the
newest.
"""

NEEDED = (
    "aiter/__init__.py",
    "aiter/jit/__init__.py",
    "aiter/jit/utils",
    "aiter/ops/__init__.py",
    "aiter/ops/triton",
)
"""What of the sources the Triton kernels need: some 7 MB, and a fifth of that when compressed."""

INTERPRETER = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
"""What has to be set before Triton is imported."""

COMPUTE_UNITS = 4
"""Of the pretended GPU: few, so that a handful of requests already takes the ways of a full one."""


class PretendedDriver:
    """Answers what AITER asks Triton's driver while it is imported: which GPU this is."""

    def __init__(self, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)

    def get_current_target(self) -> Any:
        """Backend, architecture and warp size."""
        return self.target


Patch = Callable[[Any, str, Any], None]


def _read_scalars_with_new_numpy(patch: Patch) -> None:
    """The interpreter keeps scalars as arrays of one element, which numpy no longer turns into an
    index from 2.4 on.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch(interpreter, "_patch_lang_tensor", patched)


def export(repository: str, revision: str, folder: Path) -> None:
    """Unpacks what the Triton kernels need of a revision into `folder`, which can then be named in
    `SPECDEC_AITER`.

    Raises:
        RuntimeError: git knows no such repository or revision.
    """
    archive = subprocess.run(
        ["git", "-C", repository, "archive", revision, *NEEDED], capture_output=True, check=False
    )
    if archive.returncode:
        raise RuntimeError(
            f"git archive {revision} of {repository!r}: {archive.stderr.decode().strip()}"
        )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def missing() -> str | None:
    """Why the real kernels cannot run here; None when they can."""
    if aiter.installed_version() is None and not os.environ.get(SOURCES):
        return (
            f"AITER is not here: install amd-aiter, or name a folder with its sources in {SOURCES}"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@contextmanager
def real_aiter(
    device: torch.device, *, version: str, architecture: str
) -> Iterator[dict[str, int]]:
    """Within it the backend finds AITER; float32 is taken, too, so that tokens can be compared one
    by one.

    Args:
        device: a GPU, or a CPU for Triton's interpreter.
        version: of the sources named in `SPECDEC_AITER`, which go before an installed `amd-aiter`.
        architecture: AMD architecture to pretend in the interpreter; it decides which tile sizes
            AITER picks.

    Yields:
        How often each of the two functions has been called.
    """
    calls = {"unified_attention": 0, "flash_attn_with_kvcache": 0}
    with ExitStack() as stack:

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        if os.environ.get(SOURCES):
            folder = stack.enter_context(TemporaryDirectory())
            info = Path(folder, f"amd_aiter-{version}.dist-info")
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n"
            )
            patch(sys, "path", [folder, os.environ[SOURCES], *sys.path])
        if device.type == "cpu":
            import triton

            assert os.environ.get("TRITON_INTERPRET") == "1", "set before Triton is imported"
            triton.runtime.driver.set_active(PretendedDriver(architecture))
            _read_scalars_with_new_numpy(patch)
            patch(specdec.device.device, "rocm_architecture", lambda device: architecture)
            patch(torch.cuda, "current_device", lambda: 0)
            patch(
                torch.cuda,
                "get_device_properties",
                lambda device: SimpleNamespace(multi_processor_count=COMPUTE_UNITS),
            )
        # CDNA would otherwise load the full tier
        stack.enter_context(mock.patch.dict(os.environ, AITER_TRITON_ONLY="1"))
        patch(rocm_aiter_fa, "DTYPES", (torch.float32, *rocm_aiter_fa.DTYPES))
        load = aiter_triton_only.load

        def counted() -> aiter.AiterTriton:
            loaded = load()

            def count(name: str) -> Any:
                def call(**arguments: Any) -> Any:
                    calls[name] += 1
                    return getattr(loaded, name)(**arguments)

                return call

            return aiter.AiterTriton(loaded.version, **{name: count(name) for name in calls})

        patch(aiter_triton_only, "load", counted)
        yield calls
