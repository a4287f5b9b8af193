"""Compares a DFlash drafter of the embedded model here and in the public `dflash` package: tokens,
and the count of every step.

    python -m tests.checks.dflash
        the shipped drafter, 32 bundled prompts, 64 tokens each
    python -m tests.checks.dflash --drafter FOLDER --set FILE.jsonl
        another one in z-lab's layout, on prompts of your own

Greedy, float32, on the CPU, whole blocks, prompts in the chat template. There: the package's own
loader and generation loop around Transformers' module of the target. Here: our engine, several
prompts in a batch. The loop there shortens its blocks near the token limit, which changes their
drafts; it therefore gets a block more than is asked for, and is cut to what was asked. The exit
status is 1 when a token or an accepted count differs by more than a near-tie, 2 when an argument is
wrong or the package is missing.

The package knows no Markov head, such as the shipped drafter has. Of a drafter with a head that it
does not know, both sides run the backbone alone.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.model import DFlashModel
from drafters.dflash2.selector import SelectorConfig
from drafters.shipped import shipped_drafter_path
from evals.prompt_sets import BUNDLED, load_prompt_set
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, SpecDecError
from specdec.session.decoder import SpecDecoder
from verifiers.weights.embedded import embedded_model_path

NEAR_TIE = 1e-3
"""Largest difference of two float32 logits that rounding may turn around."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one side wrote after one prompt.

    Attributes:
        token_ids: the output, its stop token included.
        emitted: tokens of each verify step, the accepted drafts and the one token of the target's
            own.
        gaps: of each step, how far the logit of each draft lies above the next best; only known of
            the public side.
    """

    token_ids: list[int]
    emitted: list[int]
    gaps: list[list[float]] = field(default_factory=list)

    def starts(self) -> list[int]:
        """Output tokens known before each step; tokens being equal, steps that start alike draft
        alike.
        """
        return list(accumulate(self.emitted, initial=1))[: len(self.emitted)]


@dataclass(slots=True)
class Tally:
    """Counts over all prompts."""

    steps: int = 0
    equal: int = 0
    prompts: int = 0
    differing: int = 0
    wrong: int = 0


@cache
def embedded_target() -> Any:
    """The embedded model as Transformers' own module, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()


def public_drafter(folder: Path) -> Any:
    """The checkpoint through the public package's loader, in float32."""
    return (
        import_module("dflash.model")
        .DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
        .eval()
    )


def public_generation(
    drafter: Any, target: Any, prompt: list[int], tokens: int, eos: Sequence[int]
) -> Generation:
    """One prompt through the public generation loop."""
    public, gaps = import_module("dflash.model"), []

    def compute_logits(hidden: Tensor, head: Any) -> Tensor:
        logits: Tensor = type(drafter).compute_logits(drafter, hidden, head)
        gaps.append(logits[0].topk(2).values.diff().neg()[:, 0].tolist())
        return logits

    room = tokens + drafter.block_size
    with (
        patch.object(drafter, "compute_logits", compute_logits),
        patch.object(public, "_cuda_time", time.perf_counter),
    ):
        found = public.dflash_generate(
            drafter, target, torch.tensor([prompt]), room, list(eos), return_stats=True
        )
    starts = accumulate(found.acceptance_lengths, initial=1)
    emitted = [
        min(count, tokens - start)
        for count, start in zip(found.acceptance_lengths, starts, strict=False)
        if start < tokens
    ]
    return Generation(found.output_ids[0, len(prompt) :].tolist()[:tokens], emitted, gaps)


@contextmanager
def as_the_package_knows_it(folder: Path) -> Iterator[Path]:
    """The drafter's folder; where the public package does not know its head, that of a copy without
    it while the context lasts.
    """
    config, tensors = read_checkpoint(folder)
    if config.head is None or isinstance(config.head, SelectorConfig):
        yield folder
        return
    plain = replace(config, head=None, tied_tables=False)
    with torch.device("meta"):
        names = DFlashModel(plain).state_dict().keys()
    with TemporaryDirectory() as place:
        write_checkpoint(place, plain, {name: tensors[name] for name in names})
        yield Path(place)


def our_generations(
    decoder: SpecDecoder, prompts: list[list[int]], tokens: int
) -> list[Generation]:
    """All prompts through our engine.

    Raises:
        CapacityError: one of them could not be served.
    """
    results = decoder.generate(prompts, max_tokens=tokens)
    assert isinstance(results, list)
    for result in results:
        if result.error:
            raise CapacityError(result.error)
    return [Generation(result.token_ids, result.stats.num_emitted) for result in results]


def our_decoder(drafter: str) -> SpecDecoder:
    """The embedded model in float32; every step drafts the drafter's whole block."""
    engine = EngineConfig(
        num_draft_tokens=None, max_num_seqs=8, cache=CacheConfig(memory_bytes=2**29)
    )
    return SpecDecoder.from_pretrained(
        drafter=drafter, device="cpu", dtype="float32", engine=engine
    )


