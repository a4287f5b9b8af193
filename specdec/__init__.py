"""specdec: lossless speculative decoding centred on DFlash.

Map of the package, in reading order: `engine` (the step), `core` (the nouns), `scheduler`, `state`, `kv_cache`, `attention`,
`sampling`, `acceptance`; `decoder` is the Python API and `cli` the command line. Drafters, targets and evaluations live in the
packages `drafters`, `verifiers` and `evals`, which `registry` names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.config import CacheConfig, EngineConfig, SamplingParams
    from specdec.decoder import GenerationResult, SpecDecoder, StreamChunk
    from specdec.errors import SpecDecError
    from specdec.metrics import AcceptanceStats

__version__ = "0.1.0"

_HOMES = {
    "AcceptanceStats": "specdec.metrics",
    "CacheConfig": "specdec.config",
    "EngineConfig": "specdec.config",
    "GenerationResult": "specdec.decoder",
    "SamplingParams": "specdec.config",
    "SpecDecError": "specdec.errors",
    "SpecDecoder": "specdec.decoder",
    "StreamChunk": "specdec.decoder",
}

__all__ = [
    "AcceptanceStats",
    "CacheConfig",
    "EngineConfig",
    "GenerationResult",
    "SamplingParams",
    "SpecDecError",
    "SpecDecoder",
    "StreamChunk",
]


def __getattr__(name: str) -> Any:
    """Public names on first use, so that `specdec --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
