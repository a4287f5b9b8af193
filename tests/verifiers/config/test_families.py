"""The files of `verifiers/families` together."""

from collections import Counter
from importlib import import_module
from pkgutil import walk_packages

import verifiers.families
from verifiers.config.families import ARCHITECTURES, FAMILIES, READ_AS, WRAPPERS


def test_nothing_is_said_twice() -> None:
    """A model type, a composite, a second name, an architecture of GGUF files."""
    modules = walk_packages(verifiers.families.__path__, "verifiers.families.")
    files = [import_module(module.name).FAMILIES for module in modules if not module.ispkg]
    families = [family for file in files for family in file.values()]
    said = {
        "types": [model_type for file in files for model_type in file],
        "composites": [name for family in families for name in family.wrappers],
        "second names": [name for family in families for name in family.aliases],
        "architectures": [name for family in families for name in family.gguf],
    }
    twice = {what: [name for name, n in Counter(of).items() if n > 1] for what, of in said.items()}
    assert {what: names for what, names in twice.items() if names} == {}
    assert list(map(len, said.values())) == list(
        map(len, (FAMILIES, WRAPPERS, READ_AS, ARCHITECTURES))
    )
