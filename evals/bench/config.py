"""What `specdec bench` measures, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from evals.prompt_sets import PromptSet
from evals.report.sides import PLAIN
from specdec.base.config import CacheConfig, DraftSampling, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.sampling.params import SamplingParams

DraftCount = int | Literal["auto"] | None
"""k of a side: a number, the drafter's own (None), or chosen step by step as the fastest."""

Budget = float | Literal["auto"]
"""See `EngineConfig.verify_budget`."""

MAX_WARMUP = 10
"""Untimed passes at most of a side that goes on capturing: one pass does not meet all shapes."""


class SideKind(NamedTuple):
    """What the blocks of a side are; see `EngineConfig`."""

    k: DraftCount = None
    tree: int | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is measured.

    Attributes:
        sets: prompt sets.
        drafters: names or checkpoints, as `SpecDecoder.from_pretrained` takes them.
        num_draft_tokens: values of k, see `DraftCount`.
        trees: numbers of drafts that form a tree, further sides beside those of k.
        budgets: drafts verified of a request on average, further sides of every number of k and
            every tree that has more; "auto", of k that is chosen.
        temperatures: 0 is greedy.
        top_k, top_p: of sampled decoding, see `SamplingParams`.
        concurrencies: conversations decoded at once.
        max_tokens: most output tokens per turn.
        repeats: timed passes of every side, taken in turn.
        warmup: untimed passes before them, and more while steps are captured, up to `MAX_WARMUP`.
        seed: item `i` uses `seed + i`.
        raw: continue prompts as text, without the chat template.
        peers: other systems to measure beside, see `evals.peers.peer`.
        graphs: what to capture, see `EngineConfig`.
        memory_bytes: budget of each side's cache; None takes the device's default.
        max_model_len: most tokens of a conversation; None takes what the target is made for.
        max_prefill_tokens, draft_sampling: see `EngineConfig`.
        behind_hits: ask every prompt once more, from the prefix cache.
    """

    sets: tuple[PromptSet, ...]
    drafters: tuple[str, ...] = ("auto",)
    num_draft_tokens: tuple[DraftCount, ...] = (None,)
    trees: tuple[int, ...] = ()
    budgets: tuple[Budget, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    concurrencies: tuple[int, ...] = (1,)
    max_tokens: int = 256
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    raw: bool = False
    peers: tuple[str, ...] = ()
    graphs: bool | None = None
    memory_bytes: int | None = None
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    draft_sampling: DraftSampling = "coupled"
    behind_hits: bool = False

    def __post_init__(self) -> None:
        for name, values in (
            ("prompt set", self.sets),
            ("drafter", self.drafters),
            ("temperature", self.temperatures),
            ("concurrency", self.concurrencies),
        ):
            if not values:
                raise InvalidInputError(f"no {name} is given; name at least one")
        if self.repeats < 1:
            raise InvalidInputError(f"repeats is {self.repeats}; it must be at least 1")
        if self.warmup < 0:
            raise InvalidInputError(f"warmup is {self.warmup}; it must be 0 or more passes")
        if self.peers and max(self.temperatures) > 0:
            raise InvalidInputError(
                f"peers are compared in greedy decoding and the temperature is"
                f" {max(self.temperatures):g}; use temperature 0"
            )
        if PLAIN in self.drafters or 0 in self.num_draft_tokens or 0 in self.trees:
            what = "plain decoding is always measured"
            raise InvalidInputError(f"{what}; leave out drafter none, k = 0 and trees of 0 drafts")
        for nodes in self.trees:
            EngineConfig(tree_nodes=nodes)
        for budget in self.budgets:
            k: Any = "auto" if budget == "auto" else None
            EngineConfig(num_draft_tokens=k, verify_budget=budget)
        if self.budgets and not any(kind.budget for kind in self.kinds):
            what = f"budgets are {' '.join(map(str, self.budgets))} and no block has more drafts"
            raise InvalidInputError(f"{what}; give larger numbers to -k or --tree")
        for temperature in self.temperatures:
            self.sampling(temperature)
        for concurrency in self.concurrencies:
            self.engine(concurrency, self.max_model_len, SideKind())

    @property
    def kinds(self) -> list[SideKind]:
        """The sides of every drafter."""
        whole = [SideKind(k) for k in self.num_draft_tokens]
        whole += [SideKind(tree=nodes) for nodes in self.trees]
        numbers = [(kind, kind.tree or kind.k) for kind in whole]
        return whole + [
            kind._replace(budget=budget)
            for kind, most in numbers
            for budget in self.budgets
            if (budget == "auto" and most == "auto")
            or (isinstance(most, int) and isinstance(budget, int | float) and budget < most)
        ]

    def sampling(self, temperature: float) -> SamplingParams:
        """How to decode at a temperature."""
        return SamplingParams(
            self.max_tokens, temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )

    def engine(self, concurrency: int, max_model_len: int | None, kind: SideKind) -> EngineConfig:
        """The engine of a side."""
        return EngineConfig(
            max_num_seqs=concurrency,
            max_model_len=max_model_len,
            max_prefill_tokens=self.max_prefill_tokens,
            draft_sampling=self.draft_sampling,
            num_draft_tokens=kind.k,
            tree_nodes=kind.tree,
            verify_budget=kind.budget,
            graphs=self.graphs,
            cache=CacheConfig(memory_bytes=self.memory_bytes, prefix_caching=self.behind_hits),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What belongs in the report."""
        names = ["max_tokens", "top_k", "top_p", "repeats", "warmup", "seed", "raw", "graphs"]
        names += ["max_model_len", "max_prefill_tokens", "draft_sampling", "behind_hits"]
        sets = [
            {
                "name": one.name,
                "source": one.source,
                "num_items": len(one.items),
                "sha256": one.sha256,
                "tasks": one.tasks if any(one.tasks) else [],
            }
            for one in self.sets
        ]
        return {name: getattr(self, name) for name in names} | {"prompt_sets": sets}
