"""A real GGUF file beside Transformers' own reading of it: config, tokenizer, every weight, and
greedy tokens in float32.

    python -m tests.checks.gguf FILE [--tokens 24] [--weights-only]

Prints a line for each, and the seconds and the memory that reading takes; needs 8 bytes for each
weight.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpecDecoder
from verifiers.config.gguf import config_of
from verifiers.config.wrappers import config_of as made
from verifiers.config.wrappers import shapes_of
from verifiers.gguf.file import Facts, GgufFiles
from verifiers.weights.gguf import read_gguf

PROMPTS = (
    "Write a Python function that returns the nth Fibonacci number.",
    "What is the capital of France?",
    "Translate to German: the cat sits on the mat.",
)


def main() -> int:
    """Exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=24, help="greedy tokens of each prompt")
    parser.add_argument("--weights-only", action="store_true", help="generate nothing")
    args = parser.parse_args()
    start, files = time.perf_counter(), GgufFiles(args.file)
    entries = config_of(Facts(files))
    config = made(dict(entries))
    cpu = torch.device("cpu")
    own = read_gguf(files, config, shapes_of(config), device=cpu, dtype=torch.float32)
    seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    print(f"read in {seconds:.1f} s, peak {memory.ru_maxrss / 2**20:.2f} GiB", flush=True)
    where: Any = {"gguf_file": args.file.name}
    start = time.perf_counter()
    theirs = AutoModelForCausalLM.from_pretrained(args.file.parent, dtype=torch.float32, **where)
    memory = resource.getrusage(resource.RUSAGE_SELF)
    seconds = time.perf_counter() - start
    print(f"transformers: {seconds:.1f} s, peak {memory.ru_maxrss / 2**20:.2f} GiB with both")
    state, different = theirs.state_dict(), []
    for name, weight in own.items():
        if not (isinstance(weight, torch.Tensor) and weight.equal(state[name])):
            different.append(name)
    print(f"weights: {len(own) - len(different)} of {len(own)} equal to the bit", *different[:3])
    own.clear()
    if args.weights_only:
        return int(bool(different))
    tokenizer = AutoTokenizer.from_pretrained(args.file.parent, **where)
    decoder = SpecDecoder.from_pretrained(args.file, drafter="ngram", device="cpu", dtype="float32")
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        prefix = list(ids["input_ids"])
        same = (
            prefix
            == decoder.tokenizer.apply_chat_template(
                message,
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
        )
        with torch.inference_mode():
            full = theirs.generate(
                torch.tensor([prefix]),
                max_new_tokens=args.tokens,
                do_sample=False,
                repetition_penalty=1.0,
            )
        expected = full[0, len(prefix) :].tolist()
        found = list(decoder.generate(prefix, max_tokens=args.tokens).token_ids)
        equal = found == expected[: len(found)] and (
            len(found) == len(expected) or found[-1] in decoder.verifier.eos_token_ids
        )
        print(f"{prompt[:40]!r}: prompt {same}, {len(found)} greedy tokens {equal}", flush=True)
        different += [] if same and equal else [prompt]
    decoder.close()
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
