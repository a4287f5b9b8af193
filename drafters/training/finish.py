"""The last stage: the check that the drafter does in the engine as in training.

The exported folder is loaded as any user would load it and answers the held-out prompts in the real
engine: greedily, in chains and
trees, and by sampling. Training replays these very answers with its own forward. Wrong rows, taps,
masks, positions, noise or lost settings all show as a difference of tau.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters.training.config import TrainConfig
from drafters.training.data.answers import sampling_of
from drafters.training.data.dataset import Answer
from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.base.errors import SpecDecError
from specdec.base.metrics import pooled
from specdec.base.writing import write_text
from specdec.session.decoder import SpecDecoder


@dataclass(frozen=True, slots=True)
class Agreement:
    """tau of the same drafter on the same answers, twice.

    Attributes:
        replayed: by training's own forward.
        engine: by the engine with the exported drafter.
        same_answers: share of the prompts that the engine answered exactly as stored; less than 1
            is rounding, in low precision.
    """

    replayed: float
    engine: float
    same_answers: float

    @property
    def difference(self) -> float:
        """Relative to the replay."""
        return abs(self.engine - self.replayed) / self.replayed

    def check(self, tolerance: float, drafts: str) -> None:
        """Accepts a difference of at most `tolerance` with these `drafts`.

        Raises:
            SpecDecError: it is larger.
        """
        if not self.difference <= tolerance:
            raise SpecDecError(
                f"tau with drafts {drafts} is {self.replayed:.3f} in training and {self.engine:.3f}"
                f" in the engine, {100 * self.difference:.1f}% apart where {100 * tolerance:.1f}%"
                f" is allowed ({100 * self.same_answers:.0f}% of the answers are the same):"
                " suspect, in this order, row alignment, tap numbering, chat template, a mask"
                " leak, RoPE; the exported drafter is kept"
            )


def engine_run(
    config: TrainConfig, drafter: Path, answers: list[Answer], shape: BlockShape
) -> tuple[float, list[Answer]]:
    """tau of the exported drafter in the engine on `answers`' prompts, and its answers.

    Every step drafts a block of `shape`: the replay counts whole blocks.

    Raises:
        SpecDecError: the drafter or the engine fails.
    """
    engine = EngineConfig(
        max_num_seqs=min(config.max_num_seqs, len(answers)),
        num_draft_tokens=None if shape.is_tree else shape.drafts,
        tree_nodes=shape.drafts if shape.is_tree else None,
    )
    decoder = SpecDecoder.from_pretrained(
        config.model,
        drafter=str(drafter.resolve()),
        device=config.device,
        dtype=config.dtype,
        attention=config.attention,
        engine=engine,
    )
    params = [sampling_of(config, a.temperature, a.seed, a.few_shot) for a in answers]
    asked = zip(answers, params, strict=True)
    handles = [decoder.session.submit(list(answer.prompt_ids), how) for answer, how in asked]
    results = [handle.result() for handle in handles]
    failed = next((result.error for result in results if result.error), None)
    if failed:
        raise SpecDecError(f"the engine failed on a held-out prompt: {failed}")
    pairs = zip(answers, results, strict=True)
    answered = [replace(answer, answer_ids=result.token_ids) for answer, result in pairs]
    return pooled(result.stats for result in results).tau, answered


def write_report(
    config: TrainConfig, agreements: dict[str, Agreement], about: dict[str, Any]
) -> Path:
    """Writes `report.json`, the first figures at its top level too, and returns its path."""
    path = config.folder / "report.json"
    figures = {
        name: {
            "tau_replayed": agreement.replayed,
            "tau_engine": agreement.engine,
            "difference": agreement.difference,
            "same_answers": agreement.same_answers,
        }
        for name, agreement in agreements.items()
    }
    first = next(iter(figures.values()))
    write_text(path, json.dumps(first | {"drafts": figures} | about, indent=2) + "\n")
    return path
