"""The API reference is built from docstrings, and everything that it shows has one."""

import inspect
import runpy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import specdec

SCRIPT = Path(__file__).parents[2] / "docs" / "reference.py"


def script(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = runpy.run_path(str(SCRIPT))[name]
    return function


def undocumented(name: str, value: Any) -> Iterator[str]:
    """Names of an object, and of what a class of ours has for everybody, without a docstring."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", "")
    if not doc or doc.startswith(f"{name.rpartition('.')[2]}("):  # a dataclass's own
        yield name
    if inspect.isclass(value):
        for part, member in vars(value).items():
            member = getattr(member, "__func__", member)
            shown = inspect.isfunction(member) or isinstance(member, property)
            if shown and not part.startswith("_") and not member.__doc__:
                yield f"{name}.{part}"


def test_every_public_name_has_a_docstring() -> None:
    objects = script("public")()
    assert {f"specdec.{name}" for name in specdec.__all__} < set(objects)
    assert "specdec.base.registry.register_drafter" in objects  # a page names it
    assert [
        missing for name, value in objects.items() for missing in undocumented(name, value)
    ] == []


def test_what_lacks_a_docstring_is_seen() -> None:
    class Bare:
        """A class."""

        def told(self) -> None:
            """Has one."""

        @property
        def untold(self) -> int:
            return 3

    @dataclass
    class Plain:
        x: int

    assert [*undocumented("Bare", Bare), *undocumented("Plain", Plain)] == ["Bare.untold", "Plain"]


@pytest.mark.slow
def test_the_reference_is_built(tmp_path: Path) -> None:
    """Without a warning, with a page for each module and a place for each name."""
    pytest.importorskip("pdoc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script("write")(tmp_path)
    for module, name in script("named")():
        page = (tmp_path / module.replace(".", "/")).with_suffix(".html")
        assert not name or f'id="{name}"' in page.read_text(), f"{module}.{name}"
    page = (tmp_path / "specdec.html").read_text()
    assert [name for name in specdec.__all__ if f'id="{name}"' not in page] == []
