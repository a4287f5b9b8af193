"""`specdec convert`: writes a drafter's checkpoint in another public layout."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.base.files import user_path
from specdec.base.writing import write_atomically
from specdec.cli.options import revision_option

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.dflash.config.config import DFlashConfig

LAYOUTS = ("z-lab", "speculators", "sglang")

_EPILOG = """\
example:
  specdec convert RedHatAI/Qwen3-8B-speculator.dflash qwen3-8b-dflash --to z-lab \\
      --model Qwen/Qwen3-8B

Every layout that can be loaded can be read. DFlash and its relatives are written in the layouts of
z-lab and speculators, EAGLE-3 in those of sglang and speculators. A layout that has no words for
what a drafter does is refused. Tables that a head makes of its target's are written whole, for
which the target is loaded. The card with the license goes along.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec convert`."""
    parser.usage = "%(prog)s SOURCE FOLDER --to LAYOUT [--model NAME]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a drafter: smollm2-dflash, its folder, or its name on the hub",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="what to make; it must not exist yet, or be empty"
    )
    layouts = f"one of {', '.join(LAYOUTS)}"
    parser.add_argument("--to", required=True, choices=LAYOUTS, metavar="LAYOUT", help=layouts)
    parser.add_argument(
        "--model", metavar="NAME", help="the target, where the source does not say enough of it"
    )
    revision_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `specdec convert`; 0 when the folder is written.

    Raises:
        SpecDecError: the source cannot be read, or the layout or the folder not be written.
    """
    note = convert(args.source, args.folder, args.to, target=args.model)
    print(f"written to {args.folder} in the layout of {args.to}")
    if note:
        print(note)
    return 0


def convert(
    source: str | Path, folder: str | Path, layout: str, *, target: str | None = None
) -> str | None:
    """Writes the drafter in `source` to `folder` in another layout.

    Args:
        source: smollm2-dflash, a folder, or a name on the hub.
        folder: to make.
        layout: one of `LAYOUTS`.
        target: name of the target, from whose config.json come its name and layers where the source
            does not say them, and from whose weights tied tables; None is the source's own.

    Returns:
        What is to be said of who can read it, and of its license; None for nothing.

    Raises:
        SpecDecError: see `run`; or no such layout, or no such target.
    """
    from drafters.checkpoint import CONFIG, called, find_folder, naming, read_json
    from drafters.dflash.config.heads import ALGORITHMS
    from drafters.license import CARD, license_note
    from drafters.load import algorithm_in
    from drafters.shipped import located

    if layout not in LAYOUTS:
        raise InvalidInputError(f"unknown layout {layout!r} (known: {', '.join(LAYOUTS)})")
    found, made = find_folder(located(str(source))), user_path(folder)
    note = None
    with naming(source):
        raw = read_json(found / CONFIG)
        algorithm = algorithm_in(found, raw)
    with called(found, source):
        if algorithm in ALGORITHMS:
            note = _convert_dflash(found, made, layout, target)
        elif algorithm in ("eagle3", "peagle"):
            _convert_eagle3(found, made, layout, target)
        else:
            what = f"drafters of algorithm {algorithm!r} are not converted"
            raise CheckpointError(f"{what}; DFlash's and EAGLE-3's are")
    if (found / CARD).is_file():
        write_atomically(made / CARD, partial(shutil.copyfile, found / CARD))
    return "\n".join(filter(None, [note, license_note(found / CARD, raw)])) or None


def _convert_dflash(source: Path, folder: Path, layout: str, target: str | None) -> str | None:
    from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
    from drafters.dflash.config.config_json import misreading
    from drafters.dflash.config.layout import Layout

    if layout == "sglang":
        raise CheckpointError("SGLang reads DFlash drafters in z-lab's layout; use --to z-lab")
    config, tensors = read_checkpoint(source)
    if config.tied_tables:
        config, tensors = _untied(config, tensors, target or config.verifier_name)
    elif target is not None:
        config = _with_target(config, target)
    words: Layout = "z-lab" if layout == "z-lab" else "speculators"
    write_checkpoint(folder, config, tensors, layout=words)
    return misreading(config, words)


def _convert_eagle3(source: Path, folder: Path, layout: str, target: str | None) -> None:
    from drafters.eagle3.checkpoint import read_checkpoint
    from drafters.eagle3.layout import write_checkpoint

    if layout == "z-lab":
        what = "z-lab's layout has no words for EAGLE-3"
        raise CheckpointError(f"{what}; use --to sglang or --to speculators")
    config, tensors = read_checkpoint(source)
    num_target_layers = None if target is None else _target(target)[1]
    write_checkpoint(
        folder,
        config,
        tensors,
        "sglang" if layout == "sglang" else "speculators",
        num_target_layers,
    )


def _untied(
    config: DFlashConfig, tensors: dict[str, Tensor], name: str | None
) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """The same drafter with whole tables, which others can read, made of the target's."""
    import torch

    from drafters.dflash.drafter import check_fit
    from drafters.dflash.tied import expanded
    from specdec.base.registry import VERIFIERS, resolve

    if name is None:
        what = "the head's tables are made of the target's, and the drafter names none"
        raise CheckpointError(f"{what}; name it with --model")
    dtype = next(iter(tensors.values())).dtype
    verifier, _ = resolve(VERIFIERS, "hf", "verifier")(
        name, device=torch.device("cpu"), dtype=dtype, generation_config=None
    )
    check_fit(config, verifier, borrows=True)
    return replace(config, tied_tables=False), expanded(tensors, verifier)


def _with_target(config: DFlashConfig, name: str) -> DFlashConfig:
    """The config with what the source does not say of its target."""
    architectures, layers = _target(name)
    stated = config.num_target_layers
    if stated not in (None, layers):
        what = f"the drafter was made for {stated} target layers, and {name!r} has {layers}"
        raise CheckpointError(f"{what}; name its own target")
    return replace(
        config,
        num_target_layers=layers,
        verifier_name=config.verifier_name or name,
        verifier_architectures=config.verifier_architectures or architectures,
    )


def _target(name: str) -> tuple[tuple[str, ...], int]:
    """Architectures of the target of that name, and the number of its layers."""
    from drafters.keys import Keys, section
    from specdec.base.checkpoint.hub import json_file

    raw: dict[str, Any] = json_file(name, "config.json", what="target") or {}
    layers = Keys([section(raw, "text_config"), raw]).integer("num_hidden_layers")
    if layers is None or layers < 1:
        what = f"config.json of {name!r} does not say how many layers it has"
        raise CheckpointError(f"{what}; name the drafter's own target")
    names = raw.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else (), layers
