"""One round of learning: the drafter that is served goes on training on what was served, and is
written if it drafts better for the newest of it, which it has not seen.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import checkpoint_names
from drafters.training.config import TrainConfig
from drafters.training.learning.served import read_served, split
from drafters.training.learning.verdict import Verdict, compared
from drafters.training.shape import make_drafter
from drafters.training.stages import answer_set, load_target, say
from drafters.training.state import STATE_FILE
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from specdec.base.errors import InvalidInputError
from specdec.base.files import user_path
from specdec.base.writing import remove, remove_folder, write_text
from specdec.device.device import resolve_device

REPORT, WEIGHTS = "learned.json", "drafter"


def learn(config: TrainConfig) -> bool:
    """Runs a round, always from its beginning.

    Returns:
        Whether it came to its end; `stop_after` or a termination signal ends it earlier.

    Raises:
        SpecDecError: an input is wrong, the disk is full, or the loss is not finite.
    """
    if config.init is None or len(config.answers_from) != 1:
        what = "specdec train learn goes on from a drafter with requests that were served"
        raise InvalidInputError(f"{what}; give --init and one folder as --answers-from")
    for name in (REPORT, f"training/{STATE_FILE}"):
        remove(config.folder / name)
    remove_folder(config.folder / WEIGHTS)
    folder = user_path(config.answers_from[0])
    answers = read_served(folder, config.max_prompts, max_length=config.max_length)
    trained, heldout = split(answers, config.heldout)
    verifier, tokenizer = load_target(config, resolve_device(config.device))
    model = make_drafter(config, verifier, tokenizer)
    if not isinstance(model, DFlashModel):
        raise InvalidInputError(
            f"drafter {config.init!r} goes token by token, and specdec train learn knows DFlash"
            f" drafters alone; give the same requests to specdec train"
        )
    model.config = replace(model.config, coupling=read_checkpoint(config.init)[0].coupling)
    target = Target(verifier, model.config.target_layer_ids, distribution=config.uses_teacher)

    both = (trained, heldout)
    sets = (answer_set(config, model, some, verifier.device, config.max_length) for some in both)
    trainer = Trainer(config, model, target, *sets)
    say(f"learn: {len(trainer.train)} requests, and {len(trainer.heldout)} newer ones held out")
    if not trainer.run():
        return False
    verdicts = compared(trainer.replays[0], trainer.replays[-1])
    worst = min(verdicts, key=lambda verdict: verdict.low)
    if worst.better:
        with trainer.optimizer.averaged(), torch.no_grad():
            state = model.state_dict()
            tensors = {
                name: state[key].cpu().clone() for name, key in checkpoint_names(model).items()
            }
        write_checkpoint(config.folder / WEIGHTS, model.config, tensors)
    _report(config.folder, worst)
    remove(config.folder / "training" / STATE_FILE)  # the largest file; the next round begins anew
    return True


def _report(folder: Path, verdict: Verdict) -> None:
    """Writes last what the server looks at."""
    about = {
        "better": verdict.better,
        "tau": [verdict.before, verdict.after],
        "interval": [verdict.low, verdict.high],
        "conversations": verdict.conversations,
        "says": str(verdict),
    }
    write_text(folder / REPORT, json.dumps(about, indent=2) + "\n")
    taken = "is written" if verdict.better else "is not better, and not written"
    say(f"learn: {verdict}; the drafter {taken}")
