"""Where a shape's config is: a file or folder of the user's, or one that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.base.files import read_json, user_path

FOLDER = Path(__file__).parent / "shapes"


def names() -> list[str]:
    """Shapes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def config_file(name: str) -> Path:
    """The config.json that `name` stands for.

    Raises:
        InvalidInputError: there is none.
    """
    path = user_path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    if name in names():
        return FOLDER / f"{name}.json"
    what = f"no config {name!r}"
    way_out = f"give a config.json, a folder with one, or one of: {', '.join(names())}"
    raise InvalidInputError(f"{what}; {way_out}")


def entries(path: Path) -> dict[str, Any]:
    """What the file says."""
    return read_json(path, way_out="give a config.json", strict=False)
