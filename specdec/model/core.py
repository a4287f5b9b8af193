"""What each part of a step puts out, and the protocols of target and drafter.

Shapes use `num_reqs` requests of a batch, `k` drafts per request, `V` vocabulary, `H` hidden width.
Token ids are int64. The inputs of the parts are in `specdec.model.batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.base.blocks import DraftTree
from specdec.base.config import DraftSampling
from specdec.base.errors import InvalidInputError
from specdec.kv_cache import LayerSpec
from specdec.model.batch import DecodeBatch, ForwardInput, PrefillBatch
from specdec.sampling.logprobs import Logprobs
from specdec.sampling.params import SamplingDefaults


@dataclass(slots=True)
class VerifyOutput:
    """Result of one forward of the target.

    Attributes:
        logits: [num_selected, V], in the model's dtype.
        aux_hidden: [num_tokens, len(aux_layer_ids) * H], raw outputs of the tapped layers side by
            side; None without taps.
    """

    logits: Tensor
    aux_hidden: Tensor | None = None


_IDS = (torch.int64,)
_PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class DraftOutput:
    """The drafts of a block, and the distribution they were drawn from.

    A chain has them for positions L+1 .. L+k. In a tree they are point masses.

    Exactly one form of proposal:
        point mass: `probs` and `candidate_ids` are None; the draft has probability 1.
        dense: `probs` [num_reqs, k, V].
        top-k supported: `candidate_ids` int64 [num_reqs, k, C] without repeats, `probs` [num_reqs,
        k, C].

    Drafts with `probs` are judged as a block, so they must be drawn with numbers that no other step
    of the request draws with; see `specdec.sampling.noise.of_step`.

    Attributes:
        token_ids: int64 [num_reqs, k]; every entry is a valid token id, also past `num_drafts`.
        num_drafts: int64 [num_reqs], drafts that count, the first ones; None means all k.
        tree: how the drafts hang together, when the block is a tree; None is a chain.
        forecast: float32 [num_reqs], how many drafts the drafter expects to be accepted, of a chain
            or of the best path through a tree; None unless `BoundDrafter.forecasts` asks for it.
        scores: float32 [num_reqs, k], log-probabilities of the paths that end in each draft, in
            falling order; None unless forecasts are asked for.
        part: int64 [num_reqs], which part of a composition drafted; None for any other drafter.
        alternatives: int64 [num_reqs, k, C], tokens of each slot of a chain of point masses, the
            likeliest first; None unless an output follows a grammar (`SamplingPlan.guided`), which
            may refuse the draft, and the drafter has some.
        offered: bool [num_reqs, k], drafts of a tree that may be accepted; None are all.
    """

    token_ids: Tensor
    num_drafts: Tensor | None = None
    probs: Tensor | None = None
    candidate_ids: Tensor | None = None
    tree: DraftTree | None = None
    forecast: Tensor | None = None
    scores: Tensor | None = None
    part: Tensor | None = None
    alternatives: Tensor | None = None
    offered: Tensor | None = None

    def check(self, batch: DecodeBatch, vocab_size: int) -> None:
        """Checks shapes and types of what acceptance reads; the numbers stay on the device.

        Raises:
            InvalidInputError: a shape, a type or a device is wrong.
        """
        rows, ids, device = (batch.num_reqs, batch.k), self.candidate_ids, batch.anchors.device
        last = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else vocab_size
        for name, found, shape, types in (
            ("token_ids", self.token_ids, rows, _IDS),
            ("num_drafts", self.num_drafts, rows[:1], _IDS),
            ("candidate_ids", ids, (*rows, last), _IDS),
            ("probs", self.probs, (*rows, last), _PROBS),
        ):
            what = type(found).__name__
            if isinstance(found, Tensor):
                if found.shape == shape and found.dtype in types and found.device == device:
                    continue
                what = f"{str(found.dtype)[6:]} {list(found.shape)} on {found.device}"
            elif found is None and name != "token_ids":
                continue
            message = f"the drafter gave {name} of {what}"
            way_out = f"they must be {str(types[0])[6:]} {list(shape)} on {device}"
            raise InvalidInputError(f"{message}; {way_out}")


@dataclass(slots=True)
class AcceptOutput:
    """What a step adds to each request: `num_accepted` drafts, then one token of the target's own.

    Attributes:
        token_ids: int64 [num_reqs, depth + 1], output tokens; the first `num_accepted + 1` count,
            and the last of those is the recovered or bonus token. The depth is that of the block, k
            in a chain.
        num_accepted: int64 [num_reqs], in [0, depth].
        next_anchors: int64 [num_reqs], the recovered or bonus token.
        finite: bool [num_reqs], False when logits behind a counted token were NaN or infinite.
        logprobs: of `token_ids`, under the target's unprocessed logits; None when nobody asked.
        path: int64 [num_reqs, depth + 1], rows of a tree that were accepted, that of the anchor
            first; entries past `num_accepted` are rows that were not. None in a chain, whose rows
            follow each other.
    """

    token_ids: Tensor
    num_accepted: Tensor
    next_anchors: Tensor
    finite: Tensor
    logprobs: Logprobs | None = None
    path: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Weights of which every row reads a part: `top_k` of `num_experts` experts in layers with any.

    Attributes:
        num_experts: E, experts to choose from in a layer, shared ones left out.
        top_k: experts that a row is sent to, all of them different.
        weight_bytes: of all routed experts of all layers.
    """

    num_experts: int
    top_k: int
    weight_bytes: int

    def expected(self, rows: int) -> float:
        """Experts of a layer that `rows` rows meet, `E * (1 - (1 - top_k / E) ** rows)`: each is
        missed by all with that power.

        Rows choose evenly and independently of each other here. Neighboring tokens of a trained
        model agree more, so it is an upper bound there.

        >>> [round(RoutedExperts(128, 8, 0).expected(rows), 1) for rows in (1, 8, 32)]
        [8.0, 51.6, 111.8]
        """
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)

    def bytes_read(self, rows: int) -> int:
        """Bytes that a forward of `rows` rows is expected to read of `weight_bytes`."""
        return round(self.weight_bytes * self.expected(rows) / self.num_experts)


