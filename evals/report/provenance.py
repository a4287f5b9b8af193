"""Where a figure comes from: command, commit, versions, device, and the exact files of target and drafter."""

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from specdec import __version__
from specdec.decoder import SpecDecoder

_PACKAGES = ("torch", "transformers", "tokenizers", "lm_eval")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def provenance(decoder: SpecDecoder, drafters: Sequence[str]) -> dict[str, Any]:
    """Everything that a figure measured with `decoder` depends on, beside its own settings.

    Args:
        decoder: gives the target, its device and its type.
        drafters: their names, see `specdec.registry.drafter_name`.
    """
    verifier = decoder.verifier
    return {
        "command": shlex.join(["specdec", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(verifier.device),
        "num_threads": torch.get_num_threads(),
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "attention": verifier.attention.name,
        "kv_dtype": str(verifier.attention.spec.kv_dtype).removeprefix("torch."),
        "target": checkpoint(verifier.name),
        "drafters": {name: _drafter_checkpoint(name) for name in drafters if name not in ("none", "ngram")},
    }


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
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str | None:
    """Commit of the checkout that this code runs from, with "+changes" when files differ from it; None when installed otherwise."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or a checkout that is not ours to read
    return head + ("+changes" if changes.strip() else "")


def checkpoint(name: str) -> dict[str, Any]:
    """Name, hub revision where there is one, and SHA-256 of every file of weights and configuration."""
    folder, revision = _folder(name)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]) if folder else []
    return {"name": name, "revision": revision, "sha256": {path.name: _sha256(path) for path in files}}


def _drafter_checkpoint(name: str) -> dict[str, Any]:
    """The same for a drafter; "embedded" names another one there than among targets."""
    if name != "embedded":
        return checkpoint(name)
    from drafters.embedded import embedded_drafter_path

    return checkpoint(str(embedded_drafter_path())) | {"name": name}


def checkpoint_folder(name: str) -> Path | None:
    """Where the files of a checkpoint lie on this machine; None when they do not."""
    return _folder(name)[0]


def _folder(name: str) -> tuple[Path | None, str | None]:
    if name == "embedded":
        from verifiers.embedded import embedded_model_path

        return embedded_model_path(), None
    path = Path(name).expanduser()
    if path.is_dir():
        return path, None
    cached = try_to_load_from_cache(name, "config.json") if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else None
    if not isinstance(cached, str):
        return None, None
    snapshot = Path(cached).parent  # .../snapshots/<revision>/config.json
    return snapshot, snapshot.name


def _sha256(path: Path) -> str:
    blob = path.resolve().name
    if _SHA256.fullmatch(blob):
        return blob  # the hub's cache names large files by their hash, which saves reading them again
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
