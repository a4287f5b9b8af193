"""The DFlash drafter: fit to its target, alignment, and no wait for the device."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash.config.checkpoint import read_checkpoint, tensor_shapes, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import BoundDFlash, load_dflash
from specdec.attention.backend import AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.errors import BackendError, CheckpointError, InvalidInputError
from tests.drafters.dflash.plain import REDUCED, bound, dense_hidden
from tests.drafters.tiny import (
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    overfit,
    tiny_drafter,
    tiny_model,
    tiny_target,
    tiny_tensors,
    write_tiny_dflash,
)
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.guards import no_host_sync

CONVOLVED = replace(TINY, conv_kernel_size=2, conv_group_size=4)


def verifier_of(dtype: torch.dtype) -> FakeVerifier:
    """A target in `dtype`, and so its drafters."""
    verifier = FakeVerifier(tiny_target().to(dtype))
    verifier.dtype = dtype
    verifier.attention = TorchRefBackend(replace(verifier.attention.spec, dtype=dtype))
    return verifier


def test_state_dict_is_the_checkpoint() -> None:
    """The module has the public layout's names and shapes: what it trains is a checkpoint."""
    hidden, inner, width, query, kv = 32, 48, 16, 64, 32  # of TINY
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    plain = {f"layers.{index}.{name}": shape for index in range(3) for name, shape in layer.items()}
    plain |= {
        "fc.weight": (hidden, 3 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    assert tensor_shapes(TINY) == plain
    biases = {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in plain.items()
        if "self_attn" in name and "proj" in name
    }
    wide = {"fc.weight": (hidden, 3 * 48)}
    assert (
        tensor_shapes(replace(TINY, attention_bias=True, target_hidden_size=48))
        == plain | biases | wide
    )
    reduced = {
        "lm_head.weight": (REDUCED.draft_vocab_size, hidden),
        "d2t": (REDUCED.draft_vocab_size,),
    }
    assert tensor_shapes(REDUCED) == plain | reduced
    taps, groups = 2, hidden // 4
    for name in ("attention_conv", "mlp_conv"):
        for index in range(3):
            plain[f"layers.{index}.{name}.base_kernel"] = (2, taps, hidden)
            plain[f"layers.{index}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    assert tensor_shapes(CONVOLVED) == plain


def test_sizes_beyond_any_tensor() -> None:
    """A damaged file asks for too many bytes; a line says so before anything is read."""
    with pytest.raises(
        CheckpointError, match="asks for larger tensors than there can be; download it again"
    ):
        tensor_shapes(replace(TINY, hidden_size=2**31 - 1, intermediate_size=2**31 - 1))


FITS: list[tuple[DFlashConfig, str]] = [
    (
        replace(TINY, target_layer_ids=(1, 2, 6)),
        "it taps layer 6 of a target whose last layer is 5",
    ),
    (replace(TINY, num_target_layers=7), "it was made for 7 target layers, not 6"),
    (replace(TINY, target_hidden_size=48), "its fc.weight takes 144 features, not 3 taps of 32"),
    (replace(TINY, hidden_size=48), "its hidden size 48 cannot share embeddings of width 32"),
    (replace(TINY, vocab_size=64), "its vocabulary has 64 tokens, the target's 61"),
    (replace(TINY, vocab_size=64, verifier_name="some/target"), "made for some/target"),
]


@pytest.mark.parametrize(("config", "message"), FITS)
def test_another_target_is_refused(config: DFlashConfig, message: str) -> None:
    """A drafter of another target drafts garbage without an error; this says what differs."""
    with pytest.raises(CheckpointError, match=message) as caught:
        tiny_drafter(FakeVerifier(), config)
    assert "\n" not in str(caught.value)


def test_attention_backend_is_asked() -> None:
    """The target's kind of backend must serve the layers' own shape, windows, direction."""
    asked: list[AttentionSpec] = []

    class Picky(TorchRefBackend):
        name = "picky"

        @classmethod
        def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
            asked.append(spec)
            return ["no non-causal blocks"] if spec.non_causal else []

    verifier = FakeVerifier()
    verifier.attention = Picky(verifier.attention.spec)
    config = replace(TINY, windows=(5, 5, None), causal=(True, True, False))
    with pytest.raises(
        BackendError, match="'picky' cannot serve this drafter: no non-causal blocks"
    ):
        tiny_drafter(verifier, config)
    assert asked[0].windows == {5, None} and asked[0].non_causal
    assert (asked[0].num_heads, asked[0].num_kv_heads, asked[0].head_dim) == (4, 2, 16)
    drafter = tiny_drafter(verifier, replace(TINY, causal=(True,) * 3))
    assert isinstance(drafter.attention, Picky) and drafter.attention.spec.head_dim == 16


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_row_alignment(sample_from_anchor: bool, k: int) -> None:
    """The whole block runs, anchor and masks; the first k rows of its kind predict."""
    config = replace(
        TINY, block_size=8 if sample_from_anchor else 9, sample_from_anchor=sample_from_anchor
    )
    drafter, verifier, rig = bound(config)
    assert drafter.drafter.max_draft_tokens == 8
    draft = drafter.propose(rig.batch([3, 5], [9, 14], k))
    masks = [config.mask_token_id] * (config.block_size - 1)
    assert verifier.embedded[-1].view(2, -1).tolist() == [[3, *masks], [5, *masks]]
    assert draft.probs is None and draft.candidate_ids is None and draft.num_drafts is None
    generator = torch.Generator().manual_seed(2)
    for request, (anchor, length) in enumerate(((3, 9), (5, 14))):
        features = torch.randn(length, config.feature_size, generator=generator)
        hidden = dense_hidden(
            tiny_model(config), features, verifier.embed(torch.tensor([anchor, *masks]))
        )
        expected = verifier.head(hidden[0 if sample_from_anchor else 1 :]).argmax(-1)
        assert draft.token_ids[request].tolist() == expected[:k].tolist()


def test_the_last_layer_goes_on_with_the_drafted_rows_alone() -> None:
    """Nothing sees the other rows after its attention, and they would be most of its work when few
    drafts of many are verified.
    """
    drafter, _, rig = bound(replace(TINY, block_size=16))
    rows: list[int] = []
    ops: Any = drafter.drafter.network._ops
    gated = ops.gated

    def counted(linear: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(x))
        return gated(linear, x, *others)

    ops.gated = counted
    drafter.draft_hidden(rig.batch([3, 5], [9, 14], 3))
    assert rows == [2 * 16, 2 * 16, 2 * 3]


CAUSAL = (True,) * 3


BLOCKS: dict[str, DFlashConfig] = {
    "same_position": replace(TINY, block_size=16),
    "next_token": replace(TINY, block_size=16, sample_from_anchor=True),
    "mixed": replace(TINY, block_size=16, windows=(5, 5, None), causal=(True, True, False)),
    "causal": replace(TINY, block_size=16, causal=CAUSAL),
    "causal_next_token": replace(
        TINY, block_size=16, windows=(5, 5, None), causal=CAUSAL, sample_from_anchor=True
    ),
}


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_k_only_cuts_the_block(kind: str, draft_sampling: str) -> None:
    """Drafts at any k begin like the whole block's; a causal block runs no spare rows."""
    config = BLOCKS[kind]
    drafter, verifier, rig = bound(config, draft_sampling=draft_sampling)
    temperature = 0.0 if draft_sampling == "greedy" else 1.3
    most = drafter.drafter.max_draft_tokens
    hidden = drafter.draft_hidden(rig.batch([3, 5], [9, 14], most))
    drafts = drafter.propose(rig.batch([3, 5], [9, 14], most, temperature)).token_ids
    with Float64():
        wide, _, wide_rig = bound(config, verifier_of(torch.float64))
        exact = wide.draft_hidden(wide_rig.batch([3, 5], [9, 14], most))
    for k in (1, 3, most):
        batch = rig.batch([3, 5], [9, 14], k, temperature)
        assert_as_exact(drafter.draft_hidden(batch), hidden[:, :k], exact[:, :k])
        assert verifier.embedded[-1].numel() == 2 * (
            (k if config.sample_from_anchor else k + 1) if all(config.causal) else 16
        )
        assert torch.equal(drafter.propose(batch).token_ids, drafts[:, :k])


@pytest.mark.parametrize("kind", BLOCKS)
def test_drafting_writes_what_it_says(kind: str) -> None:
    """Drafting fills exactly the reserved positions from L on, of its own requests."""
    for k in (1, 3):
        config = BLOCKS[kind]
        drafter, _, rig = bound(config)
        before = [side.clone() for layer in drafter.caches for side in layer]
        batch = rig.batch([3, 5], [9, 14], k)
        drafter.propose(batch)
        width = drafter.drafter.num_lookahead_tokens or (k if config.sample_from_anchor else k + 1)
        slots = sorted(batch.slot_mapping(width).tolist())
        for old, new in zip(
            before, (side for layer in drafter.caches for side in layer), strict=True
        ):
            assert (new != old).flatten(0, 1).flatten(1).any(
                1
            ).nonzero().flatten().tolist() == slots


def test_jetspec_runs_a_causal_block(tmp_path: Path) -> None:
    """A row sees none after it: k rows draft the first of the whole block's."""
    path = write_tiny_dflash(tmp_path / "d")
    raw = json.loads((path / "config.json").read_text())
    raw["dflash_config"] |= {"causal": None, "causal_head": True}
    (path / "config.json").write_text(json.dumps(raw))
    verifier = FakeVerifier()
    drafter = load_dflash(path, verifier=verifier)
    assert drafter.num_lookahead_tokens == 0
    wide = verifier_of(torch.float64)
    wide_rig = Rig(load_dflash(path, verifier=wide), wide)
    assert isinstance(wide_rig.bound, BoundDFlash)
    with Float64():
        exact = wide_rig.bound.draft_hidden(wide_rig.batch([3, 5], [0, 0], 7))
    hidden = {}
    for causal in (True, False):
        rig = Rig(drafter if causal else tiny_drafter(verifier), verifier)
        assert isinstance(rig.bound, BoundDFlash)
        hidden[causal] = rig.bound.draft_hidden(rig.batch([3, 5], [0, 0], 7))
        if causal:
            assert_as_exact(
                rig.bound.draft_hidden(rig.batch([3, 5], [0, 0], 2)),
                hidden[True][:, :2],
                exact[:, :2],
            )
    assert not torch.allclose(hidden[True], hidden[False], atol=1e-2)


def test_no_path() -> None:
    """The drafter cannot be named without a checkpoint."""
    with pytest.raises(InvalidInputError, match="needs a checkpoint"):
        load_dflash(None, verifier=FakeVerifier())


def test_weights_take_the_targets_type() -> None:
    """bfloat16 weights on a bfloat16 target, while positions keep float32 frequencies."""
    verifier = verifier_of(torch.bfloat16)
    drafter, _, rig = bound(TINY, verifier)
    assert {parameter.dtype for parameter in drafter.drafter.model.parameters()} == {torch.bfloat16}
    assert drafter.drafter.network._rope.frequencies.dtype == torch.float32
    assert drafter.draft_hidden(rig.batch([3, 5], [9, 14], 4)).dtype == torch.bfloat16


def test_runs_share_the_weights() -> None:
    """Binding allocates nothing for weights, packed or not; runs have their own caches."""
    verifier = verifier_of(torch.bfloat16)
    drafter = tiny_drafter(verifier)

    def weights() -> list[object]:
        network = drafter.network
        linears = [linear for layer in network._decoder.layers for linear in layer.linears]
        return [network._context._projection, network._context._features, *linears]

    before = weights()
    one, two = (Rig(drafter, verifier).bound for _ in range(2))
    assert isinstance(one, BoundDFlash) and isinstance(two, BoundDFlash)
    assert one.drafter is two.drafter is drafter
    assert all(now is then for now, then in zip(weights(), before, strict=True))
    assert one.caches[0].key.data_ptr() != two.caches[0].key.data_ptr()


def test_another_targets_object_is_refused() -> None:
    """The weights were laid out for one target, whose embeddings and head they borrow."""
    drafter = tiny_drafter(FakeVerifier())
    with pytest.raises(InvalidInputError, match="made ready for 'tiny' as loaded earlier"):
        Rig(drafter, FakeVerifier())


def test_a_drafter_can_still_be_written(tmp_path: Path) -> None:
    """Joined and packed weights leave the state dict as it was."""
    config = replace(TINY, attention_bias=True)
    drafter = tiny_drafter(verifier_of(torch.float32), config)
    write_checkpoint(tmp_path / "d", config, drafter.model.state_dict())
    for name, tensor in tiny_tensors(config).items():
        assert torch.equal(read_checkpoint(tmp_path / "d")[1][name], tensor), name


def test_module_trains() -> None:
    """Gradients reach every weight through context and block, and the module learns one text."""
    target, model = tiny_target(), tiny_model()
    text = torch.randint(0, VOCAB - 1, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    first = overfit(model, target, text, steps=1)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert overfit(model, target, text, steps=30) < 0.5 * first


@pytest.mark.parametrize(
    "config", [TINY, REDUCED, replace(TINY, windows=(5, 5, None), causal=(True, True, False))]
)
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_never_waits(config: DFlashConfig, draft_sampling: str) -> None:
    """Draft and commit keep every value on the device."""
    drafter, _, rig = bound(config, draft_sampling=draft_sampling)
    batch = rig.batch([3, 5], [9, 14], 4, temperature=0.0 if draft_sampling == "greedy" else 1.0)
    features = torch.randn(2 * 5, config.feature_size)
    accepted = torch.tensor([1, 4])
    with no_host_sync():
        draft = drafter.propose(batch)
        token_ids = torch.cat([batch.anchors[:, None], draft.token_ids], dim=1)
        rig.commit_tensors(batch, token_ids, accepted, features)
