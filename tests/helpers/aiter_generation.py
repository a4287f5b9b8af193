"""Short generations of tiny models, for the backends that run on the emulation of AITER."""

from typing import Any

from drafters.dflash.drafter import DFlashDrafter
from specdec.model.core import Drafter, Verifier
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.guards import guard_steps
from tests.helpers.tiny_models import random_dflash, random_prompts


def wide_dflash(verifier: Verifier) -> DFlashDrafter:
    """A random DFlash drafter with heads wide enough for AITER's draft kernel."""
    return random_dflash(verifier, head_dim=16, seed=1)


def generate(
    verifier: Verifier, drafter: Drafter | None, *, guard: bool = False, **config: Any
) -> list[list[int]]:
    """Tokens of a few prompts, prefilled in chunks and decoded in batches; with `guard`, what waits
    within a step raises.
    """
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_prefill_tokens": 13, "num_draft_tokens": None}
    engine = tiny_engine(verifier, drafter, **{"cache_bytes": 2**23, **limits, **config})
    if guard:
        guard_steps(engine)
    return run_all(engine, random_prompts(4), max_tokens=8)
