"""Options of the command line and keys of config files, made from the fields of a dataclass.

A field's name, type, default and description stand in its dataclass alone. The description is its
`metadata["help"]`, or the first sentence about it under `Attributes` of the class.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specdec.base.errors import InvalidInputError, shown
from specdec.base.validation import is_number

Group = argparse.ArgumentParser | argparse._ArgumentGroup
Add = Callable[..., argparse.Action]

_FLAGS = {
    "num_draft_tokens": ("-k", "--num-draft-tokens"),
    "memory_bytes": ("--kv-memory",),
    "tree_nodes": ("--tree",),
    "verify_budget": ("--budget",),
}
"""Options of fields that are called otherwise."""

_SIZES = {"memory_bytes", "kv_memory", "learn_limit"}
"""Fields in bytes, which an option or a config file may give as 512M."""

_METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field holds.

    Attributes:
        type: `bool`, `int`, `float` or `str`.
        many: a tuple of these.
        words: strings that it takes beside numbers, such as "auto".
        size: a number of bytes.
    """

    type: type
    many: bool = False
    words: tuple[str, ...] = ()
    size: bool = False

    @property
    def metavar(self) -> str:
        """What help shows in place of the value."""
        word = "TEXT" if self.many and self.type is str else _METAVARS[self.type]
        name = "SIZE" if self.size else word
        return "|".join([name, *self.words]) if self.type is not str else name

    def parse(self, text: str) -> Any:
        """Argument type: one value; its range is checked where the dataclass is made."""
        if text in self.words:
            return text
        if self.size:
            return byte_size(text)
        try:
            return self.type(text)
        except ValueError:
            name = "a whole number" if self.type is int else "a number"
            words = f"neither {name} nor {' or '.join(self.words)}"
            expected = words if self.words else f"not {name}"
            raise argparse.ArgumentTypeError(f"{text!r} is {expected}") from None

    def check(self, value: Any, place: str) -> Any:
        """A value of a config file.

        Raises:
            InvalidInputError: of another type.
        """
        if self.many:
            one = Kind(self.type, words=self.words)
            return tuple(
                one.check(item, place) for item in (value if isinstance(value, list) else [value])
            )
        if self.size and isinstance(value, str):
            try:
                return byte_size(value)
            except argparse.ArgumentTypeError as error:
                raise InvalidInputError(f"{place}: {error}") from error
        if self.type is float and isinstance(value, int) and is_number(value):
            return float(value)
        if value not in self.words and (
            not isinstance(value, self.type) or (self.type is not bool and isinstance(value, bool))
        ):
            raise InvalidInputError(f"{place} is {shown(value)}; it must be a {self.type.__name__}")
        return value


def kinds_of(config: type) -> dict[str, Kind]:
    """What the fields of a dataclass hold; fields that are dataclasses themselves are left out."""
    hints = get_type_hints(config)
    kinds = {field.name: _kind(field.name, hints[field.name]) for field in fields(config)}
    return {name: kind for name, kind in kinds.items() if kind.type in (bool, int, float, str)}


def _kind(name: str, hint: Any) -> Kind:
    if get_origin(hint) is tuple:
        return Kind(get_args(hint)[0], many=True)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    types = [part for part in parts if isinstance(part, type) and part is not NoneType]
    return Kind(types[0], words=words, size=name in _SIZES) if types else Kind(str)


