"""Networks of one layer that draft token by token, paged and in plain torch."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.attention import attention_like
from drafters.sequential.drafter import SequentialDrafter
from drafters.sequential.network import Mask, Rows, SequentialNetwork
from specdec.attention.backend import AttentionBackend
from specdec.base.blocks import BlockShape
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.kv_cache import KVLayerSpec, LayerSpec
from specdec.layers.attention import HeadAttention
from specdec.layers.decoder import Decoder, DecoderLayer
from specdec.layers.linear_choice import linear
from specdec.layers.mlp import GatedMLP
from specdec.layers.ops.choice import ops_for
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Heads
from specdec.layers.rotary.rotary import Angles, Rope, rotate
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_model

HIDDEN, HEADS, KV_HEADS, DIM, TAPS = 32, 4, 2, 16, (0, 2)


class ToyNetwork(SequentialNetwork):
    """A layer over embeddings, with features over both; drafts all tokens or half."""

    def __init__(
        self,
        verifier: Verifier,
        *,
        features: bool = True,
        parallel: bool = False,
        reduced: bool = False,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return 0.3 * torch.randn(*shape, generator=generator)

        self.verifier, self.window = verifier, window
        self.backend: AttentionBackend = attention_like(
            verifier, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, windows=[window]
        )
        self.fc, self.join = random(HIDDEN, len(TAPS) * HIDDEN), random(HIDDEN, 2 * HIDDEN)
        self.qkv = random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        self.output = random(HIDDEN, HEADS * DIM)
        self.gate_up, self.down = random(96, HIDDEN), random(HIDDEN, 48)
        self.norms = [1 + random(HIDDEN) for _ in range(3)]
        self.rope = Rope.of({"rope_type": "default", "rope_theta": 1e4}, DIM, 512)
        self.aux_layer_ids = TAPS if features else ()
        self.feature_size = HIDDEN if features else 0
        self.target_ids = torch.arange(0, verifier.vocab_size, 2) if reduced else None
        self.mask = Mask(5, random(HIDDEN)) if parallel else None
        layer = DecoderLayer(
            input_norm=Norm(self.norms[0], 1e-6),
            attention=HeadAttention(
                linear(self.qkv), Heads(scale=DIM**-0.5, window=window), self.rope
            ),
            output=linear(self.output),
            mlp_norm=Norm(self.norms[1], 1e-6),
            mlp=GatedMLP(linear(self.gate_up), linear(self.down)),
        )
        self.decoder = Decoder([layer], Norm(self.norms[2], 1e-6), ops=ops_for(self.backend))

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        return [KVLayerSpec(KV_HEADS, DIM)]

    @property
    def weight_bytes(self) -> int:
        return self.qkv.nbytes + self.output.nbytes + self.gate_up.nbytes + self.down.nbytes

    def condense(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden @ self.fc.T

    def given(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """What the layer is given."""
        embeddings = self.verifier.embed(token_ids)
        return (
            embeddings
            if features is None
            else torch.cat([embeddings, features], dim=-1) @ self.join.T
        )

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        angles = self.decoder.angles(rows.position_ids, torch.float32)
        plan = self.backend.plan(rows.metadata)
        keep = None if wanted is None else lambda x: x.index_select(0, wanted)
        given = self.given(rows.token_ids, rows.features)
        normed, (stream,) = self.decoder(
            given, angles, [self.backend], caches, [plan], (0,), keep=keep
        )
        return torch.stack([normed, stream], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.verifier.head(hidden[:, 0])
        return logits if self.target_ids is None else logits[:, self.target_ids]

    def next_features(self, hidden: Tensor) -> Tensor | None:
        return hidden[:, 1] if self.feature_size else None

    def plain(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """`forward` of a whole text [T] at positions 0, 1, ..., written out."""
        stream = self.given(token_ids, features)
        count = len(stream)
        cos, sin = Angles.of(torch.arange(count), self.rope, torch.float32).doubled
        normed = F.rms_norm(stream, (HIDDEN,), self.norms[0], 1e-6)
        query, key, value = (
            (normed @ self.qkv.T).view(count, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        key, value = (
            x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (rotate(key, cos, sin), value)
        )
        scores = torch.einsum("qhd,khd->hqk", rotate(query, cos, sin), key) * DIM**-0.5
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden_ones = (distance < 0) | (distance >= (self.window or count))
        attended = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden_ones, -torch.inf).softmax(-1), value
        )
        stream = stream + attended.flatten(1) @ self.output.T
        gate, up = (F.rms_norm(stream, (HIDDEN,), self.norms[1], 1e-6) @ self.gate_up.T).chunk(
            2, dim=-1
        )
        stream = stream + (F.silu(gate) * up) @ self.down.T
        return torch.stack([F.rms_norm(stream, (HIDDEN,), self.norms[2], 1e-6), stream], dim=1)


def plain_logits(
    network: Any, text: Sequence[int], aux_hidden: Tensor | None, drafts: Sequence[int]
) -> Tensor:
    """Logits [k, V'] of `drafts`, given those before them, every row of every forward computed
    anew.

    Args:
        network: with `plain`.
        text: all tokens up to the anchor.
        aux_hidden: what its features are condensed from, of all of these but the last; None without
            features.
        drafts: k tokens.
    """
    features = None if aux_hidden is None else network.condense(aux_hidden)
    ahead, found = 0 if features is None else 1, []
    tokens = [*text[ahead:], *drafts[:-1]]
    if network.mask is not None:
        tokens[len(text) - ahead :] = [network.mask.token_id] * (len(drafts) - 1)
        if features is not None:
            features = torch.cat([features, network.mask.features.expand(len(drafts) - 1, -1)])
        return network.logits(network.plain(torch.tensor(tokens), features)[-len(drafts) :])
    for draft in range(len(drafts)):
        hidden = network.plain(torch.tensor(tokens[: len(text) - ahead + draft]), features)[-1:]
        features = (
            None if features is None else torch.cat([features, network.next_features(hidden)])
        )
        found.append(network.logits(hidden))
    return torch.cat(found)


class Noted(NamedTuple):
    """Drafts of a request after `length` tokens and its anchor, and the logits [k, V'] that they
    were chosen by.

    Of a tree they are the likeliest token of each position, or of the first one where several paths
    of a level go on.
    """

    request: Request
    length: int
    drafts: list[int]
    logits: Tensor


def noted_run(
    verifier: Verifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    shapes: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    prepare: Callable[[SpecEngine], None] | None = None,
    **changes: Any,
) -> tuple[SpecEngine, list[Request], list[Noted]]:
    """Decodes prompts, queued at once, and notes drafts; `shapes` of the first steps."""
    options = {"max_num_seqs": 3, "max_prefill_tokens": 13, "num_draft_tokens": None}
    engine = tiny_engine(verifier, drafter, **{**options, **changes})
    noted: list[Noted] = []
    # of a composition the first
    bound: Any = getattr(engine.runner.drafter, "parts", [engine.runner.drafter])[0]
    propose, choose, guess = bound.propose, bound._choose, getattr(bound, "_guess", None)
    chosen = list[tuple[Tensor, Tensor]]()  # tokens, and the logits that they were chosen by

    def choosing(batch: DecodeBatch, hidden: Tensor, first: int, count: int) -> Any:
        choice = choose(batch, hidden, first, count)
        chosen.append(
            (choice.token_ids, bound.network.logits(hidden).view(batch.num_reqs, count, -1))
        )
        return choice

    def guessing(
        batch: DecodeBatch, hidden: Tensor, first: int, count: int, *, alike: bool = False
    ) -> Any:
        assert guess is not None
        guesses = guess(batch, hidden, first, count, alike=alike)
        if not alike:
            chosen.append(
                (
                    guesses.token_ids[..., 0],
                    bound.network.logits(hidden).view(batch.num_reqs, count, -1),
                )
            )
        return guesses

    def noting(batch: DecodeBatch) -> DraftOutput:
        chosen.clear()
        output = propose(batch)
        by_slot = {request.slot: request for request in engine.scheduler.working}
        drafts, logits = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
        columns = zip(
            batch.slots.tolist(), batch.seq_lens.tolist(), drafts.tolist(), logits, strict=True
        )
        noted.extend(
            Noted(by_slot[slot], length, tokens, rows) for slot, length, tokens, rows in columns
        )
        return output

    bound.propose, bound._choose, bound._guess = noting, choosing, guessing
    with pytest.MonkeyPatch.context() as patch:
        if shapes is not None:
            assert engine.planner.choice is not None
            ks: Iterator[int] = chain(shapes, repeat(shapes[-1]))
            patch.setattr(
                engine.planner.choice, "choose", lambda *args, **kinds: BlockShape(next(ks))
            )
        if prepare is not None:
            prepare(engine)
        sampling = sampling or SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [engine.add_request(prompt, sampling) for prompt in prompts]
        finish(engine)
    return engine, requests, noted


@torch.inference_mode()
def check_drafts(model: Any, network: Any, noted: Sequence[Noted], *, least: int = 10) -> None:
    """Drafts follow the logits of a forward over the whole text, to 1e-4 of the largest."""
    checked = 0
    for request, length, drafts, logits in noted:
        text = request.token_ids[: length + 1]
        if len(text) <= length:
            continue  # surplus of a request that had ended
        aux = None
        if network.aux_layer_ids:
            states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            aux = torch.cat([states[tap + 1][0] for tap in network.aux_layer_ids], dim=-1)
        expected = plain_logits(network, text, aux, drafts)
        error = float((logits - expected).abs().max() / expected.abs().max())
        assert error < 1e-4, f"request {request.request_id} after {length} tokens: {error}"
        checked += 1
    assert checked >= least, f"only {checked} steps were checked"


def case(name: str = "llama", **kinds: Any) -> tuple[Any, Verifier, ToyNetwork]:
    """A target as transformers runs it and on the paged cache, and a network for it."""
    model = plain_model(name)
    verifier = paged_verifier(model)
    return model, verifier, ToyNetwork(verifier, **kinds)


def toy_drafter(verifier: Verifier, k: int = 4, **kinds: Any) -> SequentialDrafter:
    """A drafter of a `ToyNetwork`."""
    return SequentialDrafter(ToyNetwork(verifier, **kinds), verifier, max_draft_tokens=k)
