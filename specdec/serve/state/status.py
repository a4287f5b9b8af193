"""The page at `/`, which shows what the server does, and the numbers that it asks for."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from specdec.serve.front import Front

PAGE = files("specdec.serve.state").joinpath("status.html").read_text("utf-8")
"""All of it in one file, so that it works without a network."""


def status_of(front: Front, seconds: float) -> dict[str, Any]:
    """What a server does so many seconds after its start: numbers of now, and counts that only
    rise. A rate is the difference of two, divided by that of their `seconds`.
    """
    totals, engine, numbers = front.count(), front.engine.facts, front.engine.numbers
    return {
        "model": front.names[0], "drafter": front.drafter, "seconds": seconds,
        "running": numbers.running, "waiting": front.num_waiting,
        "max_num_seqs": engine.max_num_seqs, "blocks_used": numbers.blocks_used,
        "blocks": engine.num_blocks, "finished": sum(totals.finished.values()),
        "output_tokens": totals.output_tokens, "prompt_tokens": numbers.queried,
        "cached_tokens": numbers.found, "steps": totals.steps, "step_tokens": totals.step_tokens,
        "offered": totals.offered, "accepted": totals.accepted, "rows": front.engine.rows._asdict(),
    }  # fmt: skip
