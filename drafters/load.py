"""Loads a drafter's checkpoint, of whatever algorithm its `config.json` names."""

from pathlib import Path

from drafters.algorithms import algorithm_of, unsupported
from drafters.checkpoint import CONFIG, find_folder, naming, read_json
from drafters.keys import require
from specdec.core import Drafter, Verifier
from specdec.registry import DRAFTERS, resolve


def load_drafter(path: str | Path, *, verifier: Verifier) -> Drafter:
    """The drafter in a folder, or on the hub when `path` is an `owner/name` and no such folder exists.

    Raises:
        CheckpointError: nothing there, damaged files, an algorithm that is not supported, or another target.
    """
    folder = find_folder(path)
    with naming(path):
        algorithm = algorithm_of(read_json(folder / CONFIG))
        require(algorithm in DRAFTERS, unsupported(algorithm))
    drafter: Drafter = resolve(DRAFTERS, algorithm, "drafter")(folder, verifier=verifier)
    return drafter