class ContextLimits(NamedTuple):
    """How long a sequence of a model may be, prompt and output together, in tokens.

    Attributes:
        usual: what an engine takes where nobody asks for another; `Verifier.max_model_len`.
        extended: as far as its positions were made to go.
        most: where they end; None where more is possible, if poor.
    """

    usual: int
    extended: int
    most: int | None = None

    def advice(self, current: int) -> str:
        """What can be done about a prompt that `current` tokens do not hold."""
        if current < self.extended:
            return f"shorten it, or raise max_model_len, which may be {self.extended:,}"
        return "shorten it" + (
            "" if self.most else ", or raise max_model_len beyond what the model was made for"
        )


class LengthRule(NamedTuple):
    """How rotations follow the length of a request.

    Attributes:
        start: tokens up to which they are the usual ones.
        grows: beyond it they change row by row (`specdec.layers.rotary.rotary.Growth`); otherwise
            a request that may come to be longer has others from its first token on (LongRoPE).
    """

    start: int
    grows: bool

    def rope_len(self, prompt: int, total: int) -> int:
        """`ForwardInput.rope_lens` of a request with so many tokens, and so many with its output;
        equal ones rotate alike.
        """
        length = prompt if self.grows else total - 1  # the last token is never read
        return 0 if length <= self.start else length if self.grows else self.start + 1


class Verifier(Protocol):
    """The target model, seen from the engine and from drafters."""

    name: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    context: ContextLimits
    length_rule: LengthRule | None
    """None where rotations are the same for requests of any length."""
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    """What its checkpoint asks of requests that do not say it themselves."""
    embedding_scale: float
    """Factor the model applies to its input embeddings (sqrt(H) for Gemma, else 1)."""
    final_softcap: float | None
    """Softcap the model applies to its logits, or None."""
    media_token_ids: Mapping[int, str]
    """Tokens that stand for pictures, sound and the like, with that word: what reads these is not
    loaded.
    """

    random_weights: bool
    """The output means nothing: weights are random, to measure its shape."""
    weight_codes: tuple[str, ...]
    """How packed weights are read (`specdec.layers.packed.weight.Code`); empty where all are plain
    numbers.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a forward of many rows reads; of all experts, too."""

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """The part of `weight_bytes` of which a forward of few rows reads less; None where every
        row reads every weight.
        """

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        """Cache layers needed."""

    @property
    def windows(self) -> Sequence[int | None]:
        """The sliding window of each of those layers in tokens; None for full attention."""

    @property
    def attention(self) -> AttentionBackend | MlaBackend:
        """Attention over those layers; where heads differ, over those like the first, see
        `AttentionBackend.each`.
        """

    def forward(
        self, rows: ForwardInput, caches: Sequence[Any], aux_layer_ids: Sequence[int] = ()
    ) -> VerifyOutput:
        """Scores packed rows, writing their KV to `caches`, one per layer, and tapping decoder
        layers `aux_layer_ids` (0-based).

        -1 taps the scaled embeddings, which the first layer is given.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw rows `[..., H]` of the input embedding table, without the model's embedding scale."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of the output head alone, without softcap or scaling."""


