"""Loads a drafter's checkpoint, of whatever algorithm its `config.json` names."""

import logging
from pathlib import Path

from drafters.algorithms import algorithm_of, unsupported
from drafters.checkpoint import CONFIG, called, find_folder, naming, read_json
from drafters.keys import require
from drafters.license import CARD, license_note
from specdec.core import Drafter, Verifier
from specdec.kinds import check_adapter
from specdec.registry import DRAFTERS, resolve

logger = logging.getLogger(__name__)


def load_drafter(path: str | Path, *, verifier: Verifier) -> Drafter:
    """The drafter in a folder, or on the hub when `path` is a name there (see `specdec.hub`) and no such folder exists.

    Raises:
        CheckpointError: nothing there, damaged files, an algorithm that is not supported, or another target.
    """
    folder = find_folder(path)
    with naming(path):
        raw = read_json(folder / CONFIG)
        algorithm = algorithm_of(raw)
        require(algorithm in DRAFTERS, unsupported(algorithm))
    if note := license_note(folder / CARD, raw):
        logger.warning("drafter %r: %s", str(path), note)
    check_adapter(path, folder, what="drafter")
    with called(folder, path):
        drafter: Drafter = resolve(DRAFTERS, algorithm, "drafter")(folder, verifier=verifier)
    return drafter
