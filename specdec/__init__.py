"""specdec: lossless speculative decoding centered on DFlash.

Read `engine.engine` (the step), then `model.core` (the nouns); docs/life-of-a-request.md follows a
prompt through the rooms. Drafters, targets and evaluations live in the packages `drafters`,
`verifiers` and `evals`, which `base.registry` names.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.base.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Read when torch is imported: threads wait for each other awake for some 0.1 ms instead of 10,
    # since beside another busy process the one that is waited for may need this very core.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
    from specdec.base.errors import SpecDecError
    from specdec.base.metrics import AcceptanceStats
    from specdec.engine.engine import SpecEngine
    from specdec.grammar.grammar import Grammar
    from specdec.model.core import BoundDrafter, Drafter, Verifier
    from specdec.sampling.params import SamplingParams
    from specdec.session.decoder import SpecDecoder
    from specdec.session.handle import Handle, Stream
    from specdec.session.outputs import GenerationResult, StreamChunk
    from specdec.session.session import Session

_HOMES = {
    "base.config": ("CacheConfig", "EngineConfig", "LoadConfig"),
    "sampling.params": ("SamplingParams",),
    "model.core": ("BoundDrafter", "Drafter", "Verifier"),
    "session.decoder": ("SpecDecoder",),
    "engine.engine": ("SpecEngine",),
    "session.handle": ("Handle", "Stream"),
    "session.session": ("Session",),
    "base.errors": ("SpecDecError",),
    "grammar.grammar": ("Grammar",),
    "base.metrics": ("AcceptanceStats",),
    "session.outputs": ("GenerationResult", "StreamChunk"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Public names on first use, so that `specdec --help` does not wait for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"specdec.{module}"), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
