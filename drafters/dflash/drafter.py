"""DFlash (arXiv 2602.06036): a block of drafts from one forward on the target's features.

The target's tapped features of every context position are projected once and become keys and values
of every draft layer, in the drafter's paged cache. The block `[anchor, mask, mask, ...]` then runs
through the layers as queries over that context.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.attention import attention_like, latent_like
from drafters.checkpoint import check_same_target, check_target
from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.coupling import CouplingTable
from drafters.dflash.divided import divide
from drafters.dflash.drafts import Drafts, Slots
from drafters.dflash.model import DFlashModel
from drafters.dflash.network import DFlashNetwork
from drafters.dflash.tied import expanded
from drafters.head import Lattice, Refiner
from drafters.vocabulary import target_ids
from specdec.attention.backend import AttentionBackend, Visibility
from specdec.attention.mla import MlaBackend
from specdec.base.config import DraftSampling
from specdec.base.errors import InvalidInputError
from specdec.device.meta import shapes_alone
from specdec.kv_cache import NULL_BLOCK, KVLayerSpec
from specdec.layers.rotary.rotary import Angles, Rope
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import (
    AcceptOutput,
    BoundDrafter,
    Drafter,
    DraftOutput,
    Verifier,
    VerifyOutput,
)
from specdec.parallel.group import group_of

logger = logging.getLogger(__name__)

MAX_DEFERRED = 16
"""Steps without drafts whose context is put off at most."""


class DFlashDrafter(Drafter):
    """A DFlash model made ready for one target; see `specdec.model.core.Drafter`.

    Args:
        model: its weights move to the target's device and type and are laid out for its kernels,
            once and in place, so that all runs share them; it cannot be trained after that.
        verifier: the target.
        divides: each of the target's ranks has a part of the model, or all of it; None chooses what
            is faster.

    Raises:
        CheckpointError: the model was trained for another target.
        BackendError: the target's attention backend cannot serve the draft layers.
        InvalidInputError: the ranks do not divide the model.

    Attributes:
        config: of the model; with the heads of this rank where it has a part.
        group: the ranks that the model is divided among; None where it is whole.
    """

    draws_trees = True

    def __init__(
        self, model: DFlashModel, verifier: Verifier, *, divides: bool | None = None
    ) -> None:
        borrows = model.embed_tokens is None or model.lm_head is None
        check_fit(model.config, verifier, borrows=borrows)
        self.group = divide(model, group_of(verifier), verifier.dtype, divides)
        config = model.config
        self.config, self.verifier = config, verifier
        self.attention = _attention(config, verifier)
        self.model = model.requires_grad_(False).eval().to(verifier.device, verifier.dtype)
        self.network = DFlashNetwork(self.model, self.attention, self.group)
        self.max_draft_tokens = config.max_draft_tokens
        self.usual_draft_tokens = config.speculative_tokens
        self.first_row = 0 if config.sample_from_anchor else 1
        self.head = None if config.head is None else config.head.head(self.model, self.embed)
        # A row sees those after it, or its head does, so a block shorter than in training drafts
        # worse: whatever k is, the whole block runs. Convolutions have whole blocks, too.
        whole = not all(config.causal) or config.convolves or isinstance(self.head, Refiner)
        self.num_lookahead_tokens = 0 if not whole else self.first_row + config.max_draft_tokens
        self.aux_layer_ids = config.target_layer_ids
        width = self.first_row + self.max_draft_tokens
        self.masks = torch.full((1, width), config.mask_token_id, device=verifier.device)
        self.target_ids = None if model.d2t is None else target_ids(model.d2t)
        self.embedding_scale, self.softcap = config.scales(verifier)
        if self.embedding_scale != verifier.embedding_scale:
            logger.info(
                "the drafter takes embeddings times %g, the target takes them times %g; if it was"
                " trained like the target, config.json has to say target_embedding_scale true",
                self.embedding_scale,
                verifier.embedding_scale,
            )
        coupling = config.coupling
        self.coupling = None if coupling is None else CouplingTable(coupling, verifier.device)
        self.likeliest_first = self.head is None

    @property
    def kv_specs(self) -> list[Any]:
        """One paged cache per draft layer."""
        heads = KVLayerSpec(self.config.num_key_value_heads, self.config.head_dim)
        layer = self.attention.cache_spec if isinstance(self.attention, MlaBackend) else heads
        return [layer] * self.config.num_hidden_layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that drafting reads in a step; a borrowed head, of which each of the
        target's ranks has a part, is read once more.
        """
        model, target = self.model, self.verifier
        own = sum(parameter.nbytes for parameter in model.parameters())
        unread = 0 if model.embed_tokens is None else model.embed_tokens.weight.nbytes
        if self.head is not None:
            unread += self.head.gathered_bytes
            if self.head.num_candidates is None:  # its table is read for every slot, or pass
                times = self.max_draft_tokens
                if isinstance(self.head, Refiner):
                    times = min(self.head.num_passes, times)
                own += (times - 1) * self.head.right.nbytes
        ranks = group_of(target)
        rows = target.vocab_size if ranks is None else -(-target.vocab_size // ranks.size)
        head = rows * target.hidden_size * target.dtype.itemsize
        borrowed = head if model.lm_head is None else 0
        return own - unread + borrowed - self.network.saved_bytes

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of tokens of the target, as the draft layers take them."""
        own = self.model.embed_tokens is not None
        rows = (self.network if own else self.verifier).embed(token_ids)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[Any],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> "BoundDFlash":
        """See `specdec.model.core.Drafter.bind`.

        Raises:
            InvalidInputError: another target than the one this was made for.
        """
        check_same_target(self.verifier, verifier)
        return BoundDFlash(self, caches, max_num_seqs, draft_sampling)


class BoundDFlash(BoundDrafter):
    """A `DFlashDrafter` over the paged cache of one engine; see `specdec.model.core.BoundDrafter`.

    Steps without drafts leave the target's features in a ring, since the context of a few positions
    takes no longer than that of one. It is written once the ring is full, or drafts are due.
    """

    max_deferred = MAX_DEFERRED

    def __init__(
        self,
        drafter: DFlashDrafter,
        caches: Sequence[Any],
        max_num_seqs: int,
        draft_sampling: DraftSampling,
    ) -> None:
        self.drafter, self.caches = drafter, list(caches)
        # position ids of the block, and their angles
        self._block: tuple[Tensor, dict[Rope, Angles]] | None = None
        target, device = drafter.verifier, drafter.verifier.device
        self.drafts = Drafts(draft_sampling, drafter.coupling, drafter.target_ids, drafter.head)
        width = len(drafter.aux_layer_ids) * target.hidden_size
        # Features of position p lie in column p % MAX_DEFERRED; of the last `_deferred` positions
        # nothing is written yet.
        self._ring = torch.zeros(
            max_num_seqs, MAX_DEFERRED, width, dtype=target.dtype, device=device
        )
        self._deferred = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # Of the last token whose features are known, for heads that ask: what these are to the
        # draft layers, [max_num_seqs, H], or which it is, int64 [max_num_seqs].
        self._before: Tensor | None = None
        if isinstance(drafter.head, Lattice):
            rows = max_num_seqs, drafter.config.hidden_size
            self._before = torch.zeros(rows, dtype=target.dtype, device=device)
        elif isinstance(drafter.head, Refiner):
            self._before = torch.zeros_like(self._deferred)

    @property
    def forecasts(self) -> bool:
        return self.drafts.forecasts

    @forecasts.setter
    def forecasts(self, wanted: bool) -> None:
        self.drafts.forecasts = wanted

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Nothing: the context lies in the cache, and prefill writes it."""

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        """Writes the context of a prompt chunk."""
        self._deferred.index_fill_(0, batch.slots, 0)
        last = batch.forward.metadata.query_start_loc[1:] - 1
        self._keep_before(batch.slots, last, batch.forward.token_ids, verify)
        self._write_context(verify, batch.forward.position_ids, batch.forward.metadata.slot_mapping)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts a chain, or a tree of the likeliest paths, from one forward of the backbone."""
        before = None if self._before is None else self._before.index_select(0, batch.slots)
        rows, depth = self.draft_hidden(batch), batch.shape.depth
        return self.drafts.of(batch, Slots.of(rows, self.logits, self.drafter.head, before, depth))

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Writes the context of verified rows over the block's, or puts the anchor's off."""
        width = token_ids.shape[1]
        if self._before is not None:
            first = torch.arange(0, len(token_ids) * width, width, device=token_ids.device)
            last = first + accept.num_accepted
            self._keep_before(batch.slots, last, token_ids.reshape(-1), verify)
        if batch.context == "now":
            self._write_context(verify, batch.position_ids(width), batch.slot_mapping(width))
            return
        assert verify.aux_hidden is not None and width == 1, (
            "the engine taps aux_layer_ids, and drafts need their context"
        )
        cells = batch.slots * MAX_DEFERRED + batch.seq_lens % MAX_DEFERRED
        self._ring.view(-1, self._ring.shape[-1]).index_copy_(0, cells, verify.aux_hidden)
        if batch.context == "later":
            self._deferred.index_add_(0, batch.slots, torch.ones_like(batch.slots))
        else:
            self._catch_up(batch)

    def _catch_up(self, batch: DecodeBatch) -> None:
        """Writes the context of the anchor and of what was put off before it."""
        back = torch.arange(MAX_DEFERRED - 1, -1, -1, device=batch.slots.device)
        places = batch.seq_lens[:, None] - back
        due = places >= (batch.seq_lens - self._deferred.index_select(0, batch.slots))[:, None]
        positions = places.clamp(0, batch.max_model_len - 1)
        blocks = batch.block_table.gather(1, positions // batch.block_size).long()
        slots = blocks * batch.block_size + positions % batch.block_size
        slots = torch.where(due, slots, NULL_BLOCK * batch.block_size)
        cells = batch.slots[:, None] * MAX_DEFERRED + positions % MAX_DEFERRED
        features = self._ring.view(-1, self._ring.shape[-1]).index_select(0, cells.reshape(-1))
        network = self.drafter.network
        angles = network.angles(positions.reshape(-1))
        network.write_context(features, angles, self.caches, slots.reshape(-1))
        self._deferred.index_fill_(0, batch.slots, 0)

    def draft_hidden(self, batch: DecodeBatch) -> Tensor:
        """Final hidden states [num_reqs, depth, H], or of the whole block for a refiner."""
        drafter, config = self.drafter, self.drafter.config
        depth = batch.shape.depth
        width = drafter.num_lookahead_tokens or drafter.first_row + depth
        masks = drafter.masks[:, : width - 1].expand(batch.num_reqs, -1)
        if (mask := drafter.model.mask_embedding) is None:
            tokens = torch.cat([batch.anchors[:, None], masks], dim=1)
            embeddings = drafter.embed(tokens.reshape(-1))
        else:
            rows = mask.expand(*masks.shape, -1) * drafter.embedding_scale
            anchors = drafter.embed(batch.anchors)[:, None]
            embeddings = torch.cat([anchors, rows], dim=1).flatten(0, 1)
        metadata = batch.metadata(width, visibility="full")
        seen: dict[bool, Visibility] = {True: "causal", False: "full"}
        plans = {
            causal: drafter.attention.plan(replace(metadata, visibility=seen[causal]))
            for causal in set(config.causal)
        }
        position_ids = batch.position_ids(width)
        angles = drafter.network.angles(position_ids)
        self._block = position_ids, angles

        first = drafter.first_row
        kept = slice(first, first + depth)
        if isinstance(drafter.head, Refiner):
            kept = slice(width)

        def keep(rows: Tensor) -> Tensor:
            some = rows.view(batch.num_reqs, width, -1)[:, kept]
            return some.flatten(0, 1).contiguous()

        hidden = drafter.network.block_forward(embeddings, angles, self.caches, plans, keep)
        return hidden.view(batch.num_reqs, -1, hidden.shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V or draft_vocab_size] of hidden states [..., H]."""
        drafter, head = self.drafter, self.drafter.network.head
        # torch multiplies a slice of three axes an order of magnitude slower
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = drafter.verifier.head(rows) if head is None else head(rows)
        logits = logits.view(*hidden.shape[:-1], -1)
        if drafter.config.output_multiplier != 1:
            logits = logits * drafter.config.output_multiplier
        softcap = drafter.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _keep_before(
        self, slots: Tensor, rows: Tensor, token_ids: Tensor, verify: VerifyOutput
    ) -> None:
        """Keeps what the head asks for of these rows, the last before each anchor."""
        if self._before is None:
            return
        rows = rows.long()
        if isinstance(self.drafter.head, Refiner):
            kept = token_ids.index_select(0, rows)
        else:
            assert verify.aux_hidden is not None, "the engine taps aux_layer_ids"
            features = verify.aux_hidden.index_select(0, rows)
            kept = self.drafter.network.context_state(features)
        self._before.index_copy_(0, slots, kept)

    def _write_context(
        self, verify: VerifyOutput, position_ids: Tensor, slot_mapping: Tensor
    ) -> None:
        assert verify.aux_hidden is not None, "the engine taps aux_layer_ids"
        network = self.drafter.network
        # nothing outlives a step, for its memory may be a graph's
        block, self._block = self._block, None
        # The context of a step lies where its block was, when both have as many rows.
        same = block is not None and block[0] is position_ids
        angles = block[1] if block and same else network.angles(position_ids)
        network.write_context(verify.aux_hidden, angles, self.caches, slot_mapping)


def check_fit(config: DFlashConfig, verifier: Verifier, *, borrows: bool) -> None:
    """Refuses a target that the drafter was not trained for.

    Args:
        config: of the drafter.
        verifier: the target, of which it looks at the shape alone.
        borrows: the drafter lacks embeddings or an output head of its own.

    Raises:
        CheckpointError: everything that does not fit.
    """
    check_target(
        verifier,
        taps=config.target_layer_ids,
        tap_width=config.tap_width,
        hidden_size=config.hidden_size if borrows else None,
        vocab_size=config.vocab_size,
        num_layers=config.num_target_layers,
        made_for=config.verifier_name,
    )


def _attention(config: DFlashConfig, verifier: Verifier) -> AttentionBackend | MlaBackend:
    """The target's kind of attention, for the draft layers' shape."""
    if config.latent is not None:
        return latent_like(
            verifier, config.num_attention_heads, config.latent, non_causal=not all(config.causal)
        )
    return attention_like(
        verifier,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        windows=config.windows,
        non_causal=not all(config.causal),
        sinks=config.attention_sinks,
    )


def load_dflash(
    path: str | Path | None, *, verifier: Verifier, divides: bool | None = None
) -> DFlashDrafter:
    """Loads a drafter on DFlash's backbone, with a head or without one, from a folder or the hub;
    for `divides` see `DFlashDrafter`.

    Raises:
        InvalidInputError: no path.
        CheckpointError: see `read_checkpoint`, or it does not fit the target.
    """
    if path is None:
        what = "the dflash drafter needs a checkpoint"
        raise InvalidInputError(f"{what}; give its folder or hub name")
    config, tensors = read_checkpoint(path)
    with shapes_alone():
        model = DFlashModel(
            config,
            own_embeddings="embed_tokens.weight" in tensors,
            own_head="lm_head.weight" in tensors,
            own_mask="mask_embedding" in tensors,
        )
    if config.tied_tables:
        check_fit(config, verifier, borrows=True)
        tensors = expanded(tensors, verifier)
    model.load_state_dict(tensors, assign=True)
    return DFlashDrafter(model, verifier, divides=divides)
