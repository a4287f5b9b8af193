"""Compares greedy outputs in float32 over all ways to decode:
`python -m tests.checks.identity [--data test.jsonl]`.

The embedded model, plain and with its drafter, alone and in batches, captured (on a GPU) and
launched operation by operation, with a fixed k and with one chosen step by step; and Transformers'
`generate`. Whatever differs is printed, and the exit status is 1.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from evals.peers.transformers import TransformersPeer
from evals.prompt_sets import load_prompt_set
from specdec.base.config import CacheConfig, EngineConfig
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
        """Whether it gets a tenth of the prompts."""
        return self.max_num_seqs == 1 or not self.captured

    def outputs(
        self, verifier: Verifier, drafter: Drafter, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[list[int]]:
        """Output tokens by prompt."""
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max(map(len, prompts)) + max_tokens,
            num_draft_tokens=self.k,
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
    args = parser.parse_args()
    name = "gsm8k" if args.data else "bundled"
    items = load_prompt_set(
        name, files={name: args.data} if args.data else {}, limit=args.limit
    ).items
    engine = EngineConfig(num_draft_tokens=None, max_num_seqs=1, max_model_len=1024)
    decoder = SpecDecoder.from_pretrained(
        "embedded", drafter="smollm2-dflash", dtype="float32", engine=engine
    )
    verifier, drafter = decoder.verifier, decoder.engine.drafter
    assert drafter is not None
    prompts = [decoder.tokenize([{"role": "user", "content": item.turns[0]}]) for item in items]
    few = prompts[: max(1, len(prompts) // 10)]
    expected = Way(32, 0).outputs(verifier, drafter, prompts, args.max_tokens)
    different = 0

    def compare(title: str, outputs: list[list[int]]) -> None:
        nonlocal different
        differing = [index for index, output in enumerate(outputs) if output != expected[index]]
        different += len(differing)
        print(
            f"{title:<44}{len(outputs) - len(differing)} of {len(outputs)} equal {differing or ''}",
            flush=True,
        )

    for way in WAYS:
        kind = "captured" if way.captured and verifier.device.type == "cuda" else "eager"
        outputs = way.outputs(verifier, drafter, few if way.slow else prompts, args.max_tokens)
        drafts = f"tree {way.tree}" if way.tree else f"k = {way.k}"
        compare(f"{way.max_num_seqs} at once, {drafts}, {kind}", outputs)
    peer = TransformersPeer("transformers", verifier, lookup=False)
    compare(
        "Transformers generate",
        peer.generate(few, [SamplingParams(max_tokens=args.max_tokens)] * len(few), concurrency=1),
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
