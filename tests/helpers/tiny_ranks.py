"""What each rank of a group makes of a folder of tiny targets; imported by the ranks themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.selector import select_backend
from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.engine.engine import SpecEngine
from specdec.parallel.group import Group
from tests.helpers.tiny_models import random_dflash, random_prompts
from tests.verifiers.test_hf import PackedRun
from verifiers.checkpoint import read_weights
from verifiers.complete import complete, shapes_of
from verifiers.decoder import DecoderVerifier
from verifiers.families import describe
from verifiers.shape import backend_spec
from verifiers.shares import Share, shared
from verifiers.weights import Weights
from verifiers.wrappers import read_config

SEQUENCE = [*range(3, 60)]


class Way(NamedTuple):
    """How a target decodes."""

    k: int
    temperature: float


class Made(NamedTuple):
    """By one rank, of one target."""

    logits: Tensor  # of `SEQUENCE`
    tokens: list[list[int]]
    drafted: list[list[int]]  # per step
    accepted: list[list[int]]
    weight_bytes: int
    bytes_per_token: int  # of the cache


def read_target(folder: Path, group: Group | None, dtype: torch.dtype = torch.float32) -> DecoderVerifier:
    """A rank's share of the target in a folder, or all of it."""
    config = read_config(str(folder))
    description = describe(shared(config, group))
    assert description is not None
    share = None if group is None else Share(config, description, group, name=folder.name)
    if share is not None:
        share.check(shapes_of(config))
    device = torch.device("cpu")
    spec = backend_spec(shared(config, group), device=device, dtype=dtype, block_size=4)
    read = read_weights(folder, config, device=device, dtype=dtype, as_stored=False, share=share)
    weights = Weights(complete(read, config, share), group=group)
    return DecoderVerifier(config, description, weights, name=folder.name, backend=select_backend("torch_ref", spec))


def make(group: Group | None, folders: Mapping[str, Path], ways: Mapping[str, Way]) -> dict[str, Made]:
    """Logits of a sequence in three chunks, and what an engine with a drafter writes, of every target."""
    return {name: _made(read_target(folder, group), ways[name]) for name, folder in folders.items()}


def _made(verifier: DecoderVerifier, way: Way) -> Made:
    run, count = PackedRun(verifier, [SEQUENCE]), len(SEQUENCE)
    spans = ((0, 9), (9, count - 1), (count - 1, count))
    logits = torch.cat([run.forward([(0, *span)])[0] for span in spans])
    per_token = sum(spec.bytes_per_token(torch.float32) for spec in verifier.kv_specs)
    return Made(logits, *decode(verifier, way), verifier.weight_bytes, per_token)


def decode(verifier: DecoderVerifier, way: Way) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, drafts and accepted drafts of two prompts, with a random drafter that every rank has whole."""
    config = EngineConfig(max_num_seqs=2, max_prefill_tokens=13, cache=CacheConfig(memory_bytes=2**22), num_draft_tokens=way.k)
    engine: Any = SpecEngine(verifier, random_dflash(verifier, block_size=8), config)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=6, temperature=way.temperature, top_p=0.9, seed=number))
        for number, prompt in enumerate(random_prompts(2, seed=6, longest=16))
    ]
    while engine.has_work:
        engine.step()
    names = ("output_token_ids", "num_drafted", "num_accepted")
    tokens, drafted, accepted = ([list(getattr(request, name)) for request in requests] for name in names)
    return tokens, drafted, accepted
