"""The target on our paged cache against plain transformers: same logits, same features, for every
architecture.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from specdec.attention.backend import AttentionMetadata
from specdec.base.errors import CheckpointError
from specdec.kv_cache import PagedKVCache, blocks_for
from specdec.layers.linear import BlockedLinear, DenseLinear, can_block
from specdec.layers.linear_choice import linear
from specdec.layers.rotary.rotary import Angles, Rope
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier
from tests.helpers.bounds import assert_as_exact, assert_rows_as_exact, in_float64
from tests.helpers.guards import no_host_sync
from tests.helpers.tiny_configs import CONFIGS, SHORT_LEN, WINDOW
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from verifiers.config.families import describe, family_of
from verifiers.config.shape import peculiarity
from verifiers.decoder import DecoderVerifier
from verifiers.entries import layer_windows
from verifiers.hf import HFVerifier, description_of, verifier_for
from verifiers.hf_attention import ATTENTION_NAME

BLOCK = 4
DESCRIBED = [name for name in CONFIGS if describe(CONFIGS[name]())]
THEIRS = [name for name in CONFIGS if not peculiarity(CONFIGS[name]())]
"""Which transformers' modules can run, too."""


class PackedRun:
    """Feeds several sequences to a verifier in packed chunks over one cache with scattered
    blocks.
    """

    def __init__(self, verifier: Verifier, sequences: list[list[int]]) -> None:
        self.verifier, self.sequences = verifier, sequences
        counts = [blocks_for(len(s), BLOCK) for s in sequences]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
        self.tables = list(torch.split(order, counts))
        self.cache = PagedKVCache(
            verifier.kv_specs,
            num_blocks=sum(counts) + 1,
            block_size=BLOCK,
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_slots=len(sequences),
        )

    def forward(
        self,
        spans: list[tuple[int, int, int]],
        aux: tuple[int, ...] = (),
        *,
        host_lengths: bool = True,
    ) -> list[Tensor]:
        """Runs rows `start .. end - 1` of sequence `i` for every (i, start, end); returns logits,
        or features when tapping.
        """
        tokens = torch.cat([torch.tensor(self.sequences[i][a:b]) for i, a, b in spans])
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        slots = torch.cat(
            [
                self.tables[i][torch.arange(a, b) // BLOCK] * BLOCK + torch.arange(a, b) % BLOCK
                for i, a, b in spans
            ]
        )
        widths, ends = [b - a for _, a, b in spans], [b for *_, b in spans]
        table = torch.zeros(len(spans), max(len(t) for t in self.tables), dtype=torch.int32)
        for row, (i, _, _) in enumerate(spans):
            table[row, : len(self.tables[i])] = self.tables[i].int()
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(
                [0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32
            ),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=table,
            slot_mapping=slots,
            num_reqs=len(spans),
            num_tokens=len(tokens),
            max_query_len=max(widths),
            max_seq_len=max(ends),
            query_lens=widths if host_lengths else None,
            seq_lens_host=ends if host_lengths else None,
        )
        owners = torch.tensor([i for i, _, _ in spans])
        rope_lens = None
        if (rule := self.verifier.length_rule) is not None:
            lens = [rule.rope_len(len(sequence), len(sequence) + 1) for sequence in self.sequences]
            rope_lens = torch.tensor([lens[i] for i, a, b in spans for _ in range(a, b)])
        rows_in = ForwardInput(tokens, positions, metadata, rope_lens=rope_lens, slots=owners)
        output = self.verifier.forward(rows_in, self.cache.layers, aux)
        rows = output.aux_hidden if aux else output.logits
        assert rows is not None
        return list(torch.split(rows, widths))


def check_logits(got: Tensor, model: nn.Module, *sequences: list[int]) -> None:
    """Logits of whole sequences, one after another, are as exact as those of transformers."""
    check_rows(got, model, *references(model, sequences))


def references(model: nn.Module, sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Logits of sequences, one after another, by transformers in float32 and in float64."""
    tokens = [torch.tensor([sequence]) for sequence in sequences]
    with torch.inference_mode():
        plain = [model(one).logits[0] for one in tokens]
    return torch.cat(plain), torch.cat([in_float64(model, one).logits[0] for one in tokens])


def check_rows(got: Tensor, model: nn.Module, plain: Tensor, exact: Tensor) -> None:
    """See `check_logits`; a state is summed up in another order than in transformers, row by row
    and not in chunks, so more is left to chance.
    """
    config: Any = model.config
    factor = {"factor": 4} if family_of(config).recurrent else {}
    assert_rows_as_exact(got, plain, exact, **factor)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    """Packed prefill, a chunked extension, a multi-token verify and single tokens, past the window,
    on scattered blocks: on our own layers, and on transformers' modules where they can.
    """
    model = plain_model(name)
    long = (random_prompts(1, seed=3)[0] * 30)[: 4 * WINDOW]
    sequences = [[*s, 7, 11, 13, 17, 19, 23, 29] for s in (*random_prompts(1, seed=2), long)]
    lengths = [len(s) for s in sequences]
    assert lengths[0] < SHORT_LEN < lengths[1]
    expected = references(model, sequences)
    for fuse in (False, True):
        if name not in (DESCRIBED if fuse else THEIRS):
            continue
        verifier = paged_verifier(model, BLOCK, fuse=fuse)
        assert isinstance(verifier, DecoderVerifier if fuse else HFVerifier)
        run = PackedRun(verifier, sequences)
        got = [
            run.forward([(i, 0, n // 2) for i, n in enumerate(lengths)]),
            run.forward([(i, n // 2, n - 6) for i, n in enumerate(lengths)]),
            run.forward([(i, n - 6, n - 1) for i, n in enumerate(lengths)], host_lengths=False),
            run.forward([(i, n - 1, n) for i, n in enumerate(lengths)], host_lengths=False),
        ]
        whole = [torch.cat([part[i] for part in got]) for i in range(len(sequences))]
        check_rows(torch.cat(whole), model, *expected)


@pytest.mark.parametrize("fuse", [False, True])
def test_features_are_raw_layer_outputs(fuse: bool) -> None:
    """Taps hold what each decoder layer returned, also the last one, whose `hidden_states` entry
    would be normed.
    """
    model = plain_model("qwen3")
    sequence = random_prompts(1, seed=5)[0]
    tokens = torch.tensor([sequence])
    with torch.inference_mode():
        plain = model(tokens, output_hidden_states=True).hidden_states
    exact = in_float64(model, tokens, output_hidden_states=True).hidden_states
    run = PackedRun(paged_verifier(model, BLOCK, fuse=fuse), [sequence])
    (features,) = run.forward([(0, 0, len(sequence))], aux=(0, 2, 3))
    first, third, last = features.split(32, dim=-1)
    for got, layers in ((first, 1), (third, 3), (model.base_model.norm(last), 4)):
        assert_as_exact(got, plain[layers][0], exact[layers][0])
    assert (last - plain[4][0]).abs().max() > 1e-2


@pytest.mark.parametrize("fuse", [False, True])
def test_embeddings_are_a_feature_too(fuse: bool) -> None:
    """Tap -1 is what the first layer is given, scaled, beside the layers' outputs in the order that
    was asked for.
    """
    model = plain_model("gemma2")
    sequence = random_prompts(1, seed=5)[0]
    with torch.inference_mode():
        plain = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    run = PackedRun(paged_verifier(model, BLOCK, fuse=fuse), [sequence])
    (features,) = run.forward([(0, 0, len(sequence))], aux=(-1, 0))
    embeddings, first = features.chunk(2, dim=-1)
    torch.testing.assert_close(embeddings, plain[0][0])
    torch.testing.assert_close(first, plain[1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.5,
        },
    ],
    ids=lambda rope: rope["rope_type"] + "_partial" * ("partial_rotary_factor" in rope),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_those_of_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit: a frequency, an amplitude or a rounding of our own would shift every key."""
    partial = "partial_rotary_factor" in rope
    config = copy.deepcopy(CONFIGS["glm4" if partial else "llama"]())
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=dtype
    )
    position_ids, hidden = torch.tensor([0, 1, 17, 90, 511]), torch.zeros(5, 32, dtype=dtype)
    expected = model.model.rotary_emb(hidden[None], position_ids[None])
    head_dim = config.head_dim
    angles = Angles.of(
        position_ids,
        Rope.of(config.rope_parameters, head_dim, config.max_position_embeddings),
        dtype,
    )
    for ours, theirs, still in zip((angles.cos, angles.sin), expected, (1, 0), strict=True):
        rotated = theirs.shape[-1] // 2
        assert (
            ours[:, :rotated].equal(theirs[0, :, :rotated]) and (ours[:, rotated:] == still).all()
        )
        assert ours.shape[-1] == head_dim // 2 and (rotated < head_dim // 2) == partial


def test_proportional_angles_are_those_of_transformers() -> None:
    """To the bit, of whole heads, most of whose pairs stay as they are."""
    config: Any = CONFIGS["gemma4"]()
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
    )
    positions = torch.tensor([0, 1, 17, 90, 511])
    expected = model.model.rotary_emb(torch.zeros(1, 5, 32), positions[None], "full_attention")
    angles = Angles.of(
        positions, Rope.of(config.rope_parameters["full_attention"], 24, 512), torch.float32
    )
    for ours, theirs in zip((angles.cos, angles.sin), expected, strict=True):
        assert ours.equal(theirs[0, :, :12])
    assert (angles.sin[1:, :3] != 0).all() and (angles.sin[:, 3:] == 0).all()


