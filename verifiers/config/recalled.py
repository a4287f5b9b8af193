"""What transformers' classes make of a target's config, kept in the user's cache: the next start of
the same target reads it. To import those classes takes longer than the rest of a start.

Only a target that our own layers have run is kept, and nothing of one that was refused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from specdec.base.errors import SpecDecError
from specdec.base.files import cache_folder, parse_json
from specdec.base.writing import make_folder, remove, write_text
from verifiers.config.wrappers import (
    ClassFacts,
    class_facts,
    media_token_ids,
    read_config,
    shapes_of,
    text_config,
    text_only,
    without_reports,
)
from verifiers.entries import PlainConfig, declared, own_entries

MOST = 64
"""Files that are kept; the oldest ones make room."""

_SMALL = frozenset({".jinja", ".json", ".model", ".tiktoken", ".txt"})
"""Files that say something of a tokenizer."""

_MISSING = object()


def place_of(name: str, folder: Path, entries: Mapping[str, Any]) -> Path | None:
    """The file for what is known of a target; None where there is no place for it.

    Args:
        name: as the user gave it, which transformers looks at for some tokenizers.
        folder: with its small files, whose sizes and times are part of the file's name.
        entries: of its config.json.
    """
    with suppress(SpecDecError, OSError):
        small = sorted(path for path in folder.iterdir() if path.suffix in _SMALL)
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in small]
        state = [_of_code(), transformers_version, name, entries, stats]
        digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
        return cache_folder() / "configs" / f"{digest}.json"
    return None


@cache
def _of_code() -> list[tuple[int, int]]:
    """Changes with the code that finds what is kept: sizes and times of this package's files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files)]


def recall(place: Path | None, folder: Path) -> PlainConfig | None:
    """What `keep` wrote there of the target in a folder; None where there is none, or another."""
    if place is None:
        return None
    try:
        kept = parse_json(place.read_bytes(), strict=False)
        shapes = {name: torch.Size(shape) for name, shape in kept["shapes"].items()}
        media = {int(number): words for number, words in kept["media"].items()}
        about = {"undeclared": frozenset(kept["undeclared"]), "unkept": kept["unkept"]}
        config = PlainConfig(**kept["entries"], **about)
        if layers := kept["layers"]:
            of_layers = (kept["entries"] | own | about for own in layers)
            config.per_layer_config = [PlainConfig(**own) for own in of_layers]
        config.shapes, config.of_class = shapes, ClassFacts(*kept["of_class"])
        config.text_only, config.media = kept["text_only"], media
        config.tokenizer = kept["tokenizer"]
        config.read = lambda: text_config(read_config(str(folder)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return config


def keep(place: Path | None, whole: Any, tokenizer: Any) -> None:
    """Writes what is known of a target. Nothing is said where it cannot be: the next start takes
    longer, that is all.

    Args:
        place: see `place_of`.
        whole: its config, of the composite if it is one.
        tokenizer: that its files made.
    """
    if place is None:
        return
    config = text_config(whole)
    with without_reports():
        entries, unkept = _entries(config)
    kind, own = type(tokenizer), entries.keys() & vars(config)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast)  # which reads tokenizer.json alone
    layers = [own_entries(config, layer) for layer in range(config.num_hidden_layers)]
    differ = getattr(config, "per_layer_attributes", None)
    kept = {
        "entries": entries,
        "layers": differ and [{name: getattr(own, name) for name in differ} for own in layers],
        "unkept": unkept,
        "undeclared": sorted(name for name in own if declared(config, name, _MISSING) is _MISSING),
        "shapes": {name: list(shape) for name, shape in shapes_of(config).items()},
        "of_class": class_facts(config),
        "text_only": text_only(whole),
        "media": media_token_ids(whole),
        "tokenizer": [kind.__module__, kind.__qualname__] if plain else None,
    }
    with suppress(SpecDecError, OSError):
        make_folder(place.parent)
        write_text(place, json.dumps(kept))
        files = sorted(place.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MOST]:
            remove(file)


def _entries(config: Any) -> tuple[dict[str, Any], list[str]]:
    """What can be read off a config and written as JSON, and names of what cannot."""
    kept, unkept = {}, []
    for name in sorted(_names(config)):
        try:
            value = getattr(config, name)
        except Exception:  # of whatever kind: a property that this config has nothing for
            continue
        if callable(value):
            continue
        value = _plain(name, value)
        try:
            written = json.dumps(value)
        except (TypeError, ValueError):
            unkept.append(name)
            continue
        if json.loads(written) == _lists(value):
            kept[name] = value
        else:
            unkept.append(name)
    return kept, unkept


def _plain(name: str, value: Any) -> Any:
    """An entry without types that JSON lacks and that readers of configs do without."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, set | frozenset):
        return sorted(value)
    quantization = name == "quantization_config" and hasattr(value, "to_dict")
    return value.to_dict() if quantization else value


def _names(config: Any) -> Iterator[str]:
    """Names by which something can be read off a config, those of transformers' own left out."""
    names = {*vars(config), *dir(type(config)), *(getattr(config, "attribute_map", None) or ())}
    return (name for name in names if not name.startswith("_"))


def _lists(value: Any) -> Any:
    """A value with lists in the place of tuples, as JSON has them."""
    if isinstance(value, tuple | list):
        return [_lists(one) for one in value]
    return {key: _lists(one) for key, one in value.items()} if isinstance(value, dict) else value