def add_options(
    group: Group,
    config: type,
    names: Iterable[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    several: Collection[str] = (),
    old: Mapping[str, str] | None = None,
    nargs: str | None = None,
) -> None:
    """Adds one option per field.

    Args:
        names: fields; None takes all.
        defaults: for the dataclass's own; `argparse.SUPPRESS` leaves no trace if not given.
        several: fields that take one or more values here.
        old: by field, an earlier name of its option, which still works and which no help shows.
        nargs: of a tuple: "+" takes its values after one option, None one per option.
    """
    kinds, docs = kinds_of(config), _field_docs(config)
    for field in fields(config):
        if field.name not in (kinds if names is None else names):
            continue
        kind, own = kinds[field.name], _default(field)
        default = (defaults or {}).get(field.name, own)
        shown = own if default == argparse.SUPPRESS else default
        options: dict[str, Any] = {"dest": field.name, "default": default}
        if field.name in several and default != argparse.SUPPRESS:
            options["default"] = [default]
        if kind.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind.parse, "metavar": field.metadata.get("metavar", kind.metavar)}
            if field.name in several or (kind.many and nargs):
                options["nargs"] = nargs or "+"
            elif kind.many:
                options |= {"action": "append", "default": []}
        text, none = docs.get(field.name, ("", ""))
        if "help" in field.metadata:
            text, none = field.metadata["help"], ""
        text += ", such as 512M or 2G" if kind.size else ""
        repeated = "; may be repeated" if kind.many else ""
        text += "; may be several" if "nargs" in options else repeated
        if shown is None and own is None and none:
            text += f" (default: {none})"
        elif shown not in ((), "") and shown is not None and shown is not False:
            text += f" (default {_shown(shown)})"
        flags = _FLAGS.get(field.name, ("--" + field.name.replace("_", "-"),))
        group.add_argument(*flags, help=text.replace("%", "%%"), **options)
        if old and field.name in old:
            group.add_argument(
                old[field.name], help=argparse.SUPPRESS, **{**options, "default": argparse.SUPPRESS}
            )


def adding(group: argparse._ActionsContainer) -> tuple[Add, Add, Add]:
    """What adds to a group an option of any kind, one that takes a whole number, and a switch."""
    add = group.add_argument
    return add, partial(add, type=whole_number, metavar="N"), partial(add, action="store_true")


def from_options(
    config: type, args: argparse.Namespace, names: Collection[str] | None = None
) -> dict[str, Any]:
    """The values of those fields, or of those among `names`, that the command has options for."""
    return {
        name: tuple(getattr(args, name)) if kind.many else getattr(args, name)
        for name, kind in kinds_of(config).items()
        if hasattr(args, name) and (names is None or name in names)
    }


def check_read(
    args: argparse.Namespace,
    declare: Callable[[argparse.ArgumentParser], None],
    read: Callable[[str], bool],
    way: str,
) -> None:
    """Whether all options that are not as by default are read by this way to run a command.

    Args:
        declare: declares the options.
        read: by the name of a value.
        way: what the message says behind "--option says nothing".

    Raises:
        InvalidInputError: one is not.
    """
    parser = argparse.ArgumentParser(add_help=False)
    declare(parser)
    for option in parser._actions:
        usual = option.default in (argparse.SUPPRESS, getattr(args, option.dest))
        if option.option_strings and not usual and not read(option.dest):
            raise InvalidInputError(f"{option.option_strings[0]} says nothing {way}")


def whole_number(text: str) -> int:
    """Argument type: an integer; its range is checked where it is used."""
    number: int = Kind(int).parse(text)
    return number


def byte_size(text: str) -> int:
    """Argument type: a size in bytes, in binary units.

    >>> byte_size("1000"), byte_size("512M"), byte_size("1.5GiB")
    (1000, 536870912, 1610612736)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with K, M, G or T as in 512M"
        )
    return int(Decimal(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _shown(value: Any) -> str:
    """A default as a user would type it.

    >>> _shown(0.0), _shown((0.0, 0.7)), _shown(True)
    ('0', '0 0.7', 'on')
    """
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return "on" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _field_docs(config: type) -> dict[str, tuple[str, str]]:
    """The first sentence about every field, and what its None stands for."""
    found: dict[str, str] = {}
    name = ""
    lines = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")[2].splitlines()
    for line in lines:
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, found[match[1]] = match[1], match[2]
        elif line.startswith(" " * 8) and name:
            found[name] += " " + line.strip()
        else:
            name = ""
    return {name: _first_sentence(text) for name, text in found.items()}


def _first_sentence(text: str) -> tuple[str, str]:
    """The first sentence without its marks, and what None takes, means or does by it.

    >>> _first_sentence("most `rows` at once (`memory`); None takes the device's own. More.")
    ('most rows at once', "the device's own")
    """
    sentence = re.split(r"\.(?:\s|$)", text)[0]
    sentence = re.sub(r" \(`[^`]*`\)", "", sentence).replace("`", "")
    described, _, none = sentence.partition("; None ")
    return described, re.sub(r"^(takes|means) ", "", none)
