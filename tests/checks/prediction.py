"""What a prediction brings when a file is edited: tokens per step and per second of any drafter
with it and without, in turn.

    python -m tests.checks.prediction
        a file of 300 lines, one of them changed
    python -m tests.checks.prediction --edit addition --drafters auto suffix

The embedded model computes every step, and its tokens are those of the edited file: it could not
write 300 lines as they were. So steps take as long as they do, and copies are accepted where a
model that edits would accept them; what the drafters' models themselves draft is accepted less than
where a target writes as it likes. The prompt has the file, as an editor's does. No output depends
on a prediction; `tests/drafters/predicted` shows that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.base.config import EngineConfig
from specdec.model.batch import ForwardInput
from specdec.model.core import VerifyOutput
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult

SOURCE = Path(__file__).parents[2] / "specdec" / "engine" / "requests" / "scheduler.py"
ASKED = "Return this file with the change that was discussed, and nothing else.\n\n"

ADDED = [
    "    def is_idle(self) -> bool:\n",
    '        """Whether there is nothing to be done at all."""\n',
    "        return not (self.waiting or self.working)\n",
    "\n",
]


def edited(lines: list[str], edit: str) -> list[str]:
    """A file with one of `EDITS`, in its midst."""
    half = len(lines) // 2
    before, line, after = lines[:half], lines[half], lines[half + 1 :]
    match edit:
        case "line":
            return [*before, line.rstrip("\n") + "  # as before\n", *after]
        case "addition":
            return [*before, line, *ADDED, *after]
        case "deletion":
            return [*before, *after[15:]]
    return [one.replace("request", "item") for one in lines]


EDITS = ("line", "addition", "deletion", "name")
"""The last changes a name wherever it stands."""


def force(decoder: SpecDecoder, script: Sequence[int]) -> None:
    """Has the target choose the tokens of a script, whatever it computes."""
    verifier: Any = decoder.verifier
    forward = type(verifier).forward
    tokens = torch.tensor([*script, 0])

    def forced(rows: ForwardInput, *about: Any) -> VerifyOutput:
        output: VerifyOutput = forward(verifier, rows, *about)
        positions = rows.position_ids
        if rows.logit_rows is not None:
            positions = positions[rows.logit_rows]
        chosen = tokens[(positions + 1).clamp(max=len(tokens) - 1)]
        output.logits.scatter_(1, chosen[:, None], 1e4)
        return output

    verifier.forward = forced


def measured(
    decoder: SpecDecoder, prompt: list[int], output: list[int], prediction: list[int] | None
) -> tuple[GenerationResult, float]:
    """One answer, and its seconds behind the first token."""
    decoder.engine.reset()
    force(decoder, [*prompt, *output])
    sampling = SamplingParams(
        max_tokens=len(output), ignore_eos=True, prediction=tuple(prediction or ())
    )
    chunks = decoder.stream(prompt, sampling)
    first = next(chunks)
    begin = time.perf_counter()
    *_, last = first, *chunks
    assert last.result is not None and last.result.token_ids == output
    return last.result, time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--edit", choices=EDITS, default="line")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--drafters", nargs="+", default=["auto", "ngram", "suffix", "suffix+auto"])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)
    lines = SOURCE.read_text().splitlines(keepends=True)[: args.lines]
    text, after = "".join(lines), "".join(edited(lines, args.edit))
    rows: list[tuple[str, bool, float, float, GenerationResult]] = []
    config = EngineConfig(max_num_seqs=1)
    for name in args.drafters:
        decoder = SpecDecoder.from_pretrained(
            "embedded", drafter=name, device="cpu", dtype=args.dtype, engine=config
        )
        ids = decoder.tokenizer(after, add_special_tokens=False)["input_ids"]
        prediction = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = decoder.tokenize([{"role": "user", "content": ASKED + text}])
        for helped in (False, True):
            # the choice of shapes has seen some steps of the kind
            measured(decoder, prompt[-200:], ids[:200], prediction if helped else None)
            result, seconds = measured(decoder, prompt, ids, prediction if helped else None)
            rows.append((name, helped, result.stats.tau, len(ids) / seconds, result))
            side = "with" if helped else "without"
            speed = len(ids) / seconds
            told = f"{name} {side}: tau {result.stats.tau:.2f}, {speed:.1f} tokens/s"
            print(told, file=sys.stderr, flush=True)
    print(f"{len(lines)} lines, {len(ids):,} tokens, edit: {args.edit}\n")
    print("| drafter | prediction | tau | tokens/s | accepted, rejected |\n|---|---|---|---|---|")
    for name, helped, tau, speed, result in rows:
        accepted, rejected = result.stats.num_predicted
        says = f"{accepted:,}, {rejected:,}" if helped else ""
        print(f"| {name} | {'yes' if helped else 'no'} | {tau:.2f} | {speed:.1f} | {says} |")
    for name in args.drafters:
        (without, with_it) = (row for row in rows if row[0] == name)
        print(
            f"\n{name}: {with_it[2] / without[2]:.2f}x the tokens per step,"
            f" {with_it[3] / without[3]:.2f}x the tokens per second",
            end="",
        )
    best = {helped: max(row[2] for row in rows if row[1] is helped) for helped in (False, True)}
    print(f"\nbest of all, tokens per step: {best[True]:.2f} with, {best[False]:.2f} without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