def compare(
    label: str, prompt: list[int], ours: Generation, theirs: Generation, target: Any, tally: Tally
) -> None:
    """Adds one prompt to the tally, and prints a line when it differs: the first difference, and
    how near a tie it is.
    """
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    shared = next(
        (place for place, (a, b) in enumerate(pairs) if a != b),
        min(len(ours.token_ids), len(theirs.token_ids)),
    )
    tokens_differ = shared < max(len(ours.token_ids), len(theirs.token_ids))
    steps = {
        start: (count, gaps)
        for start, count, gaps in zip(theirs.starts(), theirs.emitted, theirs.gaps, strict=False)
    }
    differences: list[tuple[str, float]] = []
    for start, count in zip(ours.starts(), ours.emitted, strict=True):
        # After a difference the two may start elsewhere. Steps that reach the first other token are
        # the token's difference.
        if start not in steps or (tokens_differ and start + max(count, steps[start][0]) > shared):
            continue
        expected, gaps = steps[start]
        tally.steps += 1
        tally.equal += count == expected
        if count != expected:
            text = f"after {start} tokens {count - 1} drafts accepted here, {expected - 1} there"
            differences.append((text, gaps[min(count, expected) - 1]))
    if tokens_differ:
        differences.append(
            _token_difference(prompt, ours.token_ids, theirs.token_ids, shared, target)
        )
    tally.prompts += 1
    tally.differing += bool(differences)
    tally.wrong += any(gap > NEAR_TIE for _, gap in differences)
    if differences:
        text, gap = max(differences, key=lambda difference: difference[1])
        verdict = "WRONG" if gap > NEAR_TIE else "near-tie"
        print(
            f"  {label}: {len(differences)} differences, such as {text} (logits apart {gap:.1e}):"
            f" {verdict}",
            flush=True,
        )


@torch.inference_mode()
def _token_difference(
    prompt: list[int], ours: list[int], theirs: list[int], place: int, target: Any
) -> tuple[str, float]:
    """The first token that differs, and how far apart the target's logits of the two are; infinite
    where one output just ends.
    """
    if place in (len(ours), len(theirs)):
        return f"{len(ours)} tokens here, {len(theirs)} there", float("inf")
    logits = target(torch.tensor([prompt + ours[:place]]), logits_to_keep=1).logits[0, -1]
    gap = float((logits[ours[place]] - logits[theirs[place]]).abs())
    return f"token {place} is {ours[place]} here, {theirs[place]} there", gap


def check(
    decoder: SpecDecoder, drafter: Any, chats: dict[str, str], tokens: int
) -> tuple[Tally, str]:
    """Runs both sides on the questions, by name; returns the counts and the summary line."""
    target, tally = embedded_target(), Tally()
    prompts = [decoder.tokenize([{"role": "user", "content": text}]) for text in chats.values()]
    ours = our_generations(decoder, prompts, tokens)
    theirs = []
    for label, prompt, our in zip(chats, prompts, ours, strict=True):
        theirs.append(
            public_generation(drafter, target, prompt, tokens, decoder.verifier.eos_token_ids)
        )
        compare(label, prompt, our, theirs[-1], target, tally)
    return tally, (
        f"{tally.prompts} prompts, {tally.differing} of them differ; {tally.steps} steps compared,"
        f" {tally.equal} with equal counts;"
        f" tau {_tau(ours):.4f} here, {_tau(theirs):.4f} there"
    )


def _tau(side: Iterable[Generation]) -> float:
    """Output tokens per verify step, pooled over the prompts."""
    counts = list(chain.from_iterable(one.emitted for one in side))
    return sum(counts) / max(1, len(counts))


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks.dflash", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--drafter",
        default="smollm2-dflash",
        help="smollm2-dflash, or a checkpoint's folder (default %(default)s)",
    )
    add("--prompts", type=int, default=32, help="the first of the set (default %(default)s)")
    add("--tokens", type=int, default=64, help="of each output, at least 2 (default %(default)s)")
    add("--set", default=BUNDLED, help="bundled, or a file of JSON lines (default %(default)s)")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(
            f"--tokens is {args.tokens}; the first comes from the prefill, so a verify step needs"
            f" at least 2"
        )
    if find_spec("dflash") is None:
        print(
            "the public package is not installed; run: pip install --no-deps dflash==0.1.0",
            file=sys.stderr,
        )
        return 2
    if args.drafter != "smollm2-dflash" and not Path(args.drafter).is_dir():
        parser.error(
            f"--drafter {args.drafter!r} is not a folder; give a checkpoint's folder, or"
            f" smollm2-dflash"
        )
    try:
        files = {} if args.set == BUNDLED else {args.set: args.set}
        items = load_prompt_set(args.set, files=files, limit=args.prompts).items
        folder = (
            shipped_drafter_path()
            if args.drafter == "smollm2-dflash"
            else Path(args.drafter).resolve()
        )
        with as_the_package_knows_it(folder) as known:
            decoder = our_decoder(str(known))
            drafter = public_drafter(known)
        part = "" if known == folder else " without its head"
        print(
            f"drafter {args.drafter}{part}, k = {drafter.block_size - 1}, set {args.set},"
            f" {args.tokens} tokens each;"
            f" dflash {version('dflash')}, torch {torch.__version__}, transformers"
            f" {version('transformers')}",
            flush=True,
        )
        tally, summary = check(
            decoder, drafter, {item.item_id: item.turns[0] for item in items}, args.tokens
        )
    except SpecDecError as error:
        print(error, file=sys.stderr)
        return 2
    print(summary)
    print("all right" if not tally.wrong else f"{tally.wrong} prompts wrong")
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
