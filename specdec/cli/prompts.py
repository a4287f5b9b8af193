"""Prompts as a user gives them: arguments, files, a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.base.chat.messages import readable
from specdec.base.errors import InvalidInputError
from specdec.base.files import JSON_LINES, check_prompt_lines, parse_object, read_lines, reason_of
from specdec.cli.line_fields import is_request, parted, sampled, served
from specdec.sampling.params import SamplingParams

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
        error: why it cannot be served.
        choice: which of several outputs of the same line.
        request: the `BatchLine` of an OpenAI batch file that it is one output of.
    """

    source: str
    content: str | Messages
    asked: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    choice: int = 0
    request: Any = None

    @property
    def label(self) -> str:
        """The prompt's text, or its last message, on one line."""
        return " ".join(self._texts[-1].split())

    @property
    def is_empty(self) -> bool:
        """Whether there is no text at all; the last message alone may lack it, as of a tool."""
        return not any(text.split() for text in self._texts)

    @property
    def _texts(self) -> list[str]:
        messages = self.content
        return [messages] if isinstance(messages, str) else [one["content"] for one in messages]


def read_prompts(
    texts: Sequence[str], file: str | None, sampling: SamplingParams, model: str
) -> list[Prompt]:
    """The prompts of the command line, where "-" stands for standard input, then those of `file`.

    Without either, standard input is the one prompt. A line that cannot be served has an error.

    Args:
        texts: of the command line.
        sampling: of the command, which lines change.
        model: that requests of a batch file may name.

    Raises:
        InvalidInputError: no prompt, an empty one, an unreadable file, or no line can be served.
    """
    numbered = ((f"prompt {number}", text) for number, text in enumerate(texts, start=1))
    prompts = [_read_stdin() if text == "-" else _prompt(name, text) for name, text in numbered]
    if file is None and not prompts:
        if sys.stdin.isatty():
            raise InvalidInputError(
                "no prompt given; write one in quotes, name a file with --file, or pipe text in"
            )
        prompts = [_read_stdin()]
    for prompt in prompts:
        if prompt.is_empty:
            raise InvalidInputError(f"{prompt.source} is empty; give it some text")
    if file is None:
        return prompts
    read = _read_file(Path(file), sampling, model)
    if prompts and read[0].request is not None:
        raise InvalidInputError(f"{file!r} is a batch file; give no other prompts with it")
    return prompts + read


def model_inputs(
    prompts: Sequence[Prompt], tokenizer: Any, *, raw: bool, system: str | None
) -> list[Any]:
    """What the decoder is given: chat messages if there is a template and `raw` is off, or text.

    Raises:
        InvalidInputError: messages without a chat template, or two system messages for a prompt.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        return [_as_chat(prompt, system) for prompt in prompts]
    reason = "the tokenizer of this model has none; give plain text"
    reason = "--raw turns it off; drop --raw" if raw else reason
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
    messages = prompt.content
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise InvalidInputError(f"{prompt.source} has a system message of its own; drop --system")
    return [{"role": "system", "content": system}, *messages]


def _read_stdin() -> Prompt:
    try:
        return _prompt("standard input", sys.stdin.read().rstrip("\n"))
    except UnicodeDecodeError as error:
        what = f"standard input is not UTF-8 text (byte {error.start})"
        raise InvalidInputError(f"{what}; convert it") from error
    except OSError as error:
        what = f"cannot read standard input: {reason_of(error)}"
        raise InvalidInputError(f"{what}; pipe text in, or name a file") from error


def _prompt(source: str, text: str) -> Prompt:
    """Text of the outside world: what the user's locale could not decode is read as UTF-8."""
    try:
        return Prompt(source, text.encode(errors="surrogateescape").decode())
    except UnicodeError as error:
        place = getattr(error, "start", 0)
        raise InvalidInputError(f"{source} is not UTF-8 text (byte {place}); convert it") from error


def _read_file(path: Path, sampling: SamplingParams, model: str) -> list[Prompt]:
    way_out = "--file takes a text file with one prompt per line, or JSON lines in a .jsonl file"
    lines = read_lines(path, what="prompt", way_out=way_out)
    if path.suffix.lower() not in JSON_LINES:
        check_prompt_lines(path, way_out)
        return [Prompt(source, line.strip()) for source, line in lines]
    records = [(source, *_record(line, source)) for source, line in lines]
    if any(is_request(record) for _, record, _ in records):
        return _requests(records, model)
    read: list[Prompt] = []
    for source, record, error in records:
        prompt = Prompt(source, "", error=error)
        try:
            if record is not None:
                prompt = _parse(record, source)
                sampled(prompt.asked, sampling, source)  # told before a model is loaded
        except InvalidInputError as wrong:
            prompt = Prompt(source, "", error=str(wrong))
        read += _choices(prompt)
    if all(prompt.error for prompt in read):
        raise InvalidInputError(read[0].error or "")
    return [_named(prompt) for prompt in read]


def _record(line: str, source: str) -> tuple[dict[str, Any] | None, str | None]:
    """A line's object, or why it is none."""
    try:
        return dict(parse_object(line, source)), None
    except InvalidInputError as error:
        return None, str(error)


def _named(prompt: Prompt) -> Prompt:
    """The prompt, its error without the source, which the caller names."""
    if prompt.error is None:
        return prompt
    return replace(prompt, error=prompt.error.removeprefix(prompt.source).lstrip(": "))


def _choices(prompt: Prompt) -> list[Prompt]:
    """One for each output that a line asks for."""
    count = prompt.asked.get("n", 1)
    if count == 1:
        return [prompt]
    carried = prompt.carried
    numbered = ((number, {**carried, "choice": number}) for number in range(count))
    return [replace(prompt, choice=n, carried=line) for n, line in numbered]


def _requests(
    records: Sequence[tuple[str, dict[str, Any] | None, str | None]], model: str
) -> list[Prompt]:
    """The outputs of a batch file, those of a line one after another."""
    kind, prompts, names = served("batch line"), list[Prompt](), dict[str, str]()
    for source, record, error in records:
        request = kind.read(record or {}, model)
        name = request.custom_id
        if error is not None or (isinstance(name, str) and name in names):
            line = error or f"{names[name]} has custom_id {name!r}"
            request = kind.wrong(record or {}, model, line)
        elif isinstance(name, str):
            names[name] = source
        why = request.error and request.error.message
        one = Prompt(source, str(name), error=why, request=request)
        prompts += [replace(one, choice=number) for number in range(request.num_outputs)]
    return prompts


def _parse(record: dict[str, Any], source: str) -> Prompt:
    given = [name for name in JSON_FIELDS if name in record]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        what = f"{source} must have exactly one of the fields {', '.join(JSON_FIELDS)}"
        raise InvalidInputError(f"{what}, but has {found}")
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
        what = f"{source}: {given[0]} is a JSON {type(content).__name__}"
        raise InvalidInputError(f"{what}; it must be a string")
    return Prompt(source, content, *parted(record))
