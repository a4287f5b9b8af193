"""Loads a drafter's checkpoint, of whatever algorithm its `config.json` names."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.algorithms import algorithm_of, unsupported
from drafters.checkpoint import CONFIG, called, find_folder, naming, read_json
from drafters.keys import require
from drafters.license import CARD, license_note
from specdec.base.checkpoint.kinds import check_adapter
from specdec.base.checkpoint.tensor_files import TensorFiles, weight_files
from specdec.base.errors import CheckpointError
from specdec.base.registry import DRAFTERS, resolve
from specdec.model.core import Drafter, Verifier

logger = logging.getLogger(__name__)


def load_drafter(path: str | Path, *, verifier: Verifier) -> Drafter:
    """The drafter in a folder, or on the hub when `path` is a name there (see
    `specdec.base.checkpoint.hub`) and no such folder exists.

    Raises:
        CheckpointError: nothing there, damage, an unsupported algorithm, another target.
    """
    folder = find_folder(path)
    with naming(path):
        raw = read_json(folder / CONFIG)
        algorithm = algorithm_in(folder, raw)
        require(algorithm in DRAFTERS, unsupported(algorithm))
    if note := license_note(folder / CARD, raw):
        logger.warning("drafter %r: %s", str(path), note)
    if algorithm != "draft-model":  # which is loaded as a target is
        check_adapter(path, folder, what="drafter")
    with called(folder, path):
        drafter: Drafter = resolve(DRAFTERS, algorithm, "drafter")(folder, verifier=verifier)
    return drafter


def algorithm_in(folder: Path, raw: Mapping[str, Any]) -> str:
    """The algorithm that a folder's config names; see `first_eagle` for heads that it does not.

    Raises:
        CheckpointError: it names none, or the wrong one.
    """
    try:
        algorithm = algorithm_of(raw)
    except CheckpointError:
        algorithm = "unknown"
    if refusal := first_eagle(folder, algorithm):
        raise CheckpointError(f"{refusal}; use an EAGLE-3 head or a DFlash drafter for the target")
    return algorithm_of(raw)


def first_eagle(folder: Path, algorithm: str) -> str | None:
    """What to say of a head of EAGLE or EAGLE-2, under any name; None of others.

    They project an embedding and a hidden state together, whose norm no other such head lacks.

    Raises:
        CheckpointError: damaged files.
    """
    if (algorithm in DRAFTERS and algorithm not in ("draft-model", "eagle3")) or not weight_files(
        folder
    ):
        return None
    names = TensorFiles(folder).names
    projects = any(name.removeprefix("model.") == "fc.weight" for name in names)
    if not projects or any("hidden_norm" in name for name in names):
        return None
    return (
        "this is a head of EAGLE or EAGLE-2 (with fc.weight and without hidden_norm.weight),"
        " which is not supported"
    )