@pytest.mark.parametrize("length", [SHORT_LEN, SHORT_LEN + 1])
def test_longrope_angles_are_those_of_transformers(length: int) -> None:
    """To the bit, of a short and of a long request side by side."""
    config: Any = CONFIGS["phi3_long"]()
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
    )
    positions = torch.arange(length)
    expected = model.model.rotary_emb(torch.zeros(1, length, 32), positions[None])
    rope = Rope.of(config.rope_parameters, 8, config.max_position_embeddings)
    neighbor = torch.full((length,), length <= SHORT_LEN)
    angles = Angles.of(
        torch.cat([positions] * 2), rope, torch.float32, torch.cat([~neighbor, neighbor])
    )
    for ours, theirs in zip((angles.cos, angles.sin), expected, strict=True):
        assert ours[:length, :2].equal(theirs[0, :, :2])
        assert not ours[length:, :2].equal(theirs[0, :, :2])


def test_temperatures_are_those_of_transformers() -> None:
    """Rounded to the model's type, as far as a logarithm may differ in its last bit: half of a step
    of bfloat16 above 1.
    """
    config: Any = CONFIGS["ministral3"]()
    parameters = config.rope_parameters
    period, beta = (
        parameters["original_max_position_embeddings"],
        parameters["llama_4_scaling_beta"],
    )
    positions = torch.arange(512)
    expected = get_llama_4_attn_scale(positions[None], beta, period)[0, 0].bfloat16()
    description = describe(config)
    assert description is not None and description.ropes[0] is not None
    got = Angles.of(positions, Rope.of(description.ropes[0], 16, 512), torch.bfloat16).factors
    assert got is not None and got.dtype == torch.bfloat16
    assert (got != expected).float().mean() < 0.01 and got.unique().numel() > 20


