"""A drafter of your own, under a name that `from_pretrained` knows in this program.

    python docs/examples/own_drafter.py

It drafts the tokens that followed the anchor's last occurrence, as far as it has seen the text.
Drafts decide how fast the answer comes, and never what it says. On the command line give its
loader: `PYTHONPATH=FOLDER specdec generate ... --drafter module:function`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec import BoundDrafter, Drafter, SpecDecoder, Verifier
from specdec.base.registry import register_drafter
from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, DraftOutput, VerifyOutput


class Followers(Drafter):
    """Weights and choices, shared by all engines: here none."""

    max_draft_tokens = 4

    def bind(
        self, verifier: Verifier, caches: Sequence[Any], *, max_num_seqs: int, **_: Any
    ) -> BoundDrafter:
        shape = max_num_seqs, verifier.vocab_size
        return BoundFollowers(torch.zeros(shape, dtype=torch.int64, device=verifier.device))


class BoundFollowers(BoundDrafter):
    """The state of one engine's requests: `table` [slots, vocabulary], the token that came next."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        tokens = torch.tensor(token_ids, device=self.table.device)
        self.table[slot, tokens[:-1]] = tokens[1:]

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        tokens = [batch.anchors]
        for _ in range(batch.k):
            tokens.append(self.table[batch.slots, tokens[-1]])
        return DraftOutput(torch.stack(tokens[1:], dim=1))

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        last = token_ids.gather(1, accept.num_accepted[:, None])[:, 0]
        self.table[batch.slots, last] = accept.next_anchors


register_drafter("followers", lambda path, *, verifier: Followers())

text = "The quick brown fox jumps. The quick brown fox"
decoder = SpecDecoder.from_pretrained("embedded", drafter="followers")
drafted = decoder.generate(text, max_tokens=40)
plain = decoder.plain().generate(text, max_tokens=40)
print(drafted.text)
print("identical" if drafted.token_ids == plain.token_ids else "different")
print(f"{drafted.stats.tau:.2f} tokens per step of the target")
