"""What each rank of a group makes of a folder of tiny targets; imported by the ranks themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.dflash.drafter import DFlashDrafter
from specdec.parallel.group import Group
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import random_dflash, random_prompts
from tests.verifiers.test_hf import BLOCK, PackedRun
from verifiers.decoder import DecoderVerifier
from verifiers.load import load_verifier

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


def random_drafter(path: Path | None, *, verifier: DecoderVerifier) -> DFlashDrafter:
    """What every rank makes of `module:function`."""
    return random_dflash(verifier)


def divided_drafter(path: Path | None, *, verifier: DecoderVerifier) -> DFlashDrafter:
    """The same, of which every rank has a part."""
    return random_dflash(verifier, divides=True)


def make(
    group: Group | None, folders: Mapping[str, Path], ways: Mapping[str, Way]
) -> dict[str, Made]:
    """Logits of a sequence in three chunks, and what an engine with a drafter writes, of every
    target.
    """
    made, device = {}, torch.device("cpu")
    for name, folder in folders.items():
        options: dict[str, Any] = {"attention": "torch_ref", "block_size": BLOCK, "group": group}
        verifier, _ = load_verifier(folder, device=device, dtype=torch.float32, **options)
        assert isinstance(verifier, DecoderVerifier)
        made[name] = _made(verifier, ways[name])
    return made


def _made(verifier: DecoderVerifier, way: Way) -> Made:
    run, count = PackedRun(verifier, [SEQUENCE]), len(SEQUENCE)
    spans = ((0, 9), (9, count - 1), (count - 1, count))
    logits = torch.cat([run.forward([(0, *span)])[0] for span in spans])
    per_token = sum(spec.bytes_per_token(torch.float32) for spec in verifier.kv_specs)
    return Made(logits, *decode(verifier, way), verifier.weight_bytes, per_token)


def decode(
    verifier: DecoderVerifier, way: Way
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, drafts and accepted drafts of two prompts, with a random drafter that every rank has
    whole.
    """
    engine: Any = tiny_engine(
        verifier,
        random_dflash(verifier, block_size=8),
        max_num_seqs=2,
        max_prefill_tokens=13,
        num_draft_tokens=way.k,
    )
    requests = [
        engine.add_request(
            prompt,
            SamplingParams(max_tokens=6, temperature=way.temperature, top_p=0.9, seed=number),
        )
        for number, prompt in enumerate(random_prompts(2, seed=6, longest=16))
    ]
    finish(engine)
    names = ("output_token_ids", "num_drafted", "num_accepted")
    tokens, drafted, accepted = (
        [list(getattr(request, name)) for request in requests] for name in names
    )
    return tokens, drafted, accepted
