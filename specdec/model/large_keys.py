"""Layers whose keys are too large for an 8-bit cache."""

import logging
from dataclasses import replace

import torch

from specdec.attention.backend import AttentionBackend
from specdec.kv_cache import KVLayerSpec, LayerSpec
from specdec.model.core import Verifier
from specdec.model.scratch import ScratchCache
from specdec.parallel.collectives import all_agree
from specdec.parallel.group import group_of

logger = logging.getLogger(__name__)

MAX_KEY = 128.0
"""Largest number among the keys of an 8-bit cache: beyond it e4m3's lie 16 and 32 apart, and a
query multiplies what is rounded away. Biases make the keys of Qwen2's first layer as large as 350.
"""

NUM_TOKENS = 64
"""Tokens of the text by which keys are measured."""


@torch.inference_mode()
def fitting_specs(verifier: Verifier) -> list[LayerSpec]:
    """What the target's layers store where the cache has 8 bits: those with larger keys than
    `MAX_KEY` in a text of random tokens keep the model's own type, and one line says so. All ranks
    of a target call this, and agree.
    """
    attention, dtype = verifier.attention, verifier.dtype
    if not isinstance(attention, AttentionBackend) or attention.spec.kv_dtype == dtype:
        return list(verifier.kv_specs)
    plain = [
        replace(spec, dtype=dtype) if isinstance(spec, KVLayerSpec) else spec
        for spec in verifier.kv_specs
    ]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(verifier.vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    cache = ScratchCache(verifier, [NUM_TOKENS], plain)
    verifier.forward(cache.rows([(0, 0, tokens)]), cache.layers)
    largest = {
        place: layer.key.abs().max().item()
        for place, (spec, layer) in enumerate(zip(plain, cache.layers, strict=True))
        if isinstance(spec, KVLayerSpec)
    }
    group = group_of(verifier)
    large = [n for n, value in largest.items() if not all_agree(value <= MAX_KEY, group)]
    if not large:
        return list(verifier.kv_specs)
    say = logger.warning if group is None or group.rank == 0 else logger.debug
    layers = f"layer{'s' * (len(large) > 1)} {', '.join(map(str, large))}"
    reach = f"keys of {layers} are as large as {max(largest.values()):.0f}"
    if not attention.mixes_cache_types:
        what = f"{reach}, which 8-bit floats round by up to 16"
        say("%s: answers will differ; --kv-dtype auto rounds nothing", what)
        return list(verifier.kv_specs)
    say("%s, so the cache of these stays in %s", reach, str(dtype).removeprefix("torch."))
    return [plain[n] if n in large else spec for n, spec in enumerate(verifier.kv_specs)]
