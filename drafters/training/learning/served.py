"""Requests that a server has kept, as training takes them, and drafters that learn from them."""

from array import array
from pathlib import Path
from typing import Any

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.shipped import located
from drafters.training.data.dataset import Answer
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.files import parse_object, reason_of
from specdec.base.registry import parts_of
from specdec.base.validation import is_number

LEAST_HELDOUT = 16
"""Conversations below which a difference of tau is not told from chance."""
_SHARE = 4  # one of so many conversations is held out, at most


def trainable(name: str) -> str:
    """The checkpoint among the drafters of `name`, see `specdec.base.registry.parts_of`, whose
    weights the trainer can go on with.

    Raises:
        InvalidInputError: there is none.
    """
    why = ""
    for part in parts_of(name):
        try:
            shape, tensors = read_checkpoint(located(part))
        except SpecDecError as error:
            why = str(error)
            continue
        if not (why := shape.untrainable(tensors)):
            return located(part)
    what = f"drafter {name!r} cannot learn from requests ({why})"
    raise InvalidInputError(f"{what}; serve a DFlash drafter, or leave out --learn-device")


def read_served(
    folder: Path, most: int | None = None, *, max_length: int | None = None
) -> list[Answer]:
    """The requests that a folder of JSON lines holds, the oldest first and the same ones once.

    Args:
        folder: that a server may be writing to: half a line at a file's end is left out.
        most: of the newest ones.
        max_length: tokens of prompt and output; longer ones are left out.

    Raises:
        InvalidInputError: there is no such folder, or a line is malformed.
    """
    if not folder.is_dir():
        what = f"{str(folder)!r} is no folder"
        raise InvalidInputError(f"{what}; name that of specdec serve --learn-from-requests")
    found: dict[object, Answer] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InvalidInputError(f"cannot read {str(path)!r}: {reason_of(error)}") from error
        lines = content.decode("utf-8", "replace").split("\n")[:-1]
        for number, line in enumerate(lines, start=1):
            answer = _answer(parse_object(line, f"{path}:{number}"), f"{path}:{number}")
            key = tuple(answer.prompt_ids), tuple(answer.answer_ids)
            found.pop(key, None)  # it counts as new as it is
            found[key] = answer
    answers = [
        one
        for one in found.values()
        if max_length is None or len(one.prompt_ids) + len(one.answer_ids) <= max_length
    ]
    return answers if most is None else answers[-most:]


def split(answers: list[Answer], heldout: int) -> tuple[list[Answer], list[Answer]]:
    """Requests to train on, and the newest ones, which are held out.

    Raises:
        InvalidInputError: they are too few.
    """
    count = min(heldout, len(answers) // _SHARE)
    if count < LEAST_HELDOUT:
        raise InvalidInputError(
            f"{len(answers)} requests that fit --max-length, of which {heldout} may be held out,"
            f" are too few to tell whether a drafter is better; it takes {LEAST_HELDOUT * _SHARE}"
            f" and --heldout {LEAST_HELDOUT}"
        )
    return answers[:-count], answers[-count:]


def _answer(row: dict[str, Any], place: str) -> Answer:
    try:
        prompt, answer = (array("i", row[name]) for name in ("prompt_ids", "answer_ids"))
        temperature, seed = row["temperature"], row["seed"]
        if not (is_number(temperature) and isinstance(seed, int)):
            raise TypeError("temperature and seed are no numbers")
        if min(*prompt, *answer) < 0:
            raise ValueError("a token is negative")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{place} is no request that was kept: {error!r}") from error
    return Answer(prompt, answer, temperature=float(temperature), seed=seed)
