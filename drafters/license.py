"""The license of a checkpoint, said where it restricts use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from specdec.base.errors import one_line

CARD = "README.md"

_FREE = {
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0",
    "ecl-2.0", "epl-1.0", "epl-2.0", "eupl-1.1", "eupl-1.2", "gpl", "gpl-2.0", "gpl-3.0", "isc",
    "lgpl", "lgpl-2.1", "lgpl-3.0", "mit", "mpl-2.0", "ms-pl", "ncsa", "openmdw-1.0", "osl-3.0",
    "pddl", "postgresql", "unlicense", "wtfpl", "zlib",
}  # fmt: skip
"""Names on the hub of licenses that leave everyone to run a model for any purpose."""

_FORBIDDEN = {"nc": "commercial use", "noncommercial": "commercial use", "nd": "changed copies"}


def license_note(card: Path | None, config: Mapping[str, Any]) -> str | None:
    """What to say of a checkpoint's license; None where it leaves everyone free, or unstated.

    Args:
        card: the checkpoint's `README.md`, whose head names the license; or None.
        config: content of its config.json, which some publishers write the license to.
    """
    stated = _card_entries(card) | {
        key: config[key] for key in ("license", "license_name") if config.get(key)
    }
    names = stated.get("license") or []
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name.lower() not in _FREE:
            own = stated.get("license_name")
            return _note(
                one_line(ValueError(own if name == "other" and isinstance(own, str) else name), 100)
            )
    return None


def _note(name: str) -> str:
    parts = name.lower().replace("_", "-").split("-")
    forbidden = dict.fromkeys(what for part, what in _FORBIDDEN.items() if part in parts)
    terms = f"it forbids {' and '.join(forbidden)}" if forbidden else "read its terms"
    return f"its license is {name}: {terms}"


def _card_entries(card: Path | None) -> dict[str, Any]:
    """The entries at the head of a model card; a damaged one says nothing."""
    if card is None or not card.is_file():
        return {}
    try:
        entries = metadata_load(card)
        return dict(entries) if isinstance(entries, Mapping) else {}
    except Exception:  # whatever stands there, a card is no reason to refuse a drafter
        return {}
