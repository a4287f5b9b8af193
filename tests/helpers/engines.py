"""Engines around tiny targets, which run until nothing is left to do."""

from collections.abc import Iterable
from typing import Any

from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams


def tiny_engine(
    verifier: Verifier, drafter: Drafter | None = None, *, cache_bytes: int = 2**22, **options: Any
) -> SpecEngine:
    """With `options` of `EngineConfig`."""
    cache = CacheConfig(memory_bytes=cache_bytes)
    return SpecEngine(verifier, drafter, EngineConfig(**{"cache": cache, **options}))


def finish(engine: SpecEngine, *requests: Request) -> list[list[int]]:
    """What these have put out, once the engine has no work."""
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def run_all(
    engine: SpecEngine,
    prompts: Iterable[list[int]],
    params: SamplingParams | None = None,
    **sampling: Any,
) -> list[list[int]]:
    """What requests of these prompts put out, all at once, with `params` or these `sampling`."""
    params = params or SamplingParams(**sampling)
    return finish(engine, *[engine.add_request(prompt, params) for prompt in prompts])
