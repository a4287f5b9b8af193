"""A target on one attention backend, plain and with drafts, alone and eight at once:
`python -m tests.checks.lossless`.

Every output token has to be the choice of the same model on torch_ref in float32, or a near-tie in
its logits, which are printed.
"""

import argparse
import itertools
import sys
from typing import Any

import torch

from drafters.ngram import load_ngram
from specdec.base.config import EngineConfig
from specdec.cli.options import model_options
from specdec.device.device import resolve_device, resolve_dtype
from specdec.model.core import Verifier
from specdec.session.decoder import SpecDecoder
from tests.checks.aiter_triton_models import PROMPTS, Make, compare, generate
from tests.helpers.scripted import ScriptedDrafter
from verifiers.load import load_verifier


def asked(count: int) -> list[str]:
    """So many questions, no two alike.

    >>> asked(9)[8]
    '(1) What is the capital of France, and which river runs through it?'
    """
    rounds = ((index // len(PROMPTS), PROMPTS[index % len(PROMPTS)]) for index in range(count))
    return [f"({turn}) {text}" if turn else text for turn, text in rounds]


def main() -> int:
    """Runs the command; 1 when a token is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.lossless",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    model_options(parser)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--prompts", type=int, default=len(PROMPTS))
    add("--tokens", type=int, default=64)
    add("--length", type=int, metavar="N", help="tokens of each prompt, made by repeating it")
    add("--no-graphs", action="store_true")
    args = parser.parse_args()
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)

    def load(attention: str, dtype: torch.dtype) -> Verifier:
        return load_verifier(args.model, device=device, dtype=dtype, attention=attention)[0]

    options: dict[str, Any] = {
        "drafter": None,
        "device": str(device),
        "dtype": "float32",
        "attention": "torch_ref",
    }
    decoder = SpecDecoder.from_pretrained(
        args.model, **options, engine=EngineConfig(max_num_seqs=1, max_model_len=256)
    )
    prompts = [
        decoder.tokenize([{"role": "user", "content": text}]) for text in asked(args.prompts)
    ]
    if args.length:
        prompts = [(prompt * args.length)[: args.length] for prompt in prompts]
    reference = decoder.verifier
    want, _ = generate(reference, None, prompts, len(prompts), args)
    known = dict(zip(map(tuple, prompts), want, strict=True))
    verifier = load(args.attention, dtype)
    makes: dict[str, Make] = {
        "plain": lambda verifier: None,
        "n-gram drafts": lambda verifier: load_ngram(None, verifier=verifier),
        "mostly right drafts": lambda verifier: ScriptedDrafter(known, 4, [{3}]),
    }
    if args.model == "embedded":
        from drafters.shipped import load_shipped

        makes["DFlash drafts"] = lambda verifier: load_shipped(None, verifier=verifier)
    print(
        f"{args.model}, {verifier.attention.name}, {dtype}, {device}; {len(prompts)} prompts,"
        f" {args.tokens} tokens each"
    )
    wrong = 0
    for (name, make), batch in itertools.product(makes.items(), args.batches):
        got, tau = generate(verifier, make(verifier), prompts, batch, args)
        wrong += compare(
            f"{name}, {batch} at once", reference, dtype, prompts, want, got, f"; tau {tau:.2f}"
        )
    print("all right" if not wrong else f"{wrong} tokens are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
