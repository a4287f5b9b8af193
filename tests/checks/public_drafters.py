"""Counts how many public drafters would run as published, and says what is in the way of the
others.

    python -m tests.checks.public_drafters                     # one GPU of 192 GB
    python -m tests.checks.public_drafters --gpus 2 --gpu-memory 141
    python -m tests.checks.public_drafters --layout Laguna     # one layout
    python -m tests.checks.public_drafters --write             # the table in docs/drafters.md

Every refusal is printed with its reason.

`tests/drafters/public_drafters.json` holds every row of `public_targets.json` as its publisher
writes it: the content of config.json, name and shape of every tensor, and the form of the file.
`quoted` says of a row what of it is quoted from a public file: its config, keys that decide
("keys"), or its tensors. All else is rebuilt from the code that trained and exported it, and
numbers that nobody states are those of their kind. Each is read twice. With its own numbers
config.json has to fit its target; and scaled down, with random weights in a folder, it has to load.
Layers for multi-token prediction, which lie in their targets' files, are read from a tiny target of
the same type (`tests/helpers/tiny_predictions.py`). `compared` says of a layout with whose code
drafts are compared, step for step: in tests (`tests/drafters/published` and, of Gemma's assistants,
`tests/drafters/mtp`), or by hand and when. Nothing is fetched, and no published weights were read.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.fit import fit_of
from drafters.load import load_drafter
from specdec.attention.mla import MlaSpec
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.errors import SpecDecError
from tests.checks import public_predictions, public_targets
from tests.drafters.tiny import FakeVerifier, tiny_target

DATA = Path(__file__).parents[1] / "drafters" / "public_drafters.json"
PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"

SYMBOLS = {
    "H": "hidden_size", "I": "intermediate_size", "N": "num_attention_heads",
    "K": "num_key_value_heads", "D": "head_dim",
    "V": "vocab_size", "W": "draft_vocab_size", "C": "conv_kernel_size", "g": "conv_group_size",
    "r": "selector_rank", "R": "markov_rank", "G": "gru_hidden_dim", "E": "emb_dim",
    "q": "q_lora_rank", "c": "kv_lora_rank", "n": "qk_nope_head_dim", "p": "qk_rope_head_dim",
    "v": "v_head_dim", "d": "global_head_dim", "k": "num_global_key_value_heads",
    "x": "xpress_rank", "m": "xpress_mlp_hidden", "B": "block_size",
}  # fmt: skip
"""Letters of the shapes, and the keys that give them; X is the width of the taps together."""

TAPS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")

TINY = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 16,
    "vocab_size": 112, "draft_vocab_size": 96, "selector_rank": 12, "markov_rank": 20,
    "gru_hidden_dim": 28, "emb_dim": 36, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "global_head_dim": 16,
    "xpress_rank": 12, "xpress_mlp_hidden": 24,
    "target_hidden_size": 48, "mask_token_id": 111, "dspark_noise_token_id": 111, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""What sizes become."""


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter as published.

    Attributes:
        checkpoint, target, family, layout: see the data file.
        target_layers: decoder layers of the target.
        vocab_size: of the target, where the config does not say.
        model: the tiny model of a target's kind, whose own files have the drafter; None for all
            others.
        config: content of config.json; empty where the publisher has another file.
        shapes: shape and type of every tensor, in letters, with `*` for each draft layer and `+`
            for each tap.
        files: beside config.json and the weights.
        weights: the form of the weights' file.
        quoted: what is quoted from a public file, see above.
        compared: whose code drafts are compared with, by where that is: "tests", or by hand on a
            day.
    """

    checkpoint: str
    target: str
    family: str
    layout: str
    target_layers: int
    config: dict[str, Any]
    shapes: dict[str, str]
    files: tuple[str, ...] = ()
    vocab_size: int | None = None
    model: str | None = None
    weights: str = "model.safetensors"
    quoted: tuple[str, ...] = ()
    compared: Mapping[str, str] = field(default_factory=dict)


@cache
def rows() -> tuple[Row, ...]:
    """All of them."""
    data = json.loads(DATA.read_text())
    found = []
    for entry in data["drafters"]:
        layout = data["layouts"].get(entry["layout"], {"tensors": [], "config": {}})
        shapes: dict[str, str] = {}
        for name in entry.get("tensors", layout["tensors"]):
            shapes |= data["tensors"][name]
        config = _merged(layout["config"], entry.get("config", {}))
        about = {
            key: entry.get(key)
            for key in ("checkpoint", "target", "family", "layout", "vocab_size", "model")
        }
        about |= {
            "weights": entry.get("weights", "model.safetensors"),
            "compared": layout.get("compared", {}),
        }
        about |= {key: tuple(entry.get(key, ())) for key in ("files", "quoted")}
        found.append(
            Row(**about, target_layers=entry.get("target_layers", 0), config=config, shapes=shapes)
        )
    return tuple(found)


def refusal(row: Row) -> str | None:
    """Why a row does not load; None when it does."""
    if row.family == "MTP":
        return public_predictions.refusal(row.target, row.model)
    sizes = _flat(row.config)
    target = SimpleNamespace(
        name=row.target,
        hidden_size=sizes.get("target_hidden_size") or sizes.get("hidden_size"),
        num_layers=row.target_layers,
        vocab_size=row.vocab_size or sizes.get("vocab_size"),
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            if problems := fit_of(row.config, target).problems if row.config else ():
                return problems[0]
            small = shrunk(row.config)
            write(Path(folder), small, row)
            load_drafter(folder, verifier=tiny_verifier(row, small))
        except SpecDecError as error:
            return str(error).removeprefix(f"drafter {folder!r}: ").replace(folder, "...")
    return None


def write(folder: Path, config: Mapping[str, Any], row: Row) -> None:
    """A checkpoint of `config` with random weights."""
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    for name in row.files:
        torch.save(torch.randn(TINY["hidden_size"]), folder / name)
    weights, path = tensors(config, row.shapes), folder / row.weights
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)


def tensors(config: Mapping[str, Any], shapes: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors of the sizes in `config`."""
    sizes = _flat(config)
    taps = next((sizes[key] for key in TAPS if sizes.get(key)), [0, 1, 2])
    numbers = {
        letter: sizes[key] for letter, key in SYMBOLS.items() if isinstance(sizes.get(key), int)
    }
    if "H" in numbers:
        numbers.setdefault("D", numbers["H"] // numbers.get("N", 1))
        numbers["X"] = len(taps) * sizes.get("target_hidden_size", numbers["H"])
    found = {}
    for name, text in shapes.items():
        words = text.split()
        kind = getattr(torch, words[-1], torch.bfloat16)
        shape = [_number(word, numbers) for word in words if not hasattr(torch, word)]
        repeats = (
            len(taps) if "+" in name else sizes.get("num_hidden_layers", 1) if "*" in name else 1
        )
        for i in range(repeats):
            found[re.sub(r"[*+]", str(i), name)] = _random(shape, kind)
    return found


def shrunk(
    config: Mapping[str, Any], *, heads: tuple[int | None, int | None] = (None, None)
) -> dict[str, Any]:
    """The same config with sizes that take no time."""
    heads = (
        config.get("num_attention_heads", heads[0]),
        config.get("num_key_value_heads", heads[1]),
    )
    small = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            small[key] = shrunk(value, heads=heads)
        elif key == "num_key_value_heads":
            small[key] = (
                TINY["num_attention_heads"]
                if heads[0] == heads[1]
                else TINY["num_attention_heads"] // 2
            )
        elif key in TINY and value is not None:
            small[key] = min(value, TINY[key])
    if (
        config.get("draft_vocab_size") == _flat(config).get("vocab_size")
        and "draft_vocab_size" in config
    ):
        small["draft_vocab_size"] = TINY["vocab_size"]
    return small


def _number(text: str, numbers: Mapping[str, int]) -> int:
    """The value of a sum of products and quotients of letters and numbers.

    >>> _number("2*C*H/g", {"C": 2, "H": 48, "g": 16}), _number("H+R", {"H": 48, "R": 20})
    (12, 68)
    """
    total = 0
    for term in text.split("+"):
        parts = [("*", term)] if term.isalnum() else re.findall(r"([*/]?)(\w+)", term)
        value = 1
        for sign, part in parts:
            number = int(part) if part.isdigit() else numbers[part]
            value = value // number if sign == "/" else value * number
        total += value
    return total


def _random(shape: Sequence[int], kind: torch.dtype) -> Tensor:
    if kind == torch.bool:  # which tokens a reduced vocabulary keeps, the first ones
        return torch.arange(prod(shape)) < TINY["draft_vocab_size"]
    if kind in (torch.int64, torch.uint8):
        return torch.zeros(shape, dtype=kind)
    return torch.rand(shape).to(kind)


def tiny_verifier(row: Row, config: Mapping[str, Any]) -> FakeVerifier:
    """What the scaled drafter has to fit: one layer that says it were as many as the target's."""
    sizes = _flat(config)
    width = sizes.get("target_hidden_size") or sizes.get("hidden_size", TINY["hidden_size"])
    vocabulary = row.vocab_size or sizes.get("vocab_size", TINY["vocab_size"])
    verifier = FakeVerifier(
        tiny_target(hidden_size=width, vocab_size=vocabulary, num_hidden_layers=1)
    )
    verifier.name, verifier.num_layers = row.target, row.target_layers
    if "latent" in row.layout:  # such drafters take the target's kind of attention
        shape = {
            key: sizes[key]
            for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        spec = MlaSpec(
            verifier.device,
            verifier.dtype,
            num_heads=sizes["num_attention_heads"],
            **shape,
            block_size=4,
        )
        verifier.attention = TorchRefMlaBackend(spec)  # type: ignore[assignment]
    return verifier


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys at one level; those of inner objects win."""
    flat = {key: value for key, value in config.items() if value is not None}
    for value in config.values():
        if isinstance(value, Mapping):
            flat |= _flat(value)
    return flat


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], changes[key])
        for key in base
        if _are_objects(base[key], changes.get(key))
    }
    return {**base, **changes, **both}


def _are_objects(*values: object) -> bool:
    return all(isinstance(value, Mapping) for value in values)


Found = Sequence[tuple[Row, str | None]]
"""Rows, and what is in the way of each head."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a row."""

    config_quoted: bool
    keys_quoted: bool
    tensors_quoted: bool
    target_accepted: bool
    tokenizer_readable: bool
    head_loads: bool
    fits: bool
    compared: bool
    in_tests: bool

    @property
    def runs(self) -> bool:
        """Whether nothing is in the way."""
        return self.target_accepted and self.tokenizer_readable and self.head_loads and self.fits


def verdict(row: Row, reason: str | None, *, gpus: int, gpu_bytes: int) -> Verdict:
    """What is known of a row on so many GPUs."""
    needs = public_targets.target_needs(row.target, gpu_bytes, gpus)
    return Verdict(
        config_quoted="config" in row.quoted,
        keys_quoted="keys" in row.quoted,
        tensors_quoted="tensors" in row.quoted,
        target_accepted=not any(
            not one.startswith(public_targets.TOO_LARGE) for one in needs.missing
        ),
        tokenizer_readable="tokenizer" not in public_targets.data()["targets"][row.target],
        head_loads=reason is None,
        fits=bool(needs.weights)
        and not any(one.startswith(public_targets.TOO_LARGE) for one in needs.missing),
        compared=bool(row.compared),
        in_tests="tests" in row.compared,
    )


def counts(found: Found, *, gpus: int, gpu_bytes: int) -> dict[str, dict[str, int]]:
    """How many rows of each family are so."""
    sums: dict[str, dict[str, int]] = {}
    for row, reason in found:
        known = verdict(row, reason, gpus=gpus, gpu_bytes=gpu_bytes)
        lines = {
            field.name.replace("_", " "): getattr(known, field.name) for field in fields(known)
        }
        lines |= {
            "all of the four": known.runs,
            "and compared": known.runs and known.compared,
            "and in tests": known.runs and known.in_tests,
        }
        family = sums.setdefault(row.family, {"rows": 0})
        family["rows"] += 1
        for name, holds in lines.items():
            family[name] = family.get(name, 0) + holds
    return sums


def table(found: Found) -> str:
    """Counts by family and layout, in Markdown."""
    lines = [
        "| family | layout | heads load | quoted in part | drafts compared with |",
        "|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(row.family for row, _ in found):
        lines.append(f"| **{family}** | | **{_count(found, family=family)}** | | |")
        for layout in dict.fromkeys(row.layout for row, _ in found if row.family == family):
            own = [row for row, _ in found if (row.family, row.layout) == (family, layout)]
            quoted = sum(bool(row.quoted) for row in own) or ""
            loads = _count(found, family=family, layout=layout)
            lines.append(f"| | {layout} | {loads} | {quoted} | {_comparison(own[0])} |")
    return "\n".join(lines)


def _comparison(row: Row) -> str:
    return "; ".join(
        code if where == "tests" else f"{code} ({where})" for where, code in row.compared.items()
    )


def _count(found: Found, **about: str) -> str:
    reasons = [
        reason
        for row, reason in found
        if all(getattr(row, name) == value for name, value in about.items())
    ]
    return f"{reasons.count(None)} of {len(reasons)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the counts and every refusal; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", metavar="NAME", help="one layout alone")
    parser.add_argument("--gpus", type=int, default=1, help="of one machine (default %(default)s)")
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=192,
        metavar="GB",
        help="of one GPU (default %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="put the counts into docs/drafters.md")
    args = parser.parse_args(argv)
    found = [(row, refusal(row)) for row in rows() if args.layout in (None, row.layout)]
    sums = counts(found, gpus=args.gpus, gpu_bytes=int(args.gpu_memory * 1e9))
    print(
        f"{args.gpus} x {args.gpu_memory:g} GB".ljust(22)
        + "".join(f"{family:>9}" for family in sums)
    )
    for line in next(iter(sums.values())):
        print(f"{line:<22}" + "".join(f"{family[line]:>9}" for family in sums.values()))
    print("\nby layout")
    for layout in dict.fromkeys(row.layout for row, _ in found):
        print(f"  {_count(found, layout=layout):>8}  {layout}")
    print("\nrefused")
    refused = Counter((row.layout, reason) for row, reason in found if reason)
    for (layout, reason), count in refused.most_common():
        print(f"  {count:>2}  {layout}: {reason}")
    if args.write:
        PAGE.write_text(
            re.sub(
                r"\| family \| layout(.*\n\|)*.*", lambda _: table(found), PAGE.read_text(), count=1
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
