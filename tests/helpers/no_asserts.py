"""A plugin of pytest with which our own packages run as under `python -O`, without their asserts:
what others have compiled, which would take that longest, is imported as ever.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

OURS = ("specdec", "drafters", "verifiers", "evals")


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in OURS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


INSTALLED = not any(name.partition(".")[0] in OURS for name in sys.modules)
if INSTALLED:  # else it is imported to look for examples in its docstrings
    sys.meta_path.insert(0, _Finder())


def pytest_configure() -> None:
    assert INSTALLED, "it comes too late"
