"""A composition of drafters: copying where a text repeats itself, a model where it does not.

Every drafter drafts in every step; on a CPU models are left out of a step where they are not worth
their time (`gate`). For each request the chain is verified of which most drafts are expected to be
accepted, or the union of the trees (`union`). What a drafter expects is put right by what was
accepted of its drafts lately. The tokens that the target puts out tell that of all that drafted,
not of the chosen one alone, so none has to be tried for it. Drafts are point masses, so whose they
are changes no output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.composed.agreement import agreements
from drafters.composed.calibration import Calibration, Forecasts
from drafters.composed.gate import Gate, Kind
from drafters.composed.union import union
from specdec.base.blocks import BlockShape
from specdec.base.config import DraftSampling
from specdec.base.errors import InvalidInputError
from specdec.kv_cache import LayerCache, LayerSpec
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import (
    AcceptOutput,
    BoundDrafter,
    Drafter,
    DraftOutput,
    Verifier,
    VerifyOutput,
)


class ComposedDrafter(Drafter):
    """Several drafters as one; see `specdec.model.core.Drafter`.

    Args:
        parts: two or more, each for the same target; of equal prospects the first drafts.

    Raises:
        InvalidInputError: fewer than two.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        if len(parts) < 2:
            what = f"a composition has {len(parts)} drafter"
            raise InvalidInputError(f"{what}; name two or more, such as suffix+smollm2-dflash")
        self.parts = tuple(parts)
        self.max_draft_tokens = max(part.max_draft_tokens for part in parts)
        self.num_lookahead_tokens = max(part.num_lookahead_tokens for part in parts)
        self.tokens_ahead = max(part.tokens_ahead for part in parts)
        self.late_context = any(part.late_context for part in parts)
        tapped = (layer for part in parts for layer in part.aux_layer_ids)
        self.aux_layer_ids = tuple(dict.fromkeys(tapped))
        self.draws_trees = all(part.draws_trees for part in parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that drafting reads in a step."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        """Cache layers of all parts."""
        return [spec for part in self.parts for spec in part.kv_specs]

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[LayerCache],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> "BoundComposed":
        """See `specdec.model.core.Drafter.bind`.

        Raises:
            InvalidInputError: probabilistic drafts, which one drafter's distribution judges.
        """
        if draft_sampling == "probabilistic":
            what = "draft_sampling is 'probabilistic' and composed drafters give point masses"
            raise InvalidInputError(f"{what}; choose 'coupled' or 'greedy'")
        rest, bound = list(caches), []
        for part in self.parts:
            own, rest = rest[: len(part.kv_specs)], rest[len(part.kv_specs) :]
            limits = {"max_num_seqs": max_num_seqs, "max_len": max_len}
            bound.append(part.bind(verifier, own, **limits, draft_sampling=draft_sampling))
        return BoundComposed(self, bound, max_num_seqs, verifier)


@dataclass(slots=True)
class _Step:
    """What `propose` leaves for `commit`.

    Attributes:
        drafts: of the parts that drafted, by their numbers.
        forecasts: of all parts.
        output: what was verified.
        looked: what the host expects of parts that are no models, by request; None unlooked.
        kind: of the step.
        end: when drafting ended.
        seconds: of parts that are no models, and of the models.
    """

    drafts: dict[int, DraftOutput]
    forecasts: Forecasts
    output: DraftOutput
    looked: list[float] | None
    kind: Kind
    end: float
    seconds: tuple[float, float]


class BoundComposed(BoundDrafter):
    """The drafters of one engine; see `specdec.model.core.BoundDrafter`."""

    def __init__(
        self,
        drafter: ComposedDrafter,
        parts: Sequence[BoundDrafter],
        max_num_seqs: int,
        verifier: Verifier,
    ) -> None:
        self._drafter, self.parts, self._hidden_size = drafter, list(parts), verifier.hidden_size
        for part in self.parts:
            part.forecasts = True
            part.allow(drafter.max_draft_tokens)
        self.has_expected_accepted = any(part.has_expected_accepted for part in parts)
        deferred = [part.max_deferred for part in parts if part.max_deferred]
        self.max_deferred = min(deferred, default=0)
        self.calibration = Calibration(len(self.parts), verifier.device)
        # rows that only pad a batch never are
        self._begun = torch.zeros(max_num_seqs, dtype=torch.float32, device=verifier.device)
        # Models that may be left out of a step: all that they keep is written when it is committed.
        self._optional = [
            n for n, part in enumerate(drafter.parts) if part.weight_bytes and not part.late_context
        ]
        self.gate = Gate()
        self._step: _Step | None = None

    def allow(self, max_drafts: int) -> None:
        for part in self.parts:
            part.allow(max(max_drafts, self._drafter.max_draft_tokens))

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self._begun[slot] = 1
        for part in self.parts:
            part.begin(slot, token_ids)

    def keep_private(self, slot: int) -> None:
        for part in self.parts:
            part.keep_private(slot)

    def forget(self) -> None:
        """Forgets past requests; how forecasts fared is kept."""
        for part in self.parts:
            part.forget()

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        for number, part in enumerate(self.parts):
            part.prefill(batch, self._taps_of(number, verify))

    def expected_accepted(self, batch: DecodeBatch) -> Tensor | None:
        """The highest of the parts' that have one."""
        numbered = enumerate(self.parts)
        told = [part.expected_accepted(self._limited(n, batch)) for n, part in numbered]
        known = [one for one in told if one is not None]
        return torch.stack(known).amax(dim=0) if known else None

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """The chain whose forecast, put right, is the highest; the union of trees.

        Raises:
            InvalidInputError: a part draws trees without scores.
        """
        kind = batch.num_reqs, batch.shape.rows, batch.shape.is_tree
        looks = self.host_may_look and len(self._optional) < len(self.parts)
        optional = self._optional if looks else []
        begin = perf_counter()
        drafts = {n: self._draft(n, batch) for n in range(len(self.parts)) if n not in optional}
        looked = self._forecasts(drafts, batch).corrected.amax(dim=0).tolist() if optional else None
        middle = perf_counter()
        if looked is not None and self.gate.pays(kind, looked):
            drafts |= {n: self._draft(n, batch) for n in optional}
        drafts = dict(sorted(drafts.items()))
        models = perf_counter() - middle
        forecasts = self._forecasts(drafts, batch)
        if batch.shape.is_tree:
            shifts = [forecasts.shifts[n] for n in drafts]
            output = union(list(drafts.values()), shifts, batch.shape)
        else:
            output = _chosen(drafts, forecasts.corrected)
        output.forecast = forecasts.corrected.amax(dim=0) if self.forecasts else None
        took = middle - begin, models
        self._step = _Step(drafts, forecasts, output, looked, kind, perf_counter(), took)
        return output

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Every part takes over the context; forecasts are compared with what came out."""
        step, self._step = self._step, None  # nothing outlives a step: it may be a graph's
        if step is not None:
            self._learn(step, batch, accept)
        for number, part in enumerate(self.parts):
            part.commit(batch, token_ids, accept, self._taps_of(number, verify))

    def _draft(self, number: int, batch: DecodeBatch) -> DraftOutput:
        return self._padded(self.parts[number].propose(self._limited(number, batch)), batch)

    def _forecasts(self, drafts: Mapping[int, DraftOutput], batch: DecodeBatch) -> Forecasts:
        """Forecasts of all parts."""
        zeros = torch.zeros_like(batch.anchors, dtype=torch.float32)
        told = {n: draft.forecast for n, draft in drafts.items()}
        given = [zeros if (one := told.get(n)) is None else one for n in range(len(self.parts))]
        every = torch.stack(given)
        forecasts = self.calibration.correct(every, of_trees=batch.shape.is_tree)
        if len(drafts) < len(self.parts):
            corrected = [
                forecasts.corrected[n] if n in drafts else zeros for n in range(len(self.parts))
            ]
            forecasts = forecasts._replace(corrected=torch.stack(corrected))
        return forecasts

    def _learn(self, step: _Step, batch: DecodeBatch, accept: AcceptOutput) -> None:
        """Compares what was expected with what came out."""
        drafts, every, of_trees = step.drafts, range(len(self.parts)), batch.shape.is_tree
        agreed = agreements(drafts, len(self.parts), accept)
        counted = self._begun.index_select(0, batch.slots)
        if len(drafts) < len(self.parts):
            each = [counted if n in drafts else torch.zeros_like(counted) for n in every]
            counted = torch.stack(each)
        best = step.output.part if of_trees else None
        self.calibration.observe(
            step.forecasts, agreed, accept.num_accepted, counted, of_trees=of_trees, best=best
        )
        if step.looked is not None:
            (first, models), asked = step.seconds, len(drafts) == len(self.parts)
            self.gate.took(step.kind, first + perf_counter() - step.end, models if asked else None)
            if asked:
                others = torch.stack([agreed[n] for n in every if n not in self._optional])
                gained = accept.num_accepted - others.amax(dim=0)
                self.gate.observe(step.looked, gained.tolist())

    def _limited(self, number: int, batch: DecodeBatch) -> DecodeBatch:
        """The batch for a part that may give fewer drafts than another."""
        shape, most = batch.shape, self._drafter.parts[number].max_draft_tokens
        if shape.depth <= most:
            return batch
        limited = BlockShape(shape.drafts, most) if shape.is_tree else BlockShape(most)
        return replace(batch, shape=limited)

    def _padded(self, draft: DraftOutput, batch: DecodeBatch) -> DraftOutput:
        """Drafts with as many columns as the block has drafts."""
        missing = batch.k - draft.token_ids.shape[1]
        if not missing:
            return draft
        counts = draft.num_drafts
        if counts is None:
            counts = torch.full_like(batch.anchors, draft.token_ids.shape[1])
        return replace(draft, token_ids=F.pad(draft.token_ids, (0, missing)), num_drafts=counts)

    def _taps_of(self, number: int, verify: VerifyOutput) -> VerifyOutput:
        """What the target put out, with the layers that a part taps."""
        every, own = self._drafter.aux_layer_ids, self._drafter.parts[number].aux_layer_ids
        if verify.aux_hidden is None or not own or own == every:
            return verify
        layers = verify.aux_hidden.split(self._hidden_size, dim=-1)
        aux_hidden = torch.cat([layers[every.index(layer)] for layer in own], dim=-1)
        return VerifyOutput(verify.logits, aux_hidden)


def _chosen(drafts: Mapping[int, DraftOutput], forecasts: Tensor) -> DraftOutput:
    """For each request the drafted chain with the highest of `forecasts`, or the first."""
    numbers, chains = list(drafts), list(drafts.values())
    if len(chains) == 1:
        part = torch.full_like(chains[0].token_ids[:, 0], numbers[0])
        return DraftOutput(chains[0].token_ids, num_drafts=chains[0].num_drafts, part=part)
    place = torch.stack([forecasts[n] for n in numbers]).max(dim=0).indices
    token_ids = torch.stack([draft.token_ids for draft in chains])
    counts = [
        torch.full_like(place, token_ids.shape[2]) if draft.num_drafts is None else draft.num_drafts
        for draft in chains
    ]
    return DraftOutput(
        token_ids.gather(0, place[:, None].expand_as(token_ids[0])[None]).squeeze(0),
        num_drafts=torch.stack(counts).gather(0, place[None]).squeeze(0),
        part=place
        if len(numbers) == len(forecasts)
        else torch.stack([torch.full_like(place, n) for n in numbers]).gather(0, place[None])[0],
    )