class Drafter(Protocol):
    """A way to propose tokens: weights and choices, which no run changes. `bind` starts a run; any
    number of them may share it.

    A subclass that needs nothing of the target but tokens gives `max_draft_tokens` and `bind`.
    """

    max_draft_tokens: int
    """Largest k."""
    usual_draft_tokens: int | None = None
    """The k that its checkpoint recommends; None for the largest."""
    num_lookahead_tokens: int = 0
    """Cache positions from L on that drafting writes whatever k is; 0 where it writes none, or no
    more than k + 1.
    """
    aux_layer_ids: tuple[int, ...] = ()
    """Decoder layers (0-based) of the target whose raw outputs are needed."""
    tokens_ahead: int = 0
    """How many tokens after a position its cached context depends on. Requests that share a block
    of a cached prefix share these tokens, too."""
    late_context: bool = False
    """Whether the context of a step's tokens is cached when the next step drafts, not when the step
    commits them.
    """
    reads_late: bool = False
    """Whether its context can be cached at any time, by a prefill of tokens alone.
    """
    draws_trees: bool = False
    """Whether drafts form a tree where the shape of the block asks for one. Its paths are up to
    `max_draft_tokens` long.
    """
    forward_for_each: bool = False
    """Whether each drafted position takes a forward: the deeper a block, the longer its step."""
    likeliest_first: bool = False
    """Whether a chain has the first candidate of every position, `DraftTree.ranks` of 0, so that a
    tree's path tells of it, too.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that drafting reads in a step."""
        return 0

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        """Cache layers needed, in the same blocks as the target's."""
        return ()

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[Any],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> BoundDrafter:
        """Starts a run.

        Args:
            verifier: the target.
            caches: one per entry of `kv_specs`.
            max_num_seqs: slots of requests.
            max_len: most positions of a request.
            draft_sampling: how drafts are drawn.

        Returns:
            What holds the state of the run, allocated.

        Raises:
            CheckpointError: the drafter does not fit the target; the message says why.
        """


class BoundDrafter(Protocol):
    """A drafter in one engine, with the state of its requests.

    The engine calls `begin` when a request gets a slot, `prefill` for each chunk of its prompt, and
    in every step `propose`, then `commit`. Between `propose` and the end of `commit` nothing may
    make the host wait for the device. The next `begin` may overwrite the state of a slot; there is
    no release. A subclass gives `propose`, and what else it needs.
    """

    max_deferred: int = 0
    """Steps without drafts whose context may be put off, see `Context`; 0 where none is."""
    forecasts: bool = False
    """Set before the first step where `DraftOutput.forecast` is wanted, which may take time; a
    drafter without forecasts leaves that None."""

    host_may_look: bool = False
    """Set before every step where the device is the host, so reading tensors waits for nothing."""

    has_expected_accepted: bool = False
    """Whether `expected_accepted` may return numbers."""

    def allow(self, max_drafts: int) -> None:
        """Lets the drafts of a step be another drafter's, at most `max_drafts`. A composition
        calls it before the first request.
        """
        return

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """A request with all its known tokens starts in `slot`; runs between steps."""
        return

    def keep_private(self, slot: int) -> None:
        """The request that has just started in `slot` has a salt: no other may draft from it."""
        return

    def forget(self) -> None:
        """Forgets what past requests have left; runs between steps, when there is no request."""
        return

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        """Takes over the context of a prompt chunk; where `Drafter.reads_late`, also of any tokens
        whose KV the target has cached before, without features.
        """
        return

    def expected_accepted(self, batch: DecodeBatch) -> Tensor | None:
        """float32 [num_reqs], how many of `batch.k` drafts in a chain are expected to be accepted,
        as far as that shows before it is known what the step's blocks will be; None where it does
        not. Called before `propose` where the host may look.
        """
        return None

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts `batch.k` tokens per request."""

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Takes over the context of a step: `token_ids` int64 [num_reqs, depth + 1] are the anchor
        and the drafts of a chain, or of the path through a tree, and `verify` has the features of
        these rows.

        All depth + 1 rows are handed over. Rows past `accept.num_accepted` lie at positions that
        the next step overwrites. `batch.context` is "now" unless `max_deferred` is set.
        """
        return


class PredictedDrafter(BoundDrafter, Protocol):
    """A drafter for batches in which a request has a prediction of its output."""

    def predict(
        self, slot: int, prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int]
    ) -> None:
        """Takes over a prediction, or none, for the request that starts in `slot`; between steps.

        Args:
            slot: its own.
            prompt: its tokens.
            output: what there is of its output, the last of which is the anchor.
            prediction: tokens.
        """
