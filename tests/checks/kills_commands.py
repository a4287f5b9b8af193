"""The commands that are killed: what they are told, and what of their files must never go back."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.drafters.training.toy import as_flags, toy_config
from tests.evals.tiny import save_tiny, write_jsonl

TEXTS = ("text", "token_ids", "finish_reason", "settings", "completion", "response")
"""Fields of records that every run has alike."""

State = dict[str, str]
"""What is finished, by name; a later state holds all of it, unchanged."""


class Damage(Exception):
    """Files that no run may leave behind."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        argv: of a run in a folder.
        finished: what the folder holds by now.
        result: what a whole run leaves there, without times.
        load: asks what is served, in a process of its own; None where nothing is.
        ends: it ends by itself.
    """

    argv: Callable[[Path], list[str]]
    finished: Callable[[Path], State]
    result: Callable[[Path], Any]
    load: Callable[[Path], None] | None = None
    ends: bool = True


def prepare(root: Path) -> None:
    """Models and prompts that all runs read."""
    (root / "tiny").mkdir()
    save_tiny(root / "tiny")
    asked = [{"prompt": f"question {number}"} for number in range(24)]
    write_jsonl(root / "prompts.jsonl", asked)
    write_jsonl(root / "set.jsonl", [{"prompt": f"abcabc {number}"} for number in range(3)])
    toy_config(root / "toy")


def make_places(folder: Path) -> None:
    """A link to write to, and a device node of the folder's own."""
    (folder / "link").symlink_to("real")
    with suppress(PermissionError):
        os.mknod(folder / "null", 0o666 | 0o020000, os.makedev(1, 3))


def check_places(folder: Path) -> None:
    """Raises:
    Damage: the link is none any more, or the node.
    """
    if not (folder / "link").is_symlink():
        raise Damage("the link has become a file")
    if os.geteuid() == 0 and not (folder / "null").is_char_device():
        raise Damage("the device node has become something else")


def journal(path: Path) -> State:
    """Records of a journal; half a line at its end is none yet.

    Raises:
        Damage: a line is broken, or stands there twice.
    """
    found: State = {}
    if not path.exists():
        return found
    for number, text in enumerate(path.read_text().split("\n")[:-1]):
        try:
            entry = json.loads(text)
        except ValueError as error:
            raise Damage(f"line {number + 1} of {path.name} is broken") from error
        key = str(entry.get("key", "the head"))
        if key in found:
            raise Damage(f"{key} stands in {path.name} twice")
        found[key] = json.dumps(entry)
    return found


def _texts(state: State) -> Any:
    """What was answered; how drafts fared depends on what else was decoded, and when."""
    return {key: list(_named(json.loads(value))) for key, value in state.items()}


def _named(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from [one] if name in TEXTS else _named(one)
    elif isinstance(value, list):
        for one in value:
            yield from _named(one)


def _report(path: Path) -> Any:
    """What a report says that no clock has a say in.

    Raises:
        Damage: half of one.
    """
    if not path.exists() or path.is_char_device():
        return None
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise Damage(f"{path.name} is no JSON") from error
    rows = [
        [row[name] for name in ("drafter", "k", "num_answers", "differing_answers")]
        for row in report["rows"]
    ]
    return report["complete"], rows


def _hashes(paths: Sequence[Path]) -> State:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def _shared(root: Path) -> list[str]:
    return [
        "--model", str(root / "tiny"), "--drafter", "ngram", "--device", "cpu", "--dtype",
        "float32", "--kv-memory", "2M",
    ]  # fmt: skip


def _journals(folder: Path) -> State:
    found: State = {}
    for path in sorted(folder.glob("eval/*.jsonl")):
        found |= {f"{path.name} {key}": value for key, value in journal(path).items()}
    return found


def _bench_seen(folder: Path) -> State:
    _report(folder / "real")
    return {}


def _ask(folder: Path) -> None:
    """Asks a server for text, whole and as streams, and for grammars of its own."""
    told, found, number = folder / "stderr", None, 0
    while found is None:
        found = re.search(r" at http://([\d.]+):(\d+)", told.read_text() if told.exists() else "")
        time.sleep(0.02)
    while True:
        number += 1
        body = {"prompt": "abc", "max_tokens": 30, "stream": number % 2 == 0}
        if number % 3 == 0:
            body["guided_regex"] = f"[a-z]{{3,{3 + number}}}x"
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=30)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            connection.getresponse().read()


def commands(root: Path) -> dict[str, Command]:
    """All of them by name."""
    shared = _shared(root)
    generate = ["generate", *shared, "--file", str(root / "prompts.jsonl"), "--raw", "--json"]
    generate += ["--max-tokens", "24", "--max-num-seqs", "2", "--out", "link"]
    bench = ["bench", *shared, "--sets", "tiny", "--data", f"tiny={root / 'set.jsonl'}", "-k", "2"]
    bench += ["--max-tokens", "8", "--repeats", "1", "--raw", "--out", "link"]
    evaluate = [
        "eval", *shared, "--tasks", "bundled", "--limit", "3", "--max-tokens", "12", "--out",
        "eval",
    ]  # fmt: skip

    def train(folder: Path) -> list[str]:
        changes = {
            "out": "run", "max_steps": 30, "max_tokens": 16, "heldout": 4, "max_prompts": 60,
            "shard_size": 20,
        }  # fmt: skip
        return ["train", *as_flags(toy_config(root / "toy", **changes, save_every=0.01))]

    def trained(folder: Path) -> Any:
        return _hashes(list(folder.glob("run/drafter/*.safetensors")))

    return {
        "generate": Command(
            lambda folder: generate,
            lambda folder: journal(folder / "real"),
            lambda folder: _texts(journal(folder / "real")),
        ),
        "eval": Command(
            lambda folder: evaluate, _journals, lambda folder: _texts(_journals(folder))
        ),
        "bench": Command(
            lambda folder: bench, _bench_seen, lambda folder: _report(folder / "real")
        ),
        "train": Command(
            train, lambda folder: _hashes(list(folder.glob("run/answers/*.jsonl"))), trained
        ),
        "serve": Command(
            lambda folder: ["serve", *shared, "--port", "0", "--drain-seconds", "1"],
            lambda folder: {},
            lambda folder: None,
            _ask,
            ends=False,
        ),
        "two ranks": Command(
            lambda folder: [*generate, "--tensor-parallel", "2"],
            lambda folder: journal(folder / "real"),
            lambda folder: _texts(journal(folder / "real")),
        ),
    }
