"""Reads calls of tools out of the text of an output while it arrives."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple

from specdec.base.chat.tools import ToolFormat
from specdec.grammar.schema.arguments import Argument, arguments_of
from specdec.session.text import overlap

_BODY, _CALLED = "<|message|>", re.compile(r"to=functions\.([\w.-]+)")
_ID = string.ascii_letters + string.digits


class Piece(NamedTuple):
    """What came: text of answer or thinking, a call's function, or more of its arguments (JSON).

    Attributes:
        call_id: of a name, the id of its call.
    """

    kind: Literal["text", "reasoning", "name", "arguments"]
    text: str
    call_id: str = ""


class CallReader:
    """Reads one output. What it finds does not depend on the pieces in which the text comes.

    A call that is cut in the midst of its arguments is given as far as it came.

    Args:
        functions: by name the JSON schemas of their arguments, None where they have none.

    Attributes:
        within: the text has ended in the midst of arguments, as far as these are told apart.
    """

    within = False

    def __init__(self, form: ToolFormat, functions: Mapping[str, Any]) -> None:
        self._form, self._functions = form, functions
        self._rest = ""  # that is not read yet
        self._ended = False  # nothing more comes
        self._said = False  # there was text
        self._found: list[Piece] = []
        self._reading = self._read()

    def push(self, text: str, *, end: bool = False) -> list[Piece]:
        """What more text brings; at the `end` all that was held back."""
        self._rest, self._ended = self._rest + text, end
        next(self._reading, None)
        found, self._found = self._found, []
        return found

    def _read(self) -> Generator[None]:
        """Reads what there is, and goes on with the next piece at every `yield`."""
        form = self._form
        if form.channels:
            yield from self._messages()
        yield from self._text()
        while (name := (yield from self._call(form.opening))) is None and not self._ended:
            self._said = True  # a word that only looks like a call
            self._add("text", self._taken(len(form.trigger)))
            yield from self._text()
        while name is not None:
            if (call_id := (yield from self._id(name))) is None:
                return
            self._found.append(Piece("name", name, call_id))
            self.within = True
            yield from self._object() if form.argument is None else self._arguments(name)
            self.within = False
            yield from self._literal(form.end)
            name = yield from self._call(form.between)
        yield from self._literal(form.closing)
        while True:
            self._add("text", self._taken(len(self._rest)))
            yield

    def _add(self, kind: Literal["text", "reasoning", "arguments"], text: str) -> None:
        if text:
            self._found.append(Piece(kind, text))

    def _taken(self, count: int) -> str:
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece

    def _text(self) -> Generator[None]:
        """Up to the first call. Blanks before it are no text by themselves."""
        trigger = self._form.trigger
        while (at := self._rest.find(trigger)) < 0:
            if self._said or self._ended or self._rest.strip():
                held = 0 if self._ended else overlap(self._rest, trigger)
                self._said = self._said or len(self._rest) > held
                self._add("text", self._taken(len(self._rest) - held))
            yield
        before = self._taken(at)
        self._add("text", before if self._said or before.strip() else "")

    def _messages(self) -> Generator[None]:
        """An output that is messages: their channels say what they are."""
        form, mark = self._form, self._form.closing + self._form.opening
        while True:
            while (at := self._rest.find(_BODY)) < 0:
                yield
            head = self._taken(at + len(_BODY))
            called = _CALLED.search(head)
            if called is not None:
                self._found.append(Piece("name", called[1], new_call_id()))
                self.within = True
                yield from self._object()
                self.within = False
                continue
            kind: Literal["text", "reasoning"] = "text"
            if "<|channel|>analysis" in head:
                kind = "reasoning"
            while (at := self._rest.find(mark)) < 0 or "<|channel|>final" in head:
                held = overlap(self._rest, mark)
                if "<|channel|>final" in head or (self._ended and held < len(form.closing)):
                    held = 0  # the last message, or characters that look like an end
                self._add(kind, self._taken(len(self._rest) - held))
                yield
            self._add(kind, self._taken(at + len(form.closing))[:at])

    def _call(self, lead: str) -> Generator[None, None, str | None]:
        """The name of a function that is called behind `lead`, if one is."""
        while True:
            begins = self._begins(lead)
            more = (one for one in begins if len(one) > len(self._rest))
            if not any(one.startswith(self._rest) for one in more):
                break
            if self._ended:
                self._rest = ""  # the beginning of one
                return None
            yield
        found = max((one for one in begins if self._rest.startswith(one)), key=len, default="")
        self._taken(len(found))
        return begins.get(found)

    def _begins(self, lead: str) -> dict[str, str]:
        """What begins a call of each function, up to an id behind its name; with one before it as
        far as that came.
        """
        begin, found, behind = self._form.begin.partition("{id}")
        if found and "{name}" in behind:
            number = re.match(self._form.id_form, self._rest[len(lead + begin) :])
            begin += (number[0] if number else "") + behind
        return {lead + begin.replace("{name}", name): name for name in self._functions}

    def _id(self, name: str) -> Generator[None, None, str | None]:
        """The id of a call, which the model may have written behind its name; None where that is
        cut.
        """
        _, found, behind = self._form.begin.partition("{id}")
        if not found or "{name}" in behind:
            return new_call_id()
        while (at := self._rest.find(behind)) < 0:
            if self._ended:
                return None
            yield
        number = self._taken(at + len(behind))[:at]
        return self._form.call_id.replace("{name}", name).replace("{id}", number)

    def _literal(self, text: str) -> Generator[None]:
        """What has to follow, or its beginning at the end."""
        while len(self._rest) < len(text) and text.startswith(self._rest) and not self._ended:
            yield
        if text.startswith(self._rest) or self._rest.startswith(text):
            self._taken(len(text))

    def _object(self) -> Generator[None]:
        """Arguments that are a JSON object."""
        depth, quoted, escaped = 0, False, False
        while True:
            for at, sign in enumerate(self._rest):
                if quoted:
                    quoted = escaped or sign != '"'
                    escaped = not escaped and sign == "\\"
                elif sign == '"':
                    quoted = True
                elif sign in "{[":
                    depth += 1
                elif sign in "}]":
                    depth -= 1
                    if depth == 0:
                        self._add("arguments", self._taken(at + 1))
                        return
            self._add("arguments", self._taken(len(self._rest)))
            yield

    def _arguments(self, function: str) -> Generator[None]:
        """Arguments that are written one by one."""
        assert self._form.argument is not None
        first, last = self._form.argument
        before, behind = first.split("{key}")
        behind, says, end = behind.partition("{text}")
        known = {one.name: one for one in arguments_of(self._functions[function]) or ()}
        start = "{"
        while not self._rest.startswith(self._form.end):
            at = self._rest.find(behind, len(before)) if self._rest.startswith(before) else -1
            stop = self._rest.find(end, at + len(behind)) if at >= 0 else -1
            if stop < 0:
                yield
                continue
            said = self._taken(stop + len(end))
            name = said[len(before) : at]
            self._add("arguments", f"{start}{_json(name)}: ")
            start = ", "
            argument = known.get(name, Argument(name, {}, False, {}))
            is_text = said[at + len(behind) : stop] == "true" if says else argument.is_text
            yield from self._value(argument, last, is_text)
        self._add("arguments", "}" if start == ", " else "{}")

    def _value(self, argument: Argument, last: str, is_text: bool) -> Generator[None]:
        """A value: a text as it comes, and whatever else once it is there."""
        quote = '"' if is_text else ""
        self._add("arguments", quote)
        while (at := self._rest.find(last)) < 0:
            if quote:
                some = self._taken(len(self._rest) - overlap(self._rest, last))
                self._add("arguments", _json(some)[1:-1])
            yield
        value = self._taken(at + len(last))[:at]
        self._add("arguments", _json(value)[1:] if quote else argument.as_json(value))


def new_call_id() -> str:
    """The id of a call: nine letters and digits, as Mistral's templates want them of every id."""
    return "".join(secrets.choice(_ID) for _ in range(9))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
