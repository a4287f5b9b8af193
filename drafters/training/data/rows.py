"""Training data as people have it: rows of files and data sets, and what is said in them."""

import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from specdec.base.errors import InvalidInputError, one_line
from specdec.base.files import (
    JSON_LINES,
    check_prompt_lines,
    parse_json,
    parse_object,
    read_lines,
    reason_of,
    user_path,
)
from specdec.base.packages import install_command
from specdec.session.provenance import sha256_of

logger = logging.getLogger(__name__)

HUB = "hub:"
"""Begins the name of a data set: hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT."""
CHATS = ("messages", "conversations", "conversation")
PLAIN = ("question", "prompt", "turns", "instruction")
"""Where a row may hold what is asked; a chat wins over the others, of which there may be one."""
SYSTEM = ("system", "system_prompt")
"""Where a row may hold what the system says."""
GIVEN = ("input", "context")
"""Where a row may hold what a question or an instruction is about."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Where a message may hold what came before its content."""
CALLS = ("tool_calls", "function_call")
REASONS = ("finish_reason", "stop_reason", "done_reason")
"""Where a row or a message may hold why its answer ended."""

_READ = frozenset(
    (*CHATS, *PLAIN, *SYSTEM, *GIVEN, *THOUGHTS, *CALLS, *REASONS, "output", "answer")
)
_READ |= {"role", "from", "content", "value", "input_ids", "loss_mask", "prompt_ids", "answer_ids"}

_WAY_OUT = "give a text file with one prompt per line, JSON lines, a JSON array, or parquet"
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "developer": "system",
}  # fmt: skip
_TEST_SPLIT = re.compile(r"(^|[^a-z])(test|validation|heldout|eval)([^a-z]|$)", re.IGNORECASE)

Row = dict[str, Any]
Messages = tuple[tuple[str, str], ...]
"""Roles and texts."""


def read_rows(name: str) -> Iterator[tuple[str, Row]]:
    """Rows with their places: of a text file with a prompt per line, JSON lines, a JSON array,
    parquet, or a data set of the hub. At the end a line tells which fields mean nothing here.

    Raises:
        InvalidInputError: nothing can be read there, or it is a test split by its name.
    """
    unread = set[str]()
    for place, row in _rows(name):
        for part in (row, *chat_messages(row)):
            stated = (field for field, value in part.items() if value not in (None, "", [], {}))
            unread.update(map(str, stated))
        yield place, row
    if unread := unread - _READ:
        logger.warning("%s: these fields are not read: %s", name, ", ".join(sorted(unread)))


def _rows(name: str) -> Iterator[tuple[str, Row]]:
    path = user_path(name)
    for part in name.split(":")[1:] if name.startswith(HUB) else [path.stem]:
        if _TEST_SPLIT.search(part.rpartition("/")[2]):
            spoiled = "training on it would spoil every figure"
            raise InvalidInputError(f"{name!r} is an evaluation split by its name; {spoiled}")
    if name.startswith(HUB) or path.suffix == ".parquet":
        yield from ((f"{name}:{place}", row) for place, row in enumerate(data_set(name), start=1))
        return
    lines = read_lines(path, what="prompt", way_out=_WAY_OUT)
    if path.suffix.lower() not in (*JSON_LINES, ".json"):
        check_prompt_lines(path, _WAY_OUT)
        yield from ((place, {"prompt": line}) for place, line in lines)
    elif lines[0][1].lstrip().startswith("["):
        yield from _array(name, "\n".join(line for _, line in lines))
    else:
        yield from ((place, parse_object(line, place)) for place, line in lines)


def fingerprint(name: str) -> str:
    """Changes with the content of a file or a data set.

    Raises:
        InvalidInputError: there is no such file, or no such data set.
    """
    if name.startswith(HUB):
        return str(data_set(name)._fingerprint)
    path = user_path(name)
    try:
        return sha256_of(path)
    except OSError as error:
        what = f"cannot read {str(path)!r}: {reason_of(error)}"
        raise InvalidInputError(f"{what}; {_WAY_OUT}") from error


@cache
def data_set(name: str) -> Any:
    """What the package datasets reads under a name.

    Raises:
        InvalidInputError: the package is missing, or the data set.
    """
    if find_spec("datasets") is None:
        way_out = f"run: {install_command('train')}"
        what = f"{name!r} needs the package datasets, which is not installed"
        raise InvalidInputError(f"{what}; {way_out}")
    load = import_module("datasets").load_dataset
    path, *where = name.removeprefix(HUB).split(":")
    try:
        if not name.startswith(HUB):
            return load("parquet", data_files=str(user_path(name)), split="train")
        return load(path, *where[:-1], split=where[-1] if where else "train")
    except Exception as error:  # the library raises dozens of types
        way_out = "name a split as hub:NAME:SPLIT, or a local file"
        raise InvalidInputError(f"cannot read {name!r}: {one_line(error)}; {way_out}") from error


