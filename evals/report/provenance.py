"""Where a figure comes from: the run, and the exact files of target and drafters."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specdec.base.checkpoint.gguf_names import gguf_file, whole_model
from specdec.base.checkpoint.hub import CONFIG, found_folder, revision_of
from specdec.base.checkpoint.tensor_files import weight_files
from specdec.base.registry import parts_of
from specdec.session.decoder import SpecDecoder
from specdec.session.provenance import dtype_name, origin_of_run, sha256_of

_WITHOUT_FILES = ("none", "ngram", "suffix")


def provenance(decoder: SpecDecoder, drafters: Sequence[str]) -> dict[str, Any]:
    """Everything that a figure measured with `decoder` depends on, beside its own settings.

    Args:
        drafters: their names, see `specdec.base.registry.drafter_name`.
    """
    verifier, attention = decoder.verifier, decoder.verifier.attention
    return origin_of_run(verifier, decoder.reader) | {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_threads": torch.get_num_threads(),
        "kv_dtype": dtype_name(attention.spec.kv_dtype),
        "prefill_dtype": dtype_name(getattr(attention, "prefill_dtype", attention.spec.dtype)),
        "target": checkpoint(verifier.name),
        "drafters": {
            name: _drafter_checkpoint(name)
            for one in drafters
            for name in parts_of(one)
            if name not in _WITHOUT_FILES
        },
    }


def checkpoint(name: str) -> dict[str, Any]:
    """Name, hub revision if any, and SHA-256 of every file of weights and configuration."""
    folder, files = checkpoint_folder(name), set[Path]()
    if folder is not None:
        files = {
            *folder.glob("*.safetensors"),
            *folder.glob(CONFIG),
            *(folder / file for file in weight_files(folder)),
        }
        if (gguf := gguf_file(folder)) is not None:
            files |= {*whole_model(gguf)}
    digests = {path.name: sha256_of(path) for path in sorted(files)}
    revision = None if folder is None else revision_of(folder)
    return {"name": name, "revision": revision, "sha256": digests}


def _drafter_checkpoint(name: str) -> dict[str, Any]:
    """Where a drafter's checkpoint comes from."""
    if name != "smollm2-dflash":
        return checkpoint(name)
    from drafters.shipped import shipped_drafter_path

    return checkpoint(str(shipped_drafter_path())) | {"name": name}


def checkpoint_folder(name: str) -> Path | None:
    """Where the files of a checkpoint lie on this machine; None when they do not."""
    if name == "embedded":
        from verifiers.weights.embedded import embedded_model_path

        return embedded_model_path()
    return found_folder(name)
