"""Whether a drafter would fit a target, told from its config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from drafters.algorithms import algorithm_of, unsupported
from drafters.checkpoint import called
from drafters.dflash.config import layout as dflash
from drafters.dflash.config.checkpoint import tensor_shapes
from drafters.dflash.config.heads import ALGORITHMS
from drafters.dflash.drafter import check_fit
from drafters.eagle3 import config as eagle3
from drafters.eagle3.checkpoint import tensor_shapes as eagle3_shapes
from drafters.eagle3.drafter import check_fit as check_head_fit
from drafters.keys import LIMITS, Keys, count, section
from drafters.license import CARD, license_note
from drafters.load import first_eagle
from drafters.sequential.drafter import USUAL_DRAFTS
from drafters.shipped import located
from specdec.base.checkpoint.hub import checkpoint_file
from specdec.base.checkpoint.kinds import check_adapter, checkpoint_config
from specdec.base.errors import CheckpointError, SpecDecError, one_line
from specdec.base.files import user_path
from specdec.base.registry import DRAFTERS, PARTS, resolve

_WITHOUT_WEIGHTS = ("none", "ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Fit:
    """What a drafter's config says.

    Attributes:
        algorithm: how it drafts.
        drafts: most of a step; 0 where its config does not say.
        taps: layers of the target whose outputs it reads, 0-based.
        numbers: that its tensors hold, those that it borrows from the target left out.
        problems: everything in the way; empty when it fits.
        license: what to say of its license; None where that leaves everyone free to use it.
    """

    algorithm: str
    drafts: int = 0
    taps: tuple[int, ...] = ()
    numbers: int = 0
    problems: tuple[str, ...] = ()
    license: str | None = None


def read_fit(name: str, target: Any) -> Fit:
    """How the drafter of that name fits `target`.

    Args:
        name: "none", a name in the registry, a folder, or a name on the hub.
        target: what it has to fit, with `name`, `hidden_size`, `num_layers`, `vocab_size`, and
            `predicts`, whether it has layers for multi-token prediction.

    Raises:
        CheckpointError: its config cannot be read.
    """
    if name in _WITHOUT_WEIGHTS:
        return Fit(name)
    if name == "mtp":
        missing = (
            f"target {target.name!r} has no layers for multi-token prediction that could draft"
        )
        problems = () if target.predicts else (missing,)
        return Fit(name, USUAL_DRAFTS, (target.num_layers - 1,), problems=problems)
    where = located(name)
    raw = checkpoint_config(where, what="drafter")
    card = checkpoint_file(where, CARD, what="drafter")
    fit = fit_of(raw, target)
    folder = user_path(where)
    if folder.is_dir() and (refusal := first_eagle(folder, fit.algorithm)):
        fit = Fit("unknown", problems=(refusal,))
    if fit.algorithm == "draft-model":
        fit = _draft_model(name, raw)
    else:
        check_adapter(where, what="drafter")
    return replace(fit, license=license_note(card, raw))


def _draft_model(name: str, raw: Mapping[str, Any]) -> Fit:
    """What a language model needs to draft; its tokens are seen when it is loaded."""
    for size in LIMITS:
        count(Keys([section(raw, "text_config"), raw]), size)
    try:
        with called(name, name, kind="draft model"):
            where = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
            needs = resolve(PARTS, "needs", "part")(name, **where, gpu_bytes=2**63, divides=False)
    except SpecDecError:
        raise
    except Exception as error:  # transformers believes files, whose mistakes end in any error
        raise CheckpointError(
            f"config.json of draft model {name!r} describes no model ({type(error).__name__}:"
            f" {one_line(error)}); fetch it again"
        ) from error
    problems = list(needs.missing)
    if needs.request_bytes:
        problems.append(
            "a draft model cannot have recurrent layers, whose states cannot take rejected drafts"
            " back"
        )
    numbers = needs.weights // torch.bfloat16.itemsize
    return Fit("draft-model", USUAL_DRAFTS, numbers=numbers, problems=tuple(problems))


def _prediction(raw: Mapping[str, Any], target: Any) -> Fit:
    """How layers for multi-token prediction in their own checkpoint fit, told by their sizes."""
    try:
        of_speculators = section(raw, "transformer_layer_config")
        keys = Keys([of_speculators or section(raw, "text_config")])
        sizes = {name: count(keys, name) for name in LIMITS}
    except CheckpointError as error:
        return Fit("mtp", problems=(str(error),))
    wanted = {"vocab_size": target.vocab_size}
    if of_speculators:  # assistants are narrower than their targets
        wanted["hidden_size"] = target.hidden_size
    problems = [
        f"it was made for a target whose {name} is {sizes[name]}, not {value}"
        for name, value in wanted.items()
        if sizes[name] not in (None, value)
    ]
    return Fit("mtp", USUAL_DRAFTS, (target.num_layers - 1,), problems=tuple(problems))


def fit_of(raw: Mapping[str, Any], target: Any) -> Fit:
    """How a drafter fits `target`, from the content of its config.json."""
    try:
        algorithm = algorithm_of(raw)
    except CheckpointError as error:
        return Fit("unknown", problems=(str(error),))
    if algorithm not in DRAFTERS:
        return Fit(algorithm, problems=(unsupported(algorithm).partition(";")[0],))
    if algorithm == "mtp":
        return _prediction(raw, target)
    of_eagle3 = algorithm in ("eagle3", "peagle")
    if not of_eagle3 and algorithm not in ALGORITHMS:
        # one that was registered: what its config has to say, its loader knows
        return Fit(algorithm)
    try:
        resolve(PARTS, "quantization", "part")(raw)
        if of_eagle3:
            head = eagle3.parse_config(raw)
            check_head_fit(head, target, borrows=not head.own_embeddings)
            taps = head.taps(target.num_layers)
            drafts, shapes = head.max_draft_tokens, eagle3_shapes(head)
        else:
            config = dflash.parse_config(raw)
            check_fit(config, target, borrows=True)
            taps = config.target_layer_ids
            drafts, shapes = config.max_draft_tokens, tensor_shapes(config)
    except CheckpointError as error:
        return Fit(algorithm, problems=(str(error).partition("; choose one made for it")[0],))
    return Fit(algorithm, drafts, taps, sum(map(prod, shapes.values())))
