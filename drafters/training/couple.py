"""`specdec couple`: fits how far a drafter's probabilities and the noise are to be trusted."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from specdec.base.config import EngineConfig, LoadConfig
from specdec.base.errors import CheckpointError, InvalidInputError, SpecDecError
from specdec.base.files import user_path
from specdec.base.writing import check_writable, write_text
from specdec.cli.fields import add_options, from_options
from specdec.cli.options import load_decoder, revision_option
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.dflash.config.config import DFlashConfig
    from drafters.dflash.coupling import Coupling
    from drafters.training.data.dataset import Answer
    from drafters.training.data.prompts import TrainingPrompt
    from specdec.session.decoder import SpecDecoder

    Answers = dict[float, list[tuple[int, Answer]]]
    """By temperature what the target said, each with the seed of its noise."""

_EPILOG = """\
example:
  specdec couple run/drafter --model path/or/hub-name --prompts more-questions.jsonl

Give prompts that the drafter was not trained on. Outputs do not depend on the weights, only how
many drafts are accepted when sampling. docs/training.md says more.
"""


@dataclass(frozen=True, slots=True)
class CoupleConfig:
    """What to fit to.

    Attributes:
        model: the target: embedded, a folder, a GGUF file, or a hub name.
        prompts: text or JSON lines files with prompts; never a test split.
        max_prompts: most prompts taken from the files.
        temperatures: temperatures at which weights are fitted; others are interpolated.
        max_tokens: most tokens of an answer.
        max_num_seqs: answers decoded at once.
        seed: fixes prompts and answers.
    """

    model: str = "embedded"
    prompts: tuple[str, ...] = ()
    max_prompts: int = 64
    temperatures: tuple[float, ...] = (0.5, 0.7, 1.0)
    max_tokens: int = 128
    max_num_seqs: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_prompts", 1), ("max_tokens", 2), ("max_num_seqs", 1)):
            if getattr(self, name) < least:
                what = f"{name.replace('_', '-')} is {getattr(self, name)}"
                raise InvalidInputError(f"{what}; it must be at least {least}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec couple`."""
    parser.usage = "%(prog)s FOLDER --prompts FILE ... [options]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "drafter", metavar="FOLDER", help="a DFlash drafter; its config.json is written anew"
    )
    add_options(parser.add_argument_group("answers"), CoupleConfig, nargs="+")
    group = parser.add_argument_group("target")
    revision_option(group)
    add_options(group, LoadConfig, ("device", "dtype", "attention"))


def run(args: argparse.Namespace) -> int:
    """Runs `specdec couple`; 0 when the weights are written.

    Raises:
        SpecDecError: an option, a file or a model is wrong.
    """
    from drafters.checkpoint import CONFIG, read_json
    from drafters.dflash.config.checkpoint import read_checkpoint
    from drafters.dflash.coupling import Coupling
    from drafters.dflash.drafter import check_fit
    from drafters.lilicorr.lattice import LatticeConfig

    config = CoupleConfig(**from_options(CoupleConfig, args))
    load = LoadConfig(**from_options(LoadConfig, args))
    folder = user_path(args.drafter)
    shape, tensors = read_checkpoint(folder)
    check_writable(folder / CONFIG)
    own = (
        shape.output_multiplier != 1
        or shape.final_logit_softcapping
        or {"lm_head.weight", "embed_tokens.weight"} & tensors.keys()
    )
    _require_targets(folder, not own)
    if peculiar := shape.untrainable(tensors):
        what = f"drafter {str(folder)!r} has {peculiar}"
        raise CheckpointError(f"{what}; weights cannot be fitted for it")
    if isinstance(shape.head, LatticeConfig):
        raise CheckpointError(
            f"drafter {str(folder)!r} compares its candidates, and weights are fitted over the"
            f" whole vocabulary; it drafts with ones"
        )
    temperatures = tuple(sorted(set(config.temperatures)))
    ones = ((1.0,) * shape.max_draft_tokens,) * len(temperatures)
    # what could not be written must not wait for the answers
    replace(shape, coupling=Coupling(temperatures, ones, ones))
    texts = _prompts(config)
    decoder = load_decoder(args, None, EngineConfig(max_num_seqs=config.max_num_seqs))
    check_fit(shape, decoder.verifier, borrows=True)
    _require_targets(folder, shape.scaled_like(decoder.verifier))
    answers = _answers(config, decoder, texts, temperatures)
    del decoder
    gc.collect()  # the target is loaded once more
    coupling = _fitted(config, load, shape, tensors, answers)
    text = json.dumps(read_json(folder / CONFIG) | {"coupling": coupling.json()}, indent=2) + "\n"
    write_text(folder / CONFIG, text)
    _say(f"couple: written to {folder / CONFIG}")
    return 0


