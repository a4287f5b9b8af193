"""Prompts as a user gives them: arguments, files, a pipe."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.base.chat.messages import readable
from specdec.base.errors import InvalidInputError
from specdec.base.files import parse_object, read_lines, reason_of
from specdec.cli.line_fields import parted, unpacked

Messages = list[dict[str, Any]]

JSON_FIELDS = ("prompt", "messages", "question")
"""Where a line of a .jsonl file may hold its prompt; it holds exactly one of them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as given.

    Attributes:
        source: what error messages call it, such as "prompt 2" or "questions.jsonl:7".
        content: text, or chat messages with `role` and `content`.
        asked: what its line says of sampling.
        carried: other fields of its line, which its answer has as well.
    """

    source: str
    content: str | Messages
    asked: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its text, or its last message, on one line."""
        text = self.content if isinstance(self.content, str) else self.content[-1]["content"]
        return " ".join(text.split())


def read_prompts(texts: Sequence[str], file: str | None) -> list[Prompt]:
    """The prompts of the command line, where "-" stands for standard input, then those of `file`.

    Without either, standard input is the one prompt.

    Raises:
        InvalidInputError: there is no prompt, an argument is empty, or a file cannot be read or
            understood.
    """
    prompts = [
        _read_stdin() if text == "-" else _prompt(f"prompt {number}", text)
        for number, text in enumerate(texts, start=1)
    ]
    if file is None and not prompts:
        if sys.stdin.isatty():
            raise InvalidInputError(
                "no prompt given; write one in quotes, name a file with --file, or pipe text in"
            )
        prompts = [_read_stdin()]
    for prompt in prompts:
        if not prompt.label:
            raise InvalidInputError(f"{prompt.source} is empty; give it some text")
    return prompts if file is None else prompts + _read_file(Path(file))


def model_inputs(
    prompts: Sequence[Prompt], tokenizer: Any, *, raw: bool, system: str | None
) -> list[Any]:
    """What the decoder is given: chat messages if the tokenizer has a chat template and `raw` is
    off, else text.

    Raises:
        InvalidInputError: messages or a system message without a chat template, or two system
            messages for one prompt.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        return [_as_chat(prompt, system) for prompt in prompts]
    reason = (
        "--raw turns it off; drop --raw"
        if raw
        else "the tokenizer of this model has none; give plain text"
    )
    if system is not None:
        raise InvalidInputError(f"--system needs a chat template, but {reason}")
    texts: list[str | Messages] = []
    for prompt in prompts:
        if not isinstance(prompt.content, str):
            raise InvalidInputError(
                f"{prompt.source} holds chat messages, which need a chat template, but {reason}"
            )
        texts.append(prompt.content)
    return texts


def _as_chat(prompt: Prompt, system: str | None) -> Messages:
    messages = (
        [{"role": "user", "content": prompt.content}]
        if isinstance(prompt.content, str)
        else prompt.content
    )
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise InvalidInputError(f"{prompt.source} has a system message of its own; drop --system")
    return [{"role": "system", "content": system}, *messages]


def _read_stdin() -> Prompt:
    try:
        return _prompt("standard input", sys.stdin.read().rstrip("\n"))
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"standard input is not UTF-8 text (byte {error.start}); convert it"
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"cannot read standard input: {reason_of(error)}; pipe text in, or name a file"
        ) from error


def _prompt(source: str, text: str) -> Prompt:
    """Text of the outside world: what Python could not decode in the user's locale is read as
    UTF-8.
    """
    try:
        return Prompt(source, text.encode(errors="surrogateescape").decode())
    except UnicodeError as error:
        place = getattr(error, "start", 0)
        raise InvalidInputError(f"{source} is not UTF-8 text (byte {place}); convert it") from error


def _read_file(path: Path) -> list[Prompt]:
    lines = read_lines(
        path, what="prompt", way_out="--file takes a text file with one prompt per line"
    )
    as_json = path.suffix.lower() == ".jsonl"
    return [
        _parse(line, source) if as_json else Prompt(source, line.strip()) for source, line in lines
    ]


def _parse(line: str, source: str) -> Prompt:
    record = unpacked(parse_object(line, source))
    given = [name for name in JSON_FIELDS if name in record]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise InvalidInputError(
            f"{source} must have exactly one of the fields {', '.join(JSON_FIELDS)}, but has"
            f" {found}"
        )
    content = record.pop(given[0])
    if given[0] == "messages":
        if not isinstance(content, list) or not content:
            raise InvalidInputError(
                f"{source}: messages must be a list of at least one object with a role and a"
                f" content"
            )
        try:
            content = readable(content)
        except InvalidInputError as error:
            raise InvalidInputError(f"{source}: {error}") from error
    elif not isinstance(content, str):
        raise InvalidInputError(
            f"{source}: {given[0]} is a JSON {type(content).__name__}; it must be a string"
        )
    return Prompt(source, content, *parted(record))