def test_modules_with_dynamic_rope_do_not_wait() -> None:
    """To learn whether frequencies change, transformers looks at the positions, for which the host
    would wait.
    """
    verifier = paged_verifier(plain_model("llama_dynamic"), fuse=False)
    assert isinstance(verifier, HFVerifier)
    rotary: Any = verifier.model.base_model.rotary_emb
    before = rotary.inv_freq.clone()
    with no_host_sync():
        rotary(torch.zeros(1, 4, 32), torch.arange(508, 512)[None])
    assert rotary.inv_freq.equal(before)


def test_windows_come_from_the_config() -> None:
    """Every source of windows: a list of layer types, one window for all layers, and a window that
    is switched off.
    """
    assert layer_windows(CONFIGS["gemma3"]()) == [WINDOW, None, WINDOW, None]
    assert layer_windows(CONFIGS["mistral"]()) == [WINDOW] * 4
    assert layer_windows(CONFIGS["qwen2_window"]()) == [None, None, WINDOW, WINDOW]
    assert layer_windows(CONFIGS["qwen2"]()) == [None] * 4


def test_model_called_without_its_cache_says_so() -> None:
    """The registered attention never runs without a cache: it would have no mask at all."""
    verifier = paged_verifier(plain_model("gemma2"), fuse=False)
    assert isinstance(verifier, HFVerifier)
    with pytest.raises(RuntimeError, match=r"HFVerifier\.forward"):
        verifier.model(torch.tensor([[1, 2, 3]]))


def test_layers_of_another_kind_stay_as_they_are() -> None:
    """A projection that is no plain one, as in a quantized model, leaves the whole model to
    transformers' modules.
    """
    model = plain_model("llama")
    assert description_of(model) is not None
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert description_of(model) is None


def test_no_tensor_is_left_unused() -> None:
    """A bias that our layers know nothing of would be missing from every logit."""
    model = plain_model("llama")
    model.model.norm.bias = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(
        CheckpointError, match=r"no use for 1 tensors .*'model.norm.bias'; load it with fuse=False"
    ):
        verifier_for(model, name="llama", backend=paged_verifier(plain_model("llama")).attention)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "tanh"},
        {"model_type": "other"},
        {"rope_parameters": {"rope_type": "other", "rope_theta": 1e4}},
    ],
)
def test_what_the_stack_lacks_is_not_described(change: dict[str, Any]) -> None:
    """An activation, a family or a RoPE type that it does not have."""
    config: Any = CONFIGS["llama"]()
    for name, value in change.items():
        setattr(config, name, value)
    assert describe(config) is None


@pytest.mark.skipif(
    not can_block(torch.ones(1, dtype=torch.bfloat16)),
    reason="this CPU has no blocked bfloat16 layout",
)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_bits(num_rows: int, bias: bool) -> None:
    """oneDNN's layout changes where numbers lie, not what comes out; a residual added in the
    product rounds once, not twice.

    A sum in float32 that lies between two bfloat16 numbers may still fall to either.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, added, residual = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((num_rows, 96), (160, 96), (160,), (num_rows, 160))
    )
    layer = linear(weight, added if bias else None)
    assert isinstance(layer, BlockedLinear)
    plain = F.linear(x, weight, added if bias else None)
    assert torch.equal(layer(x), plain)
    exact = x.double() @ weight.double().t() + (added.double() if bias else 0) + residual.double()
    assert (layer(x, residual) != exact.bfloat16()).float().mean() < 0.01
    unpacked = linear(weight.float(), added.float() if bias else None)
    assert isinstance(unpacked, DenseLinear)
    plain = F.linear(x.float(), weight.float(), added.float() if bias else None) + residual.float()
    assert_as_exact(unpacked(x.float(), residual.float()), plain, exact)
