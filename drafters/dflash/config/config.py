"""Configuration of a DFlash drafter, whatever checkpoint layout it came in."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drafters.attention import LatentSizes
from drafters.dflash.coupling import Coupling
from drafters.head import HeadConfig, HeadSizes
from drafters.keys import require
from specdec.layers.rotary.rotary import STATIC_ROPE_TYPES
from specdec.model.core import Verifier
from specdec.model.weights import FITTED

MAX_DRAFTS = 1024
"""More drafts per block than any drafter has: a number beyond comes from a damaged file."""


_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip

AttentionGate = Literal["per-head", "per-element"]
"""Which numbers of attention's output share a gate."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Everything needed to run a DFlash drafter (arXiv 2602.06036).

    Attributes:
        block_size: positions of a training block, the anchor included.
        mask_token_id: token whose input embedding fills the rows after the anchor.
        target_layer_ids: tapped decoder layers of the target, 0-based.
        windows: per draft layer, the sliding window or None for full attention.
        causal: per draft layer, whether a row of the block sees only rows up to itself.
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: shape of
        the draft layers.
        vocab_size: vocabulary of the target.
        rope_parameters: `rope_type`, `rope_theta` and what the type needs, as in Transformers 5.
        max_position_embeddings: longest trained position; some RoPE types need it.
        rms_norm_eps: of every norm.
        attention_bias: query, key, value and output projections carry biases.
        sample_from_anchor: row `i` predicts the token after its own position, so the anchor row
            predicts too and a block gives `block_size` drafts; otherwise row `i` predicts its own
            position, the anchor row's output is unused and a block gives `block_size - 1` drafts.
        speculative_tokens: how many to draft unless the user says; None for all that a block gives.
        input_embedding_scale: factor on raw embedding rows; None for the target's own, and then,
            unless stated, its final softcap applies too.
        output_multiplier: factor on logits, before the softcap.
        final_logit_softcapping: `c` in `c * tanh(logit / c)`, or None.
        draft_vocab_size: size of a reduced draft vocabulary with its own head, or None.
        num_target_layers: layers of the target, when stated.
        target_hidden_size: width of one tap when it differs from `hidden_size`.
        verifier_name, verifier_architectures: the target it was trained for, when stated.
        conv_kernel_size, conv_group_size: rows that the convolutions around sublayers mix, and
            channels that share the changing part of their kernels (DFlash 2); or both None.
        interleaved: RoPE turns neighboring numbers of a head instead of halves (LFM2.5).
        attention_sinks: heads have a learned logit that joins the softmax alone (MiMo).
        attention_value_scale: factor of values (MiMo).
        attention_gate: attention's output is scaled by the softplus of gates (Laguna); or None.
        tap_norms: every tap has a norm of its own before they are joined (Laguna, Kimi K3).
        norms_context: layers norm the context with the norm of their own rows (Laguna).
        mixes_taps: every draft layer has its own mixture of the taps instead of `fc`, and projects
            the context to keys and values apart from its rows (DFlare, arXiv 2606.02091).
        gemma: layers are those of Gemma 4 instead of Qwen3 (DeepSpec): norms around both sublayers,
            normed values, unscaled scores.
        keys_as_values: values are the keys before their norm.
        latent: sizes of latent attention (Kimi K3); None for attention with heads of their own
            keys. `head_dim` is that of queries.
        head: what corrects the logits behind each token; None for plain DFlash.
        tied_tables: the head's tables are projections of the target's own, see
            `drafters.dflash.tied`.
        coupling: weights of its probabilities and of the shared noise; None are ones.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sample_from_anchor: bool = False
    speculative_tokens: int | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    verifier_name: str | None = None
    verifier_architectures: tuple[str, ...] = ()
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    interleaved: bool = False
    attention_sinks: bool = False
    attention_value_scale: float = 1.0
    attention_gate: AttentionGate | None = None
    tap_norms: bool = False
    norms_context: bool = False
    mixes_taps: bool = False
    gemma: bool = False
    keys_as_values: bool = False
    latent: LatentSizes | None = None
    head: HeadConfig | None = None
    tied_tables: bool = False
    coupling: Coupling | None = field(default=None, metadata={FITTED: True})

    def __post_init__(self) -> None:
        self._check_values()
        require(
            self.speculative_tokens is None
            or 1 <= self.speculative_tokens <= self.max_draft_tokens,
            f"speculative_tokens is {self.speculative_tokens}, but block_size {self.block_size}"
            f" with sample_from_anchor {str(self.sample_from_anchor).lower()} gives 1 to"
            f" {self.max_draft_tokens}; correct the wrong one in config.json",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0 and self.head_dim % 2 == 0,
            f"{self.num_attention_heads} query heads on {self.num_key_value_heads} key heads of"
            f" {self.head_dim}: the first must be a multiple of the second, the third even",
        )
        valid = bool(self.windows) and len(self.windows) == len(self.causal)
        require(valid, "windows and causal must have one entry per layer")
        right = all(w is None or 1 <= w < 2**31 for w in self.windows)
        require(right, f"sliding windows are {self.windows}; they must be positive and below 2**31")
        tapped = bool(self.target_layer_ids)
        require(tapped, "no target layers are tapped; a DFlash drafter needs at least one")
        require(
            min(self.target_layer_ids) >= -1,
            f"target layer ids are {list(self.target_layer_ids)}; they must be layers 0, 1, ... or"
            f" -1 for the embedding output",
        )
        what = f"mask_token_id {self.mask_token_id} lies outside {self.vocab_size} embeddings"
        require(0 <= self.mask_token_id < self.vocab_size, what)
        rope_type = self.rope_parameters.get("rope_type")
        supported = ", ".join(STATIC_ROPE_TYPES)
        known = rope_type in STATIC_ROPE_TYPES
        require(known, f"RoPE type {rope_type!r} is not supported; supported: {supported}")
        rotated = self.head_dim * (self.rope_parameters.get("partial_rotary_factor") or 1.0)
        require(
            0 < rotated <= self.head_dim and (rope_type == "proportional" or int(rotated) % 2 == 0),
            f"RoPE turns {rotated:g} of {self.head_dim} numbers of a head; it must be an even part"
            f" of them",
        )
        valid = not (self.interleaved and self.keys_as_values)
        require(valid, "interleaved RoPE where keys are values too is not supported")
        self._check_convolutions()
        if self.latent is not None:
            self._check_latent(self.latent)
        valid = self.head is not None or not self.tied_tables
        require(valid, "tied_tables without a head; leave it out")
        if self.head is not None:
            self.head.check(self.head_sizes, sample_from_anchor=self.sample_from_anchor)
        if self.coupling is not None:
            self.coupling.check(self.max_draft_tokens)

    def _check_values(self) -> None:
        """Refuses values that cannot be, each by itself."""
        softcap, most = self.final_logit_softcapping, self.vocab_size
        large = "positive and below 2**31"
        rules = [(name, 1 <= getattr(self, name) < 2**31, large) for name in _SIZES]
        for name in ("target_hidden_size", "num_target_layers"):
            value = getattr(self, name)
            rules.append((name, value is None or 1 <= value < 2**31, large))
        reduced = self.draft_vocab_size is None or 1 <= self.draft_vocab_size < most
        below = f"at least 1 and smaller than vocab_size {most}, or left out"
        rules += [
            ("block_size", self.max_draft_tokens <= MAX_DRAFTS, f"at most {MAX_DRAFTS:,}"),
            ("rms_norm_eps", self.rms_norm_eps >= 0, "at least 0"),
            ("final_logit_softcapping", softcap is None or softcap > 0, "positive"),
            ("output_multiplier", self.output_multiplier > 0, "positive"),
            ("draft_vocab_size", reduced, below),
        ]
        for name, right, rule in rules:
            require(right, f"{name} is {getattr(self, name)}; it must be {rule}")
        require(
            self.max_draft_tokens >= 1,
            f"block_size is {self.block_size}, which leaves no row to predict a token; at least 2",
        )

    def _check_latent(self, latent: LatentSizes) -> None:
        query = 1 if latent.query_rank is None else latent.query_rank
        sizes = (latent.rank, latent.nope, latent.rope, latent.value, query)
        right = min(sizes) >= 1 and max(sizes) < 2**31 and latent.rope % 2 == 0
        require(
            right,
            f"{latent} are no sizes of latent attention; they must be positive and below 2**31, and"
            f" rope even",
        )
        others = (
            self.attention_bias, self.attention_sinks, self.gemma, self.mixes_taps, self.convolves,
            self.attention_gate is not None, self.attention_value_scale != 1,
            set(self.windows) != {None},
        )  # fmt: skip
        require(
            not any(others),
            "a drafter with latent attention has neither windows nor biases, gates, sinks or"
            " convolutions; this one says it has",
        )

    def _check_convolutions(self) -> None:
        taps, group = self.conv_kernel_size, self.conv_group_size
        require(
            (taps is None) == (group is None),
            f"conv_kernel_size is {taps} and conv_group_size {group}; convolutions need both, and"
            f" without them there is neither",
        )
        if taps is not None and group is not None:
            require(
                1 <= taps <= self.block_size,
                f"conv_kernel_size is {taps}; it must lie in [1, {self.block_size}], the block"
                f" size",
            )
            require(
                group >= 1 and self.hidden_size % group == 0,
                f"conv_group_size is {group}; it must be at least 1 and divide hidden_size, which"
                f" is {self.hidden_size}",
            )

    @property
    def peculiarities(self) -> tuple[str, ...]:
        """What neither training nor the public layouts that we write know, in words."""
        found = {
            "interleaved RoPE": self.interleaved,
            "attention sinks": self.attention_sinks,
            "a factor of values": self.attention_value_scale != 1,
            "gated attention": self.attention_gate is not None,
            "norms of taps": self.tap_norms,
            "a mixture of taps in every layer": self.mixes_taps,
            "Gemma's layers": self.gemma,
            "latent attention": self.latent is not None,
            "the embedding output as a tap": min(self.target_layer_ids) < 0,
        }
        return tuple(name for name, has in found.items() if has)

    def untrainable(self, tensors: Container[str]) -> str:
        """What of a checkpoint with these tensors training does not know; "" for nothing."""
        own_mask = ["its own mask row"] if "mask_embedding" in tensors else []
        return " and ".join([*self.peculiarities, *own_mask])

    def scales(self, target: Verifier) -> tuple[float, float | None]:
        """Factor of raw embedding rows, and softcap of logits or None, beside this target."""
        if self.input_embedding_scale is None:
            return target.embedding_scale, self.final_logit_softcapping or target.final_softcap
        return self.input_embedding_scale, self.final_logit_softcapping

    def scaled_like(self, target: Verifier) -> bool:
        """Whether embeddings and logits are scaled as the target scales its own."""
        return self.scales(target) == (target.embedding_scale, target.final_softcap)

    @property
    def convolves(self) -> bool:
        """Whether there are convolutions around sublayers."""
        return self.conv_kernel_size is not None

    @property
    def algorithm(self) -> str:
        """The algorithm's name in `drafters.algorithms`."""
        return "dflash" if self.head is None else self.head.algorithm

    @property
    def head_sizes(self) -> HeadSizes:
        """What a head takes over."""
        return HeadSizes(
            self.hidden_size,
            self.vocab_size,
            self.draft_vocab_size or self.vocab_size,
            self.block_size,
            self.rms_norm_eps,
            joins_taps=not self.mixes_taps,
        )

    @property
    def tap_width(self) -> int:
        """Hidden width of the target."""
        return self.target_hidden_size or self.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Draft layers."""
        return len(self.windows)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts that a full block gives."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps."""
        return len(self.target_layer_ids) * self.tap_width


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Taps of a drafter that names none: evenly spaced from the second to the third-last layer.

    >>> default_taps(36, 5), default_taps(36, 1)
    ((1, 9, 17, 25, 33), (18,))
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    layers = range(num_draft_layers)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in layers)


def entry_of(target: Any, name: str) -> Any:
    """An entry of a target's config, of its first layer where layers differ in it; None where there
    is none.
    """
    differs = name in (getattr(target, "per_layer_attributes", None) or ())
    return getattr(target.per_layer_config[0] if differs else target, name, None)
