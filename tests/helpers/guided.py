"""A tiny target whose tokens are characters, grammars for it, and engines around both."""

from typing import Any

from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts, tiny_tokenizer

MAX_TOKENS = 40

GRAMMARS: list[Grammar | None] = [
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
            },
            "required": ["id", "tags"],
        }
    ),
    Grammar.regex("(ab|ba|c{2,9})+d"),
    None,
    Grammar.choice(["yes", "yesterday", "no"]),
    Grammar.ebnf('root ::= "(" root ")" | [x-z]'),
]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2},
    "filtered": {
        "temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
        "logprobs": True,
    },
}  # fmt: skip


class GuidedCase:
    """A target, a prompt for each grammar, and what plain decoding makes of them."""

    def __init__(self) -> None:
        self.model = plain_model("llama")
        self.verifier: Verifier = paged_verifier(self.model)
        self.tokenizer = tiny_tokenizer()
        self.prompts = random_prompts(len(GRAMMARS), seed=4)
        self.grammars = GrammarCompiler(
            self.tokenizer, self.verifier.vocab_size, self.verifier.eos_token_ids
        )
        self.plain = {
            name: self.run(self.engine(None), **sampling) for name, sampling in SAMPLINGS.items()
        }

    def engine(
        self, drafter: Drafter | None, *, num_blocks: int = 300, **changes: Any
    ) -> SpecEngine:
        specs = [*self.verifier.kv_specs, *(drafter.kv_specs if drafter else [])]
        cache = CacheConfig(
            memory_bytes=num_blocks
            * 4
            * sum(spec.bytes_per_token(self.verifier.dtype) for spec in specs)
        )
        options = {
            "max_num_seqs": 4,
            "max_prefill_tokens": 13,
            "num_draft_tokens": None,
            "cache": cache,
            **changes,
        }
        return SpecEngine(self.verifier, drafter, EngineConfig(**options), self.grammars)

    def add(self, engine: SpecEngine, **sampling: Any) -> list[Request]:
        """A request for each grammar, each with a seed of its own."""
        pairs = enumerate(zip(self.prompts, GRAMMARS, strict=True))
        params = {"max_tokens": MAX_TOKENS, **sampling}
        return [
            engine.add_request(p, SamplingParams(seed=seed, grammar=grammar, **params))
            for seed, (p, grammar) in pairs
        ]

    def run(self, engine: SpecEngine, **sampling: Any) -> list[Request]:
        requests = self.add(engine, **sampling)
        finish(engine)
        assert engine.pool.num_used == 0
        return requests

    def outputs(self, sampling: str) -> dict[tuple[int, ...], list[int]]:
        """By prompt, as plain decoding writes them."""
        return {
            tuple(request.prompt_token_ids): request.output_token_ids
            for request in self.plain[sampling]
        }

    def text(self, request: Request) -> str:
        return str(self.tokenizer.decode(request.output_token_ids, skip_special_tokens=True))


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]
