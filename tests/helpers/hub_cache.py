"""Checkpoints in a cache as the hub's client lays it out,
and a process that cannot reach the hub.
"""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(
    cache: Path, repo: str, folder: Path, *, revision: str = "main", commit: str = COMMIT
) -> Path:
    """Puts what is in a folder into the cache as a repository; the snapshot's folder."""
    base = cache / f"models--{repo.replace('/', '--')}"
    snapshot, blobs = base / "snapshots" / commit, base / "blobs"
    (base / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (base / "refs" / revision).write_text(commit)
    blobs.mkdir(exist_ok=True)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """From here on there is the cache alone."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
