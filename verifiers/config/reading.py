"""The boundary to files of strangers: whatever stands in them, a user reads one line, which names
the entry at fault.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from specdec.base.errors import (
    CheckpointError,
    InvalidInputError,
    SpecDecError,
    UnsupportedModelError,
    one_line,
    shown,
)
from specdec.base.validation import LARGEST
from specdec.layers.rotary.rotary import check_parameters

Read = TypeVar("Read")
Judge = Callable[[dict[str, Any]], object]

NO_FOREIGN_CODE = {"trust_remote_code": False}
"""Said each time, since transformers otherwise asks on standard input whether to run code from a
repository.
"""

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("layers", "layer", "blocks"), (-4096, 4096)),
    **dict.fromkeys(("experts", "labels", "topk"), (-(2**16), 2**16)),
    **dict.fromkeys(("eps", "epsilon"), (0, 1)),
    "length": (-LARGEST, LARGEST),
    "theta": (1e-30, 1e30),
}
"""Ranges of numbers in a config, by the last word of an entry: parts, of each of which Transformers
makes an object or a list's item, choices of each token, what norms add, a tokenizer's longest text,
and bases of RoPE.
"""


_COUNTS = re.compile(
    r"^(num|n)_|(?<!_all)_dim$"
    r"|_(embeddings|experts|groups?|heads|layers|length|rank|size|topk|window)$"
)
"""Entries that are integers, or lists of them; mscale_all_dim is none."""

_AT_LEAST_ONE = re.compile(
    r"(^|_)(heads|n_groups|conv_kernel|kernel_(dim|size)|d_(conv|head|state)|state_size)$"
    r"|^(hidden_size|num_hidden_layers|(linear_\w+_)?head_dim)$"
)
_AT_LEAST_NONE = re.compile(
    r"(hidden|intermediate|vocab)_size$|head_dim$|experts(_per_tok(en)?)?$|n_group$"
    r"|(q|kv)_lora_rank$|^num_(kv_shared|mtp|nextn_predict)_layers$|sparse_step$"
)
"""Entries that count parts of layers, which a model has at least one of, or may lack."""


def read(
    name: str,
    what: str,
    load: Callable[[], Read],
    blame: Callable[[BaseException], str] | None = None,
) -> Read:
    """Calls `load`, turning what a bad path or damaged file raises into one line.

    Args:
        what: is read of it.
        load: reads it.
        blame: says which entry is at fault, with a colon behind it, or nothing; asked where `load`
            fails for no known reason.
    """
    try:
        return load()
    except CheckpointError as error:
        raise CheckpointError(f"cannot read the {what} of target {name!r}: {error}") from error
    except InvalidInputError as error:  # as if a user had given the value
        entry = "" if blame is None else blame(error)
        text = f"cannot read the {what} of target {name!r}: {entry}{error}"
        raise CheckpointError(text) from error
    except SpecDecError:
        raise
    except ImportError as error:  # transformers reads some quantized weights through other packages
        raise CheckpointError(
            f"the {what} of target {name!r} need a package that is not installed:"
            f" {one_line(error, 300)}"
        ) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise  # nothing is wrong with the files
    except Exception as error:  # transformers believes what files say, and ends in any kind
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"the {what} of target {name!r} need code from its repository, which is never run;"
                " use a checkpoint whose architecture transformers has itself"
            ) from error
        entry = "" if blame is None else blame(error)
        message = f"cannot read the {what} of target {name!r}: {entry}{one_line(error, 300)}"
        raise CheckpointError(f"{message}; check the name or folder, or fetch it again") from error


def blamed(entries: Mapping[str, Any], judge: Judge, error: BaseException) -> str:
    """Which entry of a config makes `judge` fail, for `read`: the first without which it does not.

    >>> judge = lambda entries: 1 / entries.get("b", {}).get("c", 1)
    >>> blamed({"a": 1, "b": {"c": 0}}, judge, ZeroDivisionError())
    'b.c is 0, and must be at least 1: '
    """
    if _passes(judge, dict(entries)):
        return ""
    said = str(error)
    for path in sorted(_paths(entries), key=lambda path: str(path[-1]) not in said):
        if _passes(judge, _with(entries, path)):
            value: Any = entries
            for key in path:
                value = value[key]
            limit = ""
            if type(value) is int and value < 1:
                tried = (least for least in (0, 1) if least > value)
                found = (least for least in tried if _passes(judge, _with(entries, path, least)))
                limit = next((f", and must be at least {least}" for least in found), "")
            said = one_line(ValueError(repr(value)), 60)
            return f"{'.'.join(map(str, path))} is {said}{limit}: "
    return ""


def _paths(entries: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of all entries, nested ones before the one that they stand in."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _paths(value))
        if key != "model_type":  # without which nothing fails
            yield (key,)


def _with(
    entries: Mapping[str, Any], path: tuple[str, ...], value: int | None = None
) -> dict[str, Any]:
    """The entries with another value, or without any."""
    first, *rest = path
    if rest:
        return {**entries, first: _with(entries[first], tuple(rest), value)}
    left = {key: one for key, one in entries.items() if key != first}
    return left if value is None else {**left, first: value}


def _passes(judge: Judge, entries: dict[str, Any]) -> bool:
    try:
        judge(entries)
    except InvalidInputError:  # as if a user had given the value
        return False
    except SpecDecError:
        return True  # which says in its own words what is wrong
    except Exception:  # of whatever kind
        return False
    return True


def check_numbers(entries: Mapping[str, Any], *, of_rope: bool = False) -> None:
    """Refuses numbers that no model has, before anything is made of them. Limits may be infinite.

    Args:
        entries: of a config, or of an object in it.
        of_rope: they are parameters of RoPE, or of RoPE for each kind of layers.

    Raises:
        CheckpointError: one is out of range.
    """
    if of_rope:
        check_parameters(entries)
    for key, value in entries.items():
        if isinstance(value, Mapping):
            check_numbers(value, of_rope=of_rope or str(key).startswith("rope_"))
        usual = (-(2**63), 2**63 - 1) if isinstance(value, int) else (-LARGEST, LARGEST)
        least, most = RANGES.get(re.split(r"[_.]", str(key))[-1], usual)
        if isinstance(value, float) and value % 1 and _COUNTS.search(str(key)):  # inf % 1 is NaN
            what = f"{key} is {value!r}"
            raise CheckpointError(f"{what}; it must be an integer, so fetch config.json again")
        fewest = 1 if _AT_LEAST_ONE.search(str(key)) else 0
        if type(value) is int and value < fewest and (fewest or _AT_LEAST_NONE.search(str(key))):
            limits = f"it must be at least {fewest}, so fetch config.json again"
            raise CheckpointError(f"{key} is {shown(value)}; {limits}")
        if isinstance(value, int | float) and not least <= value <= most:  # as NaN never does
            limits = f"it must lie in [{least:,g}, {most:,g}], so fetch config.json again"
            raise CheckpointError(f"{key} is {shown(value)}; {limits}")


def check_sizes(config: Any) -> None:
    """Refuses what no model can have, before anything is allocated for it.

    Raises:
        CheckpointError: a size is out of range.
    """
    for key in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
        value = getattr(config, key, None)
        if value is not None and not (type(value) is int and 1 <= value < 2**31):
            limits = "an integer in [1, 2**31), so fetch config.json again"
            raise CheckpointError(f"{key} is {shown(value)}; it must be {limits}")
