"""What a grammar costs the host per request and step: `python -m tests.checks.grammar_host`.

Medians of the processor's time for one request in the midst of a JSON document, with the embedded
model's tokenizer. The drafts are the tokens that a document goes on with, so the grammar allows all
of them, which takes longest.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from specdec.base.registry import TOKENIZERS, resolve
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.sampling.masks import TokenMasks, mask_logits

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
READ, NEXT = '{"name": "Ann', ' Miller", "age": 34, "tags": ["red", "green", "blue"]}'
VOCAB_SIZE = 49152


def microseconds(run: Callable[[], object], repeats: int = 200) -> float:
    """Median time of the processor."""
    times = []
    for _ in range(repeats):
        started = time.thread_time_ns()
        run()
        times.append((time.thread_time_ns() - started) / 1e3)
    return median(times)


def main() -> int:
    """A line per number of drafts."""
    tokenizer = resolve(TOKENIZERS, "hf", "tokenizer")("embedded")
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id], in_threads=False)
    started = time.process_time()
    compiler.start(Grammar.regex("a"))
    first = time.process_time()
    progress = compiler.start(Grammar.json_schema(SCHEMA))
    print(
        f"once for the tokenizer {first - started:.2f} s, this schema"
        f" {(time.process_time() - first) * 1e3:.1f} ms"
    )
    progress.advance(tokenizer(READ, add_special_tokens=False)["input_ids"])
    drafts = tokenizer(NEXT, add_special_tokens=False)["input_ids"]
    for count in (0, 3, 7, 15):
        rows, chain = torch.empty(count + 1, VOCAB_SIZE // 32, dtype=torch.int32), drafts[:count]
        masks = microseconds(partial(progress.fill, rows, chain))
        refused = [tokenizer.eos_token_id] * count
        others = [[*refused, token] for token in chain]
        constrained = microseconds(partial(progress.constrained, refused, others))
        logits = torch.zeros(1, count + 1, VOCAB_SIZE)
        held = TokenMasks(rows[None], torch.tensor([0]))
        applied = microseconds(partial(mask_logits, logits, held), 30)
        print(
            f"{count:>2} drafts: masks {masks:.0f} us, replacing every draft {constrained:.0f} us,"
            f" applying on a CPU {applied:.0f} us"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
