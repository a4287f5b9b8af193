"""Lists of modules in a quantization config: names, parts of names, patterns and expressions."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What the names of a decoder's modules begin with, in a checkpoint of several parts and in one of its own."""


def aliases(module: str) -> list[str]:
    """A module's names with every prefix, its own first: a config may keep the prefix that a file lacks, and the reverse.

    >>> aliases("language_model.model.norm")
    ['language_model.model.norm', 'norm', 'model.language_model.norm', 'model.norm']
    """
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")
    bare = module.removeprefix("language_model.") if module == "language_model.lm_head" else module.removeprefix(prefix)
    names = [module, bare, *(other + bare for other in PREFIXES)] if prefix else [module, bare, f"language_model.{bare}"]
    return list(dict.fromkeys(names))


def matches(module: str, entries: Sequence[str], match: Callable[[str, str], bool]) -> bool:
    """Whether an entry matches the module under any of its names."""
    return bool(entries) and any(match(name, entry) for name in aliases(module) for entry in entries)


def part_of_name(name: str, entry: str) -> bool:
    """Whether the entry is the name or whole parts of it.

    >>> part_of_name("model.layers.0.mlp.gate", "mlp.gate"), part_of_name("model.layers.0.mlp.gate_proj", "mlp.gate")
    (True, False)
    """
    return f".{entry.strip('.')}." in f".{name}."


def name_or_expression(name: str, entry: str) -> bool:
    """Whether the entry is the name, or after "re:" an expression that its beginning satisfies.

    >>> name_or_expression("lm_head", "re:.*head"), name_or_expression("lm_head", "head")
    (True, False)
    """
    return bool(re.match(entry[3:], name)) if entry.startswith("re:") else name == entry


def pattern(name: str, entry: str) -> bool:
    """Whether the name, or that of a module around it, satisfies a pattern with stars.

    >>> pattern("model.layers.0.mlp.gate", "*.mlp.gate"), pattern("model.layers.0.mlp.gate", "model.layers.0*")
    (True, True)
    """
    return fnmatch(name, entry) or name.startswith(f"{entry}.")
