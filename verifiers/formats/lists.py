"""Lists of modules in a quantization config: names, parts of names, patterns and expressions."""

import re
from collections.abc import Iterable
from fnmatch import translate

from verifiers.formats.settings import SettingError

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What the names of a decoder's modules begin with, in a checkpoint of several parts and in one of
its own.
"""


def aliases(module: str) -> list[str]:
    """A module's names with every prefix, its own first: a config may keep the prefix that a file
    lacks, and the reverse.

    >>> aliases("language_model.model.norm")
    ['language_model.model.norm', 'norm', 'model.language_model.norm', 'model.norm']
    """
    for prefix in PREFIXES:
        if module.startswith(prefix):
            bare = module.removeprefix(prefix)
            return list(dict.fromkeys([module, bare, *(other + bare for other in PREFIXES)]))
    bare = "lm_head" if module == "language_model.lm_head" else module
    return list(dict.fromkeys([module, bare, f"language_model.{bare}"]))


class Listed:
    """Modules that a list names.

    >>> listed = Listed(["mlp.gate", "model.layers.1.self_attn*", "re:.*head"])
    >>> [f"model.layers.{name}" in listed for name in ("0.mlp.gate", "1.self_attn.q_proj")]
    [True, True]
    >>> "lm_head" in listed, "mlp.gate_proj" in listed
    (True, False)

    Args:
        entries: names or whole parts of them, patterns with stars, or after "re:" expressions for
            their beginning.

    Raises:
        SettingError: an entry that is no expression.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._names = set[str]()
        self._expressions = list[re.Pattern[str]]()
        for entry in entries:
            if entry.startswith("re:"):
                self._expressions.append(expression(entry[3:]))
            elif "*" in entry:
                self._expressions.append(re.compile(translate(entry)))
            else:
                self._names.add(entry.strip("."))

    def __contains__(self, module: str) -> bool:
        return any(map(self._has, aliases(module)))

    def _has(self, name: str) -> bool:
        parts = name.split(".")
        ends = range(1, len(parts) + 1) if self._names else ()
        if any(".".join(parts[start:end]) in self._names for end in ends for start in range(end)):
            return True
        return any(expression.match(name) for expression in self._expressions)


def expression(text: str) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        SettingError: it is none.
    """
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingError(
            f"quantization_config names modules by {text[:60]!r}, which is no expression ({error});"
            f" fetch config.json again"
        ) from error
