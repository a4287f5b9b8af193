"""Prompts of six kinds from Python's own manual and library: text that every machine has.

No drafter of ours is trained on them. Versions of Python differ, so prompts have hashes.
"""

import ast
import base64
import bisect
import calendar
import colorsys
import fractions
import gettext
import heapq
import inspect
import posixpath
import shutil
import statistics
import string
import textwrap
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

_LANGUAGES = ("French", "German", "Spanish", "Italian")
_MODULES = (statistics, textwrap, bisect, heapq, string, fractions, colorsys)
_LENGTHS = range(200, 700)  # characters of a paragraph
_EDITED = (
    bisect, posixpath, colorsys, heapq, textwrap, calendar, base64, gettext, statistics, shutil,
)  # fmt: skip
_EDITED_LENGTHS = range(400, 1400)  # characters of a function


def _paragraphs() -> list[str]:
    """Paragraphs of prose, in the order of the manual's topics; no examples, tables or lists."""
    parts = (
        " ".join(part.split())
        for text in topics.values()
        for part in text.split("\n\n")
        if not part.startswith((" ", "*"))
    )
    prose = (one for one in parts if len(one) in _LENGTHS and one[0].isupper() and one[-1] == ".")
    return list(dict.fromkeys(prose))  # some topics repeat a paragraph


def _code() -> Iterator[str]:
    for module in _MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            doc = inspect.getdoc(function)
            if function.__module__ == module.__name__ and not name.startswith("_") and doc:
                about = textwrap.indent(f'"""{doc.split(">>>")[0].strip()}\n"""', "    ")
                signature = f"def {name}{inspect.signature(function)}:"
                yield (
                    "Complete this Python function; answer with the whole function.\n\n"
                    f"```python\n{signature}\n{about}\n```"
                )


def _editing() -> Iterator[str]:
    for module in _EDITED:
        source = inspect.getsource(module)
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        texts = [(node.name, ast.get_source_segment(source, node) or "") for node in functions]
        for name, text in [(name, one) for name, one in texts if len(one) in _EDITED_LENGTHS][:2]:
            before = f"Original file:\n\n```python\n{text}\n```"
            yield (
                f"{before}\n\nThe same file, in which the function is called `{name}_new`:\n\n"
                "```python\n"
            )


def _translation() -> Iterator[str]:
    for number, text in enumerate(_paragraphs()[::3]):
        yield f"Translate this text into {_LANGUAGES[number % len(_LANGUAGES)]}:\n\n{text}"


def _summaries() -> Iterator[str]:
    texts = _paragraphs()[1::3]
    for start in range(0, len(texts) - 3, 4):
        yield "Summarize this text in two sentences:\n\n" + "\n\n".join(texts[start : start + 4])


def _questions() -> Iterator[str]:
    for title in dict.fromkeys(text.splitlines()[0].strip() for text in topics.values()):
        yield (
            f"What would a beginner want to know about this part of Python: {title}?"
            " Explain it in your own words."
        )


def _retrieval() -> Iterator[str]:
    texts = _paragraphs()[2::3]
    for number, start in enumerate(range(0, len(texts) - 5, 6)):
        part = texts[start : start + 6]
        words = " ".join(part[number % len(part)].split()[:6])
        numbered = "\n\n".join(f"[{place}] {text}" for place, text in enumerate(part, start=1))
        yield (
            f"{numbered}\n\nWhich paragraph above begins with the words {words!r}?"
            " Give its number, and repeat it word for word."
        )


MANUAL_KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "code": _code, "editing": _editing, "translation": _translation, "summaries": _summaries,
    "questions": _questions, "retrieval": _retrieval,
}  # fmt: skip
"""Prompts by the name of their set."""
