"""Compares greedy outputs in float32 over all ways to decode:
`python -m tests.checks.identity [--data test.jsonl]`.

A model (`--model`, the embedded one), plain and with drafters (`--drafters`), alone and in batches,
captured (on a GPU) and launched operation by operation, with a fixed k and with one chosen step by
step; and Transformers' `generate`. What a drafter does not give, such as a tree, is said. Whatever
differs is printed, and the exit status is 1.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from evals.peers.transformers import TransformersPeer
from evals.prompt_sets import load_prompt_set
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder


class Way(NamedTuple):
    """A way to decode."""

    max_num_seqs: int
    k: int | Literal["auto"] | None  # drafts of a chain
    captured: bool = True
    tree: int | None = None  # drafts of a tree

    @property
    def slow(self) -> bool:
        """Whether it gets a tenth of the prompts, at least 24."""
        return self.max_num_seqs == 1 or not self.captured

    def outputs(
        self, verifier: Verifier, drafter: Drafter, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[list[int]]:
        """Output tokens by prompt."""
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max(map(len, prompts)) + max_tokens,
            num_draft_tokens=(
                min(self.k, drafter.max_draft_tokens) if isinstance(self.k, int) else self.k
            ),
            tree_nodes=self.tree,
            graphs=None if self.captured else False,
            cache=CacheConfig(prefix_caching=False),
        )
        engine = SpecEngine(verifier, drafter if self.k != 0 else None, config)
        requests = [
            engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts
        ]
        while engine.has_work:
            engine.step()
        del engine
        gc.collect()  # captured steps and their engine refer to each other
        return [request.output_token_ids for request in requests]


WAYS = (
    *(Way(1, 0), Way(8, 0, captured=False), Way(256, 0)),
    *(Way(1, 15), Way(8, 15), Way(8, 15, captured=False), Way(32, 7), Way(256, 3), Way(64, "auto")),
    *(
        Way(1, None, tree=64),
        Way(8, None, tree=16),
        Way(8, None, captured=False, tree=33),
        Way(32, None, tree=7),
    ),
)


def main() -> int:
    """All ways, against plain decoding of 32 prompts at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", help="GSM8K's test.jsonl; without it, the bundled prompts")
    parser.add_argument("--limit", type=int, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", default="embedded", metavar="NAME")
    parser.add_argument("--drafters", nargs="+", default=["smollm2-dflash"], metavar="NAME")
    args = parser.parse_args()
    name = "gsm8k" if args.data else "bundled"
    files = {name: args.data} if args.data else {}
    items = load_prompt_set(name, files=files, limit=args.limit).items
    expected, different = list[list[int]](), 0

    def compare(title: str, outputs: list[list[int]]) -> None:
        nonlocal different
        differing = [index for index, output in enumerate(outputs) if output != expected[index]]
        different += len(differing)
        print(
            f"{title:<44}{len(outputs) - len(differing)} of {len(outputs)} equal {differing or ''}",
            flush=True,
        )

    for drafter_name in args.drafters:
        engine = EngineConfig(num_draft_tokens=None, max_num_seqs=1, max_model_len=1024)
        decoder = SpecDecoder.from_pretrained(
            args.model, drafter=drafter_name, dtype="float32", engine=engine
        )
        verifier, drafter = decoder.verifier, decoder.engine.drafter
        assert drafter is not None
        prompts = [decoder.tokenize([{"role": "user", "content": item.turns[0]}]) for item in items]
        few = prompts[: max(24, len(prompts) // 10)]
        ways: tuple[Way, ...] = WAYS
        if not expected:
            expected += Way(32, 0).outputs(verifier, drafter, prompts, args.max_tokens)
            print(f"{args.model}, float32")
            peer = TransformersPeer("transformers", verifier, lookup=False)
            asked = [SamplingParams(max_tokens=args.max_tokens)] * len(few)
            compare("Transformers generate", peer.generate(few, asked, concurrency=1))
        else:
            ways = tuple(way for way in WAYS if way.k != 0)
        print(f"drafter {drafter_name}")
        for way in ways:
            kind = "captured" if way.captured and verifier.device.type == "cuda" else "eager"
            drafts = f"tree {way.tree}" if way.tree else f"k up to {way.k}"
            asked_of_it = few if way.slow else prompts
            try:
                outputs = way.outputs(verifier, drafter, asked_of_it, args.max_tokens)
            except InvalidInputError as error:
                print(f"{drafts}: {error}")
                continue
            compare(f"{way.max_num_seqs} at once, {drafts}, {kind}", outputs)
        decoder.close()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
