"""Prints the lower bounds of pyproject.toml as pins, for `make check-lowest`."""

import re
import tomllib
from pathlib import Path


def pins() -> list[str]:
    """One line for each package with a lower bound.

    >>> "torch==2.11" in pins()
    True
    """
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    found = (re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", one) for one in wanted)
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    print("\n".join(pins()))
