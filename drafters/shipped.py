"""The drafter that comes with the package: `smollm2-dflash`, for the embedded model."""

from pathlib import Path

from drafters.dflash.drafter import DFlashDrafter, load_dflash
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.model.core import Verifier

FOLDER = Path(__file__).parent / "smollm2_135m_instruct"
FILES = ("config.json", "model.safetensors")


def shipped_drafter_path() -> Path:
    """Folder of the drafter, in z-lab's layout.

    Raises:
        CheckpointError: the package was installed without its data files.
    """
    missing = [name for name in FILES if not (FOLDER / name).is_file()]
    if missing:
        what = f"the drafter smollm2-dflash lacks {' and '.join(missing)} in {FOLDER}"
        way_out = "install specdec again with its data files, or choose drafter ngram"
        raise CheckpointError(f"{what}; {way_out}")
    return FOLDER


def located(name: str) -> str:
    """The folder of the drafter that comes with the package where `name` is its name, else `name`.

    Raises:
        CheckpointError: see `shipped_drafter_path`.
    """
    return str(shipped_drafter_path()) if name in ("smollm2-dflash", "embedded") else name


def load_shipped(path: str | Path | None = None, *, verifier: Verifier) -> DFlashDrafter:
    """The drafter `smollm2-dflash`.

    Raises:
        InvalidInputError: a path, for this drafter has its own.
        CheckpointError: its files are missing or damaged.
    """
    if path is not None:
        what = "the drafter smollm2-dflash comes with the package"
        raise InvalidInputError(f"{what}; leave out {str(path)!r}")
    return load_dflash(shipped_drafter_path(), verifier=verifier)
