"""Layers whose keys are too large for an 8-bit cache."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from specdec.attention.mla import MlaBackend
from specdec.kv_cache import KVLayerSpec, LatentLayerSpec, LayerSpec
from specdec.model.batch import PrefillBatch
from specdec.model.core import Drafter, Verifier
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
def fitting_specs(verifier: Verifier, drafter: Drafter | None = None) -> list[LayerSpec]:
    """What the layers of a target, or of a drafter for it, store where the cache has 8 bits: those
    with larger keys than `MAX_KEY` in a text of random tokens keep the model's own type where the
    backend allows it; one line says so. All ranks of a target call this, and agree.
    """
    attention, group = verifier.attention, group_of(verifier)
    specs: list[LayerSpec] = list((drafter or verifier).kv_specs)
    if attention.spec.kv_dtype == verifier.dtype or not specs:
        return specs
    # as they are stored: what saturates is large, too
    written = _written(verifier, drafter, specs)
    largest = {
        place: layer[0].float().abs().max().item()
        for place, (spec, layer) in enumerate(zip(specs, written, strict=True))
        if isinstance(spec, LatentLayerSpec) or (isinstance(spec, KVLayerSpec) and not spec.dtype)
    }
    large = [n for n, value in largest.items() if not all_agree(value <= MAX_KEY, group)]
    kept = [n for n in large if _may_keep(specs[n], verifier, drafter)]
    for place in kept:
        specs[place] = replace(cast("KVLayerSpec", specs[place]), dtype=verifier.dtype)
    say = logger.warning if group is None or group.rank == 0 else logger.debug
    for some in filter(None, (kept, [n for n in large if n not in kept])):
        what = "keys" if isinstance(specs[some[0]], KVLayerSpec) else "latents"
        whose = "the drafter's " * (drafter is not None) + "layer" + "s" * (len(some) > 1)
        reach = f"as large as {max(largest[n] for n in some):.0f}"
        start = f"{what} of {whose} {', '.join(map(str, some))} are {reach}"
        if some is kept:
            own = str(verifier.dtype).removeprefix("torch.")
            say("%s, so the cache of these stays in %s", start, own)
        else:
            differ = "fewer drafts may be accepted" if drafter else "answers will differ"
            rounded = "which 8-bit floats round by 16 or more"
            say("%s, %s: %s; --kv-dtype auto rounds nothing", start, rounded, differ)
    return specs


def _may_keep(spec: LayerSpec, verifier: Verifier, drafter: Drafter | None) -> bool:
    """Whether a layer's cache may have another type than the others."""
    attention = verifier.attention
    if drafter is None:
        return attention.mixes_cache_types
    # what serves ordinary heads beside latent attention mixes types
    alike = isinstance(attention, MlaBackend) or attention.mixes_cache_types
    return isinstance(spec, KVLayerSpec) and alike


def _written(
    verifier: Verifier, drafter: Drafter | None, specs: Sequence[LayerSpec]
) -> Sequence[Any]:
    """The caches of these layers behind a text of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(verifier.vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    target = ScratchCache(verifier, [NUM_TOKENS])
    rows = target.rows([(0, 0, tokens)])
    if drafter is None:
        verifier.forward(rows, target.layers)
        return target.layers
    own = ScratchCache(verifier, [NUM_TOKENS], specs).layers
    sizes = {"max_num_seqs": 1, "max_len": NUM_TOKENS}
    bound = drafter.bind(verifier, own, **sizes, draft_sampling="coupled")
    bound.begin(0, tokens)
    slots = torch.zeros(1, dtype=torch.int64, device=verifier.device)
    features = verifier.forward(rows, target.layers, drafter.aux_layer_ids)
    bound.prefill(PrefillBatch(rows, slots, next_token_ids=slots), features)
    return own
