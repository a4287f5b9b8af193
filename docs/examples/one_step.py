"""Draft, verify, accept, commit by hand: greedy, one request, the embedded model on a CPU."""

from typing import Any

import torch

from specdec import SpecDecoder
from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, VerifyOutput
from specdec.sampling.tensors import SamplingTensors

K, ROOM = 7, 256  # drafts per step; positions of the request, 16 in each of its cache blocks
decoder = SpecDecoder.from_pretrained("embedded", device="cpu", dtype="float32")
engine: Any = decoder.engine
target, drafter = engine.verifier, engine.runner.drafter
caches, taps = engine.kv_cache.layers[: len(target.kv_specs)], engine.drafter.aux_layer_ids
table, greedy = torch.arange(1, 18).int()[None], SamplingTensors.neutral(1, target.device)


def rows(length: int, anchor: int, drafts: int) -> DecodeBatch:
    """The anchor and its drafts, behind `length` tokens that are in the cache."""
    places = torch.tensor([0]), torch.tensor([anchor]), torch.tensor([length]), table
    return DecodeBatch(*places, BlockShape(drafts), ROOM, 16, ROOM, greedy)


def draft(batch: DecodeBatch) -> torch.Tensor:
    """Block [1, 1 + K] of the anchor and its drafts: one forward of the drafter."""
    return torch.cat([batch.anchors[:, None], drafter.propose(batch).token_ids], dim=1)


def verify(batch: DecodeBatch, block: torch.Tensor) -> VerifyOutput:
    """Logits [1 + K, vocabulary] and features of the rows: one forward of the target."""
    return target.forward(batch.verification(block, None, max_pending=0), caches, taps)


def accept(block: torch.Tensor, choices: torch.Tensor) -> AcceptOutput:
    """The drafts before the first that the target does not choose, and its own token there."""
    kept = (block[:, 1:] == choices[:, :-1]).long().cumprod(1).sum(1)
    return AcceptOutput(choices, kept, choices[0, kept], finite=torch.tensor([True]))


def commit(batch: DecodeBatch, block: torch.Tensor, kept: AcceptOutput, out: VerifyOutput) -> int:
    """The drafter reads the features of the kept rows; tokens in the cache from now on."""
    drafter.commit(batch, block, kept, out)
    return int(batch.seq_lens + kept.num_accepted + 1)


prompt = decoder.tokenize([{"role": "user", "content": "Count from 1 to 20."}])
batch, block = rows(0, prompt[0], len(prompt) - 2), torch.tensor([prompt[:-1]])
kept = accept(block, torch.tensor([prompt[1:]]))  # a prompt is a block that is right
length, output = commit(batch, block, kept, verify(batch, block)), list[int]()
while len(output) < 48:
    batch = rows(length, output[-1] if output else prompt[-1], K)
    block = draft(batch)
    out = verify(batch, block)
    kept = accept(block, out.logits.argmax(-1)[None])
    length = commit(batch, block, kept, out)
    output += kept.token_ids[0, : kept.num_accepted + 1].tolist()
    print(int(kept.num_accepted), repr(decoder.tokenizer.decode(output)))
