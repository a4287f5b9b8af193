"""AMD GPUs as the kernel's driver shows them: which there are, and why torch finds none.

Imports the standard library alone, since set-up asks before torch is installed, and needs none of
ROCm's tools.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SERVED = ("gfx942", "gfx950", "gfx110", "gfx115", "gfx120", "gfx90a", "gfx1030", "gfx1250")
"""Beginnings of the names of architectures that ROCm builds of torch serve; AITER's kernels are for
the first five, ours for all."""

UNKNOWN = "architecture unknown"
"""In place of an architecture that a container may not read."""

_HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_ROOT = Path("/")


def architectures(root: Path = _ROOT) -> list[str]:
    """Architecture of every AMD GPU whose driver is loaded, such as "gfx942"; graphics within a
    processor are among them.

    Args:
        root: of the file system.
    """
    found = []
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*")):
        try:
            lines = (node / "properties").read_text().splitlines()
        except OSError:  # the driver tells a container nothing of the GPUs that it was not given
            found.append(UNKNOWN)
            continue
        version = next(
            (int(line.split()[1]) for line in lines if line.startswith("gfx_target_version ")), 0
        )
        if version:  # processors are nodes, too
            found.append(architecture_name(version))
    return found


def architecture_name(version: int) -> str:
    """The name of a version as the driver writes it: two decimal digits each of minor and step.

    >>> architecture_name(90402), architecture_name(90010), architecture_name(120001)
    ('gfx942', 'gfx90a', 'gfx1201')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def wanting_rocm(root: Path = _ROOT) -> list[str]:
    """Architectures of GPUs that want a ROCm build of torch; none beside an NVIDIA GPU."""
    if not (root / "dev/kfd").exists() or (root / "proc/driver/nvidia/version").exists():
        return []
    found = architectures(root) or [UNKNOWN]
    return [name for name in found if name == UNKNOWN or name.startswith(SERVED)]


def free_of_apu(root: Path = _ROOT) -> int | None:
    """Bytes that the only GPU, one within a processor, can still allocate, by the kernel's count;
    None where it tells none, or of several.

    It allocates from what is set aside for it, or, where that is less than what it may share with
    the host, from the host's memory, as far as that is available.

    Args:
        root: of the file system.
    """
    files = [*(root / "sys/class/drm").glob("card*/device/mem_info_gtt_total")]
    if len(files) != 1:
        return None
    try:
        own, used_own, shared, used_shared = (
            int((files[0].parent / f"mem_info_{name}").read_text())
            for name in ("vram_total", "vram_used", "gtt_total", "gtt_used")
        )
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    return own - used_own if own >= shared else max(0, min(shared - used_shared, kib * 1024))


def why_unseen(
    build: str, *, rocm: bool, root: Path = _ROOT, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Why torch finds no GPU although an AMD GPU is here, with the way out; None when none is.

    Args:
        build: torch and what it is built for, in words that "finds none" can follow.
        rocm: whether that is ROCm.
        root: of the file system.
        environ: variables of the process.
    """
    names = architectures(root) or ([UNKNOWN] if (root / "dev/kfd").exists() else [])
    if not names:
        return None
    here = f"an AMD GPU is here ({', '.join(sorted(set(names)))}), but "
    if not rocm:
        return f"{here}{build} finds none: install a ROCm build of torch (docs/rocm.md)"
    hidden = next(
        (name for name in _HIDING if name in environ and _hides_all(environ[name], len(names))),
        None,
    )
    if hidden:
        return (
            f"{here}{hidden} is {environ[hidden]!r} and hides every GPU: unset it, or name one"
            f" that exists"
        )
    if not (root / "dev/kfd").exists():
        return (
            f"{here}/dev/kfd is missing: start the container with --device /dev/kfd --device"
            f" /dev/dri"
        )
    for path in [root / "dev/kfd", *sorted((root / "dev/dri").glob("renderD*"))]:
        if not os.access(path, os.R_OK | os.W_OK):
            group = _group(path)
            name = f"/{path.relative_to(root)}"
            return (
                f"{here}you may not open {name}: join its group, sudo usermod -aG {group} $USER,"
                f" and log in again;"
                f" for a container --group-add {group}"
            )
    return f"{here}{build} finds none: see whether rocminfo lists it, and docs/rocm.md"


def _hides_all(value: str, count: int) -> bool:
    """Whether a list of GPUs names none of the first `count`; one named by identifier may exist."""
    names = [name.strip() for name in value.split(",")]
    return all(
        name == "" or (name.lstrip("-").isdigit() and not 0 <= int(name) < count) for name in names
    )


def _group(path: Path) -> str:
    """Name of the group that owns a file, or its number where it has no name."""
    try:
        return path.group()
    except (KeyError, NotImplementedError):
        return str(path.stat().st_gid)
