"""Where a file of figures or answers comes from: command, commit, versions, device, files."""

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.base.version import __version__
from specdec.model.core import Verifier
from specdec.session.prompts import PromptReader

_PACKAGES = ("torch", "transformers", "tokenizers", "lm_eval")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def origin_of_run(verifier: Verifier, reader: PromptReader | None = None) -> dict[str, Any]:
    """What every file that a run leaves says of it: command, versions, target, device, types."""
    return {
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(verifier.device),
        "dtype": dtype_name(verifier.dtype),
        "weights": ", ".join(verifier.weight_codes) or dtype_name(verifier.dtype),
        "attention": verifier.attention.name,
        "generation_config": verifier.defaults.stated,
        **(reader.stated if reader else {}),
    }


def command_line() -> str:
    """What this process was started with, as a shell reads it."""
    return shlex.join(["specdec", *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Versions of what takes part; packages that are not installed are left out."""
    found = {"specdec": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def dtype_name(dtype: torch.dtype) -> str:
    """A type without its module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def commit() -> str | None:
    """Commit of this code's checkout, with "+changes" when files differ; else None."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or a checkout that is not ours to read
    return head + ("+changes" if changes.strip() else "")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    blob = path.resolve().name
    if _SHA256.fullmatch(blob):
        # the hub's cache names large files by their hash, which saves reading them again
        return blob
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
