"""Prompt sets: public ones by hub name or file, and some of the package's or Python's own."""

import hashlib
import json
import logging
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evals.manual_prompts import MANUAL_KINDS
from specdec.base.errors import InvalidInputError, one_line
from specdec.base.files import read_jsonl
from specdec.base.packages import install_command

logger = logging.getLogger(__name__)

BUNDLED = "bundled"
BUNDLED_FILE = Path(__file__).parent / "data" / "problems.json"

MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
"""Categories of MT-Bench."""

_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How turns of SPEED-Bench begin that its own program has yet to fetch."""

_ASKED = ("turns", "messages", "prompt", "question", "problem")
"""Fields of rows of a user's own set, of which the first that a row has is asked."""
_READ = frozenset(("answer", "category", "id", "question_id", "task_id"))
"""What is read beside it."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation.

    Attributes:
        item_id: unique within the set.
        turns: what the user says; later turns follow the target's own answers.
        answer: the expected final answer where the set has one.
        category: as the row has it; None where it has none.
    """

    item_id: str
    turns: tuple[str, ...]
    answer: str | None = None
    category: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Conversations under a name.

    Attributes:
        name: how reports call it.
        source: hub dataset or file.
        items: in the order of the source.
    """

    name: str
    source: str
    items: tuple[Item, ...]

    @property
    def num_turns(self) -> int:
        """Turns of the longest conversation."""
        return max(len(item.turns) for item in self.items)

    @property
    def sha256(self) -> str:
        """Hash of every turn in order; two reports with the same hash asked the same."""
        return hashlib.sha256(json.dumps([item.turns for item in self.items]).encode()).hexdigest()

    @property
    def tasks(self) -> list[str | None]:
        """The task that tables report each item under: its category. Beside tasks of other
        kinds the eight of MT-Bench are one, as Spec-Bench reports them.

        >>> rows = [Item(str(i), ("?",), category=name) for i, name in enumerate(sorted(MT_BENCH))]
        >>> PromptSet("a", "a file", tuple(rows)).tasks[:2]
        ['coding', 'extraction']
        >>> PromptSet("a", "a file", (*rows, Item("8", ("?",), category="rag"))).tasks[-2:]
        ['mt-bench', 'rag']
        """
        merged = {item.category for item in self.items} > MT_BENCH
        kinds = (item.category for item in self.items)
        return ["mt-bench" if merged and one in MT_BENCH else one for one in kinds]

    def asked(self, turn: int) -> list[int]:
        """Numbers of the items that have a turn."""
        return [index for index, item in enumerate(self.items) if turn < len(item.turns)]

    def answered(self, *, raw: bool = False) -> list[int]:
        """Numbers of the items of a pass's answers, see `evals.runner.Pass`."""
        turns = range(1 if raw else self.num_turns)
        return [index for turn in turns for index in self.asked(turn)]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a public set lives on the hub, and how a row becomes turns."""

    hub: str
    config: str | None
    split: str
    turns: Callable[[Row], Sequence[str]]


def _mbpp(row: Row) -> Sequence[str]:
    task, tests = row["text"] if "text" in row else row["prompt"], _list(row, "test_list")
    return [f"{task}\nYour code has to pass these tests:\n" + "\n".join(map(str, tests))]


def _mt_bench(row: Row) -> Sequence[str]:
    return _list(row, "turns" if "turns" in row else "prompt")


def _list(row: Row, field: str) -> list[str]:
    """A list of texts; a text would pass for a list of its characters."""
    if not isinstance(row[field], list):
        raise TypeError(f"a list of {field}")
    return list(row[field])


def _math500(row: Row) -> Sequence[str]:
    return [f"{row['problem']}\nReason step by step and give the final answer in \\boxed{{}}."]


def _humaneval(row: Row) -> Sequence[str]:
    asked = "Complete this Python function; answer with the whole function."
    return [f"{asked}\n\n```python\n{row['prompt']}```"]


_SOURCES = {
    "gsm8k": _Source("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "math500": _Source("HuggingFaceH4/MATH-500", None, "test", _math500),
    "humaneval": _Source("openai/openai_humaneval", None, "test", _humaneval),
    "mbpp": _Source("google-research-datasets/mbpp", "full", "test", _mbpp),
    "mt-bench": _Source("HuggingFaceH4/mt_bench_prompts", None, "train", _mt_bench),
}
"""Rows of a local file have the fields of the hub's dataset; for mt-bench, `turns` or `prompt`."""

SET_NAMES = (BUNDLED, *_SOURCES, *MANUAL_KINDS)


