"""Public drafters at small sizes with random weights, and what we draft with them."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.dflash.drafter import BoundDFlash
from drafters.load import load_drafter
from tests.checks.public_drafters import TAPS, TINY, Row, rows, shrunk, tensors, tiny_verifier
from tests.drafters.tiny import FakeVerifier, Rig
from tests.helpers.bounds import Float64, assert_as_exact

COMPARED = {
    "dflash": ("z-lab", "z-lab, Qwen3.5 on", "z-lab DFlash 2", "JetSpec", "DeepSpec DFlash"),
    "dflash, and heads of speculators": ("DeepSpec DSpark", "SpecForge DSpark", "XPress"),
    "speculators": ("speculators DFlash", "speculators DFlash 2", "speculators DSpark"),
    "speculators, EAGLE-3": ("speculators EAGLE-3",),
    "speculators, P-EAGLE": ("speculators P-EAGLE",),
    "transformers": ("Muse",),
}
"""Layouts by the package that tests here compare them with."""

LENGTH = 24
"""Tokens of the text behind whose positions drafts are made."""

PLACES = (1, 2, 7, 16, 23)
"""At which positions: with a context of one token, within a window, and beyond it."""


class Drafts(NamedTuple):
    """What is drafted behind one position.

    Attributes:
        hidden: states [k, H] that logits are made of.
        logits: [k, V or draft_vocab_size], before any head that looks at earlier drafts.
        token_ids: k drafts.
    """

    hidden: Tensor
    logits: Tensor
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint in a folder, as its publisher writes it but for its sizes.

    Attributes:
        row: of the list.
        folder: has config.json and the weights.
        config: content of config.json.
        tensors: float32, by their published names.
        verifier: a target that it fits.
        text: token ids [LENGTH].
        features: what the target's tapped layers put out, [LENGTH, taps * H].
    """

    row: Row
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    verifier: FakeVerifier
    text: Tensor
    features: Tensor


def published_rows(layouts: Iterable[str]) -> list[Row]:
    """The rows of these layouts, but for those that differ in nothing that a small one keeps."""
    found: dict[str, Row] = {}
    for row in rows():
        if row.layout in layouts:
            kept = [
                row.layout,
                _kept(shrunk(row.config)),
                row.shapes,
                "gemma" in row.target.lower(),
            ]
            found.setdefault(json.dumps(kept, sort_keys=True), row)
    return list(found.values())


def published(row: Row, folder: Path, *, window: int | None = None) -> Published:
    """Writes a small version of `row` to `folder`; `window` takes the place of its windows."""
    small, found = write_small(row, folder, window=window)
    verifier = tiny_verifier(row, small)
    if "gemma" in row.target.lower():
        verifier.embedding_scale, verifier.final_softcap = verifier.hidden_size**0.5, 30.0
    width = len(load_drafter(folder, verifier=verifier).aux_layer_ids) * verifier.hidden_size
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, TINY["vocab_size"] - 1, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, width, generator=generator)
    return Published(row, folder, small, found, verifier, text, features)


def write_small(
    row: Row, folder: Path, *, window: int | None = None, config: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and random weights of a small version of `row`, which is written to `folder`."""
    small = json.loads(json.dumps(shrunk(config or row.config)))
    for place in (small, *(value for value in small.values() if isinstance(value, dict))):
        for key in ("sliding_window", "swa_window_size"):
            if window is not None and place.get(key):
                place[key] = window
    generator = torch.Generator().manual_seed(1)
    found = {
        name: _random(name, tensor, generator)
        for name, tensor in tensors(small, row.shapes).items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small))
    save_file(found, folder / "model.safetensors")
    return small, found


def our_drafts(case: Published) -> dict[int, Drafts]:
    """Behind each of `PLACES`, from one cache that grows."""
    drafter: Any = load_drafter(case.folder, verifier=case.verifier)
    rig, found, known = Rig(drafter, case.verifier, num_reqs=1), {}, 0
    assert isinstance(rig.bound, BoundDFlash)
    for place in PLACES:
        new = slice(known, place)
        rig.prefill(0, case.features[new], known, case.text[new])
        known = place
        batch = rig.batch([int(case.text[place])], [place], drafter.max_draft_tokens)
        hidden = rig.bound.draft_hidden(batch)[0, -drafter.max_draft_tokens :]
        token_ids = rig.bound.propose(batch).token_ids[0].tolist()
        found[place] = Drafts(hidden, rig.bound.logits(hidden), token_ids)
    return found


def check_drafts(
    case: Published,
    model: Any,
    their_drafts: Callable[[Published, Any], dict[int, Drafts]],
    *,
    logits: bool = True,
) -> dict[int, Drafts]:
    """Our drafts, which are those of `model` as far as its own rounding allows."""
    wide = copy.deepcopy(model).double()
    with Float64():
        exact = their_drafts(case, wide)
    ours, plain = our_drafts(case), their_drafts(case, model)
    for place in PLACES:
        for mine, near, right in zip(
            *(one[place][: 1 + logits] for one in (ours, plain, exact)), strict=True
        ):
            assert_as_exact(mine, near, right, factor=4)
        assert ours[place].token_ids == exact[place].token_ids
    return ours


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """What may change a draft; of tapped layers that is how many there are."""
    return {
        key: _kept(value)
        if isinstance(value, Mapping)
        else len(value or ())
        if key in TAPS
        else value
        for key, value in config.items()
        if key not in ("num_target_layers", "speculators_config")
    }


def _random(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Norms and scalars around 1; a reduced vocabulary keeps the first and the last tokens."""
    kept = TINY["draft_vocab_size"]
    skipped = TINY["vocab_size"] - kept
    if name == "d2t":
        return torch.where(torch.arange(kept) < kept // 2, 0, skipped)
    if name == "t2d":
        ids = torch.arange(len(like))
        return (ids < kept // 2) | (ids >= kept // 2 + skipped)
    random = torch.randn(like.shape, generator=generator)
    return 1 + 0.3 * random if "norm" in name or "scalar" in name else 0.3 * random