def _prompts(config: CoupleConfig) -> list[TrainingPrompt]:
    from drafters.training.data.prompts import read_prompts

    prompts = [prompt for file in config.prompts for prompt in read_prompts(file)]
    if not prompts:
        raise InvalidInputError("there is no prompt to answer; name files with --prompts")
    Random(config.seed).shuffle(prompts)
    return prompts[: config.max_prompts]


def _answers(
    config: CoupleConfig,
    decoder: SpecDecoder,
    prompts: list[TrainingPrompt],
    temperatures: tuple[float, ...],
) -> Answers:
    """What the target says to each prompt."""
    from drafters.training.data.dataset import Answer
    from drafters.training.data.own import tokenized

    texts = [tokenized(decoder, prompt.messages, prompt.source) for prompt in prompts]
    found = {}
    for temperature in temperatures:
        params = [
            SamplingParams(
                max_tokens=config.max_tokens, temperature=temperature, seed=config.seed + i
            )
            for i in range(len(texts))
        ]
        handles = [decoder.session.submit(*one) for one in zip(texts, params, strict=True)]
        pairs = []
        for handle, one in zip(handles, params, strict=True):
            result = handle.result()
            if one.seed is not None and len(result.token_ids) > 1:
                pairs.append((one.seed, Answer(result.prompt_token_ids, result.token_ids)))
        if not pairs:
            what = f"no answer at temperature {temperature:g} has two tokens"
            raise SpecDecError(f"{what}; give other --prompts")
        text = f"couple: temperature {temperature:g}"
        _say(f"{text}: {len(pairs)} answers, {sum(len(a.answer_ids) for _, a in pairs):,} tokens")
        found[temperature] = pairs
    return found


def _require_targets(folder: Path, ok: bool) -> None:
    if not ok:
        what = f"drafter {str(folder)!r} has embeddings, a head or scales of its own"
        raise CheckpointError(f"{what}; weights are fitted where it takes the target's")


def _fitted(
    config: CoupleConfig,
    load: LoadConfig,
    shape: DFlashConfig,
    tensors: dict[str, Tensor],
    answers: Answers,
) -> Coupling:
    import torch

    from drafters.dflash.coupling import Coupling
    from drafters.dflash.model import DFlashModel
    from drafters.dflash.tied import expanded
    from drafters.training.loss.coupling import Choices, choices_of, fit_weights
    from drafters.training.target import Target
    from specdec.base.registry import VERIFIERS, resolve
    from specdec.device.device import resolve_device, resolve_dtype

    device = resolve_device(load.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # In a form of its own: attention is no longer paged.
    verifier, _ = resolve(VERIFIERS, "hf", "verifier")(
        config.model,
        device=device,
        dtype=resolve_dtype(load.dtype, device),
        attention=load.attention,
        fuse=False,
        generation_config=None,
    )
    target, model = Target(verifier, shape.target_layer_ids), DFlashModel(shape)
    model.load_state_dict(expanded(tensors, verifier) if shape.tied_tables else tensors)
    model.requires_grad_(False).eval().to(device, target.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    tables = []
    for temperature, pairs in answers.items():
        parts = [
            choices_of(model, target, text, temperature=temperature, seed=seed, generator=generator)
            for seed, text in pairs
        ]
        choices = Choices(*map(torch.cat, zip(*parts, strict=True)))
        fitted = fit_weights(choices, shape.max_draft_tokens)
        rows = fitted.weights.tolist()
        _say(
            f"couple: temperature {temperature:g}: {len(choices.slots):,} choices, log-likelihood"
            f" of each {fitted.before:.3f} with ones, {fitted.after:.3f} fitted"
        )
        for name, row in zip("ab", rows, strict=True):
            _say(f"couple:   {name} = {' '.join(f'{x:.2f}' for x in row)}")
        tables.append([tuple(round(x, 3) for x in row) for row in rows])
    return Coupling(tuple(answers), *(tuple(table[i] for table in tables) for i in range(2)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