def load_prompt_set(
    name: str,
    *,
    files: Mapping[str, str] | None = None,
    limit: int | None = None,
    per_category: int | None = None,
) -> PromptSet:
    """Loads one set.

    Args:
        name: one of `SET_NAMES`, or any name that `files` has.
        files: local JSONL file by name of the set. Rows of a user's own set have `turns` (a list),
            `messages`, `prompt`, `question` or `problem`, and perhaps `answer` and `category`.

    Raises:
        InvalidInputError: an unknown name (the message has near ones), a missing or malformed file,
            a hub that cannot be reached, or a limit outside the set.
    """
    files = files or {}
    if name not in files and name not in SET_NAMES:
        near = get_close_matches(name, SET_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInputError(
            f"unknown prompt set {name!r}{hint} (known: {', '.join(SET_NAMES)}; others with --data"
            f" NAME=FILE)"
        )
    if name in files:
        source, rows = files[name], read_jsonl(Path(files[name]))
    elif name == BUNDLED:
        source, rows = "bundled", [(row["id"], row) for row in read_bundled()["problems"]]
    elif name in MANUAL_KINDS:
        source = f"the manual of Python {platform.python_version()}"
        made = enumerate(MANUAL_KINDS[name](), start=1)
        rows = [(f"{name} {number}", {"prompt": prompt}) for number, prompt in made]
    else:
        source, rows = _SOURCES[name].hub, _hub_rows(name, _SOURCES[name])
    if limit is not None and not 1 <= limit <= len(rows):
        what = f"limit is {limit} and prompt set {name!r} has {len(rows)} rows"
        raise InvalidInputError(f"{what}; choose 1 to {len(rows)}")
    items = [_item(name, place, row) for place, row in rows[:limit]]
    if name in files and name not in _SOURCES:
        every = (_unread(row) for _, row in rows[:limit])
        if unread := ", ".join(sorted(frozenset().union(*every))):
            logger.warning("%s: these fields are not read: %s", source, unread)
    if per_category is not None:
        if per_category < 1:
            raise InvalidInputError(f"per_category is {per_category}; it must be 1 or more rows")
        if all(item.category is None for item in items):
            what = f"prompt set {name!r} has no categories to take {per_category} rows of each from"
            raise InvalidInputError(f"{what}; bound it with --limit")
        seen: Counter[str | None] = Counter()
        kept = []
        for item in items:
            seen[item.category] += 1
            if seen[item.category] <= per_category:
                kept.append(item)
        items = kept
    return PromptSet(name, source, tuple(items))


def parse_data(pairs: Sequence[str], names: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=FILE` options as a table.

    Args:
        names: what is asked for with `option`; others need no file.

    Raises:
        InvalidInputError: not of that form, or a name that is not asked for, or comes twice.

    >>> parse_data(["gsm8k=data/test.jsonl"], ["gsm8k"], "--sets")
    {'gsm8k': 'data/test.jsonl'}
    """
    files: dict[str, str] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            what = f"--data is {pair!r}"
            raise InvalidInputError(f"{what}; write it as NAME=FILE, such as gsm8k=test.jsonl")
        if name not in names:
            what = f"--data names {name!r}, which is not among {option} {' '.join(names)}"
            raise InvalidInputError(f"{what}; add it there")
        if name in files:
            what = f"--data names {name!r} twice, {files[name]!r} and {file!r}"
            raise InvalidInputError(f"{what}; give one of them another name, or leave it out")
        files[name] = file
    return files


def read_bundled() -> dict[str, list[Row]]:
    """The package's own problems: `problems` to ask, and worked `examples` for few-shot prompts."""
    content: dict[str, list[Row]] = json.loads(BUNDLED_FILE.read_text(encoding="utf-8"))
    return content


def _item(name: str, place: str, row: Row) -> Item:
    try:
        turns = tuple(_SOURCES[name].turns(row) if name in _SOURCES else _own_turns(row))
    except (KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{place} does not look like a row of {name!r}: it lacks {error.args[0]} (it has"
            f" {', '.join(row)})"
        ) from error
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        what = f"{place} has an empty turn or one that is not a string"
        raise InvalidInputError(f"{what}; give every turn some text")
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        what = f"{place} holds a placeholder in place of its text"
        way_out = "have SPEED-Bench's own prepare.py fetch it, and name the file that this writes"
        raise InvalidInputError(f"{what}; {way_out}")
    category = row.get("category")
    if category is not None and not (isinstance(category, str) and category.strip()):
        what = f"{place} has category {category!r}"
        raise InvalidInputError(f"{what}; give it some text, or leave it out")
    name = str(row.get("id", row.get("question_id", row.get("task_id", place))))
    return Item(name, turns, _answer(row), category)


def _own_turns(row: Row) -> Sequence[str]:
    field = _asked(row)
    if field is None:
        raise KeyError(f"{', '.join(_ASKED[:-1])} or {_ASKED[-1]}")
    if field == "turns":
        return _list(row, field)
    return _user_turns(row[field]) if field == "messages" else [row[field]]


def _asked(row: Row) -> str | None:
    """The field whose content is asked; null is none."""
    return next((field for field in _ASKED if row.get(field) is not None), None)


def _unread(row: Row) -> frozenset[str]:
    """Fields with a content that is left aside."""
    stated = (field for field in row if row[field] not in _NOTHING)
    return frozenset(stated) - _READ - {_asked(row)}


def _user_turns(messages: Any) -> list[str]:
    """What the user says, where nobody else says anything.

    >>> _user_turns([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    ['one', 'two']
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise TypeError("a list of messages")
    if others := sorted({str(one["role"]) for one in messages} - {"user"}):
        what = f"messages have a turn of {others[0]!r}"
        way_out = "leave it out, for the target answers every turn of the user itself"
        raise InvalidInputError(f"{what}; {way_out}")
    return [one["content"] for one in messages]


def _answer(row: Row) -> str | None:
    """The last line of a worked solution, or the whole answer.

    >>> _answer({"answer": "3 + 4 = 7\\n#### 7"}), _answer({"answer": "12"}), _answer({})
    ('7', '12', None)
    """
    answer = row.get("answer")
    return answer.rpartition("####")[2].strip() if isinstance(answer, str) else None


def _hub_rows(name: str, source: _Source) -> list[tuple[str, Row]]:
    way_out = f"name a local copy with --data {name}=FILE"
    if find_spec("datasets") is None:
        raise InvalidInputError(
            f"prompt set {name!r} is read from the hub by the package datasets, which is not"
            f" installed; run: {install_command('eval')}; or {way_out}"
        )
    try:
        rows = import_module("datasets").load_dataset(source.hub, source.config, split=source.split)
    except Exception as error:  # the library raises dozens of types; to the user all mean the same
        what = f"cannot get {source.hub!r} from the hub: {one_line(error)}"
        raise InvalidInputError(f"{what}; {way_out}") from error
    return [(f"{source.hub} row {number}", row) for number, row in enumerate(rows)]