def conversation(row: Row, place: str) -> Messages:
    """What is said in a row, from the first system's or user's message on and up to one that calls
    tools; of a row without a chat, what is asked. Empty where no user says anything.

    Raises:
        InvalidInputError: the row holds nothing of this kind, or something malformed.
    """
    given = [name for name in CHATS if name in row][:1] or [name for name in PLAIN if name in row]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        names = ", ".join((*PLAIN, *CHATS))
        what = f"{place} must have exactly one of the fields {names}, but has {found}"
        raise InvalidInputError(what)
    content = row[given[0]]
    for name in GIVEN if given[0] in ("instruction", "question") else ():
        if isinstance(text := row.get(name), str) and text:
            content = f"{content}\n\n{text}"
    messages = _messages(content, given[0] in CHATS)
    if messages is None or (given[0] in PLAIN and not messages):
        what = f"{place}: {given[0]} is no text, list of turns or chat of roles and texts"
        raise InvalidInputError(what)
    if given[0] == "instruction" and isinstance(output := row.get("output"), str) and output:
        messages += (("assistant", output),)
    roles = [role for role, _ in messages]
    start = next((i for i, role in enumerate(roles) if role in ("system", "user")), 0)
    told = [text for name in SYSTEM if isinstance(text := row.get(name), str) and text.strip()]
    system = tuple(("system", text) for text in told if "system" not in roles)
    return (*system, *messages[start:]) if "user" in roles else ()


def goes_on(row: Row, place: str) -> list[bool]:
    """For each message of `conversation` whether it says that its end is not the model's, such as
    one at a limit of tokens. What the row itself says is of its last message.
    """
    chats = [name for name in CHATS if isinstance(row.get(name), list)]
    chat = {
        name: [{**one, "content": _reason(one)} if isinstance(one, dict) else one for one in said]
        for name, said in ((name, row[name]) for name in chats)
    }
    reasons = [text if chat else "" for _, text in conversation(row | chat, place)]
    reasons[-1:] = [reasons[-1] or _reason(row)]
    return [reason not in ("", "stop", "end_turn", "eos", "eos_token") for reason in reasons]


def _reason(said: Row) -> str:
    """Why an answer ended; empty where nothing is said."""
    return next((text for name in REASONS if isinstance(text := said.get(name), str)), "").lower()


def chat_messages(row: Row) -> list[Mapping[str, Any]]:
    """The messages of a row's chat as they stand there; none where it has no such chat."""
    content = next((row[name] for name in CHATS if name in row), None)
    listed = content if isinstance(content, list) else []
    return [message for message in listed if isinstance(message, Mapping)]


def _messages(content: Any, chat: bool) -> Messages | None:
    """Messages of a text, of a list of a user's turns, or of a chat; None of anything else."""
    if isinstance(content, str):
        content = [content]
    if isinstance(content, dict) and all(isinstance(column, list) for column in content.values()):
        rows = zip(*content.values(), strict=False)
        content = [dict(zip(content, cells, strict=False)) for cells in rows]
    if not isinstance(content, list):
        return None
    found = []
    for message in content:
        role: Any = "user"
        text = message.strip() if isinstance(message, str) else None
        if isinstance(message, dict):
            if any(message.get(name) for name in CALLS):
                break  # which are no text
            role = message.get("role", message.get("from"))
            text = _text(message.get("content", message.get("value")))
        if not isinstance(role, str) or text is None or (not chat and not text):
            return None
        found.append((_ROLES.get(role.lower(), role.lower()), text))
    return tuple(found)


def _text(content: Any) -> str | None:
    """A message's text, whose parts may be listed."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, parts)) if None not in parts else None
    return content if isinstance(content, str) else None


def _array(name: str, text: str) -> Iterator[tuple[str, Row]]:
    try:
        rows = parse_json(text, strict=False)
    except ValueError as error:
        raise InvalidInputError(f"{name!r} is not JSON ({error}); write objects") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            what = f"{name}: item {number} is a JSON {type(row).__name__}"
            raise InvalidInputError(f"{what}; write a list of objects")
        yield f"{name}:{number}", row
