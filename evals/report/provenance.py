"""Where a figure comes from: the run, and the exact files of target and drafters."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from specdec.attention.mla import MlaBackend
from specdec.decoder import SpecDecoder
from specdec.provenance import dtype_name, origin_of_run, sha256_of
from specdec.registry import parts_of

_WITHOUT_FILES = ("none", "ngram", "suffix")


def provenance(decoder: SpecDecoder, drafters: Sequence[str]) -> dict[str, Any]:
    """Everything that a figure measured with `decoder` depends on, beside its own settings.

    Args:
        decoder: gives the target, its device and its type.
        drafters: their names, see `specdec.registry.drafter_name`.
    """
    verifier, attention = decoder.verifier, decoder.verifier.attention
    return origin_of_run(verifier) | {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_threads": torch.get_num_threads(),
        "kv_dtype": dtype_name(attention.spec.kv_dtype),
        "prefill_dtype": dtype_name(attention.prefill_dtype if isinstance(attention, MlaBackend) else attention.spec.dtype),
        "target": checkpoint(verifier.name),
        "drafters": {name: _drafter_checkpoint(name) for one in drafters for name in parts_of(one) if name not in _WITHOUT_FILES},
    }


def checkpoint(name: str) -> dict[str, Any]:
    """Name, hub revision where there is one, and SHA-256 of every file of weights and configuration."""
    folder, revision = _folder(name)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]) if folder else []
    return {"name": name, "revision": revision, "sha256": {path.name: sha256_of(path) for path in files}}


def _drafter_checkpoint(name: str) -> dict[str, Any]:
    """The same for a drafter."""
    if name != "smollm2-dflash":
        return checkpoint(name)
    from drafters.shipped import shipped_drafter_path

    return checkpoint(str(shipped_drafter_path())) | {"name": name}


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
