"""The four packages of this distribution: whose they are, and how to install what is missing.

Their names are those of other projects on the package registry, so a stranger's package can stand
before ours on Python's path, or have been installed over it.
"""

from collections.abc import Iterable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from specdec.base.errors import InvalidInputError

DISTRIBUTION = "specdec-dflash"
PACKAGES = ("specdec", "drafters", "verifiers", "evals")
ROOT = Path(__file__).parents[2]
"""The folder that the packages lie in."""


def install_command(extra: str) -> str:
    """How to install what an extra brings."""
    if (ROOT / "pyproject.toml").is_file():
        return f"python -m pip install -e '{ROOT}[{extra}]'"
    return f"python -m pip install -e '.[{extra}]' in a checkout of specdec"


def foreign_packages(names: Iterable[str] = PACKAGES) -> list[str]:
    """One line for each of the packages that Python does not find beside this one."""
    found = []
    for name in names:
        spec = find_spec(name)
        folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec else []
        where = str(folders[0]) if folders else spec.origin if spec else None
        if where is None:
            what = f"package {name!r} is missing beside {ROOT / 'specdec'}"
            found.append(f"{what}; install {DISTRIBUTION} from its checkout again")
        elif folders != [ROOT / name] and [folder.resolve() for folder in folders] != [
            (ROOT / name).resolve()
        ]:
            text = f"package {name!r} is not the one of {DISTRIBUTION} but {where}"
            found.append(f"{text}; run from another folder, or rename or uninstall that package")
    return found


def require_ours(*names: str) -> None:
    """Refuses to import what is not ours.

    Raises:
        InvalidInputError: one of the packages is a stranger's.
    """
    for line in foreign_packages(names):
        raise InvalidInputError(line)


def overwritten_packages() -> list[str]:
    """One line for each of the packages that another distribution has written into."""
    owners = packages_distributions()
    return [
        f"distribution {other!r} has files in package {name!r} of {DISTRIBUTION}; run: python -m"
        f" pip uninstall {other}, then install {DISTRIBUTION} from its checkout again"
        for name in PACKAGES
        for other in sorted(set(owners.get(name, ())) - {DISTRIBUTION})
    ]
