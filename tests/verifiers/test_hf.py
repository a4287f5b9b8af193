"""The target on our paged cache against plain transformers: same logits, same features, for every architecture."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from specdec.attention.backend import AttentionMetadata
from specdec.attention.selector import select_backend
from specdec.core import ForwardInput, Verifier
from specdec.kernels.linear import Linear, can_pack
from specdec.kv_cache import PagedKVCache, blocks_for
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.tiny_models import CONFIGS, WINDOW, paged_verifier, plain_model, random_prompts
from verifiers.fused import FusedVerifier, can_fuse
from verifiers.hf import HFVerifier, verifier_for
from verifiers.hf_attention import ATTENTION_NAME
from verifiers.shape import attention_spec, layer_windows

BLOCK = 4
FUSED = ("llama", "llama_tied", "qwen2", "qwen2_window", "qwen3", "mistral")


class PackedRun:
    """Feeds several sequences to a verifier in packed chunks over one cache with scattered blocks."""

    def __init__(self, verifier: Verifier, sequences: list[list[int]]) -> None:
        self.verifier, self.sequences = verifier, sequences
        counts = [blocks_for(len(s), BLOCK) for s in sequences]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
        self.tables = list(torch.split(order, counts))
        self.cache = PagedKVCache(
            verifier.kv_specs, num_blocks=sum(counts) + 1, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu")
        )

    def forward(self, spans: list[tuple[int, int, int]], aux: tuple[int, ...] = (), *, host_lengths: bool = True) -> list[Tensor]:
        """Runs rows `start .. end - 1` of sequence `i` for every (i, start, end); returns logits, or features when tapping."""
        tokens = torch.cat([torch.tensor(self.sequences[i][a:b]) for i, a, b in spans])
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        slots = torch.cat([self.tables[i][torch.arange(a, b) // BLOCK] * BLOCK + torch.arange(a, b) % BLOCK for i, a, b in spans])
        widths, ends = [b - a for _, a, b in spans], [b for *_, b in spans]
        table = torch.zeros(len(spans), max(len(t) for t in self.tables), dtype=torch.int32)
        for row, (i, _, _) in enumerate(spans):
            table[row, : len(self.tables[i])] = self.tables[i].int()
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32),
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
        output = self.verifier.forward(ForwardInput(tokens, positions, metadata), self.cache.layers, aux)
        rows = output.aux_hidden if aux else output.logits
        assert rows is not None
        return list(torch.split(rows, widths))


def check_logits(got: Tensor, model: nn.Module, sequence: list[int]) -> None:
    """Logits of a whole sequence are as exact as those of transformers."""
    tokens = torch.tensor([sequence])
    with torch.inference_mode():
        plain = model(tokens).logits[0]
    assert_as_exact(got, plain, in_float64(model, tokens).logits[0])


@pytest.mark.parametrize(("name", "fuse"), [*((name, False) for name in CONFIGS), *((name, True) for name in FUSED)])
def test_logits_equal_transformers(name: str, fuse: bool) -> None:
    """Packed prefill, a chunked extension, a multi-token verify and single tokens, past the window, on scattered blocks."""
    model = plain_model(name)
    sequences = [s[:1] * 3 + s for s in random_prompts(3, seed=2, longest=30)] + [random_prompts(1, seed=3)[0] * 30]
    sequences[-1] = sequences[-1][: 4 * WINDOW]
    sequences = [[*s, 7, 11, 13, 17, 19, 23, 29] for s in sequences]
    run = PackedRun(paged_verifier(model, BLOCK, fuse=fuse), sequences)
    lengths = [len(s) for s in sequences]
    got = [
        run.forward([(i, 0, n // 2) for i, n in enumerate(lengths)]),
        run.forward([(i, n // 2, n - 6) for i, n in enumerate(lengths)]),
        run.forward([(i, n - 6, n - 1) for i, n in enumerate(lengths)], host_lengths=False),
        run.forward([(i, n - 1, n) for i, n in enumerate(lengths)], host_lengths=False),
    ]
    for i, sequence in enumerate(sequences):
        check_logits(torch.cat([part[i] for part in got]), model, sequence)


@pytest.mark.parametrize("fuse", [False, True])
def test_features_are_raw_layer_outputs(fuse: bool) -> None:
    """Taps hold what each decoder layer returned, also the last one, whose `hidden_states` entry would be normed."""
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


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_those_of_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit: a frequency, an amplitude or a rounding of our own would shift every key."""
    model: Any = plain_model("llama")
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    position_ids, hidden = torch.tensor([0, 1, 17, 90, 511]), torch.zeros(5, 32, dtype=dtype)
    expected = model.model.rotary_emb(hidden[None], position_ids[None])
    spec = attention_spec(config, device=torch.device("cpu"), dtype=dtype, block_size=BLOCK)
    verifier = verifier_for(model, name="llama", backend=select_backend("torch_ref", spec))
    assert isinstance(verifier, FusedVerifier)
    for ours, theirs in zip(verifier._angles(hidden, position_ids), expected, strict=True):
        assert torch.cat([ours, ours], dim=-1).equal(theirs[0])


def test_windows_come_from_the_config() -> None:
    """Every source of windows: a list of layer types, one window for all layers, and a window that is switched off."""
    assert layer_windows(CONFIGS["gemma3"]()) == [WINDOW, None, WINDOW, None]
    assert layer_windows(CONFIGS["mistral"]()) == [WINDOW] * 4
    assert layer_windows(CONFIGS["qwen2_window"]()) == [None, None, WINDOW, WINDOW]
    assert layer_windows(CONFIGS["qwen2"]()) == [None] * 4


def test_model_called_without_its_cache_says_so() -> None:
    """The registered attention never runs without a cache: it would have no mask at all."""
    verifier = paged_verifier(plain_model("gemma2"))
    assert isinstance(verifier, HFVerifier)
    with pytest.raises(RuntimeError, match=r"HFVerifier\.forward"):
        verifier.model(torch.tensor([[1, 2, 3]]))


def test_the_family_is_fused_and_others_are_not() -> None:
    """What the tests above say of fused models is said of the Llama family, biases and head norms included."""
    assert [name for name in CONFIGS if can_fuse(plain_model(name))] == list(FUSED)
    model = plain_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert not can_fuse(model)


@pytest.mark.skipif(not can_pack(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU has no blocked bfloat16 layout")
@pytest.mark.parametrize("num_rows", [1, 9, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_bits(num_rows: int, bias: bool) -> None:
    """oneDNN's layout changes where numbers lie, not what comes out; a residual added in the product rounds once, not twice.

    A sum in float32 that lies between two bfloat16 numbers may still fall to either.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, added, residual = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((num_rows, 96), (160, 96), (160,), (num_rows, 160))
    )
    linear = Linear(weight, added if bias else None)
    assert linear.packed
    plain = F.linear(x, weight, added if bias else None)
    assert torch.equal(linear(x), plain)
    exact = x.double() @ weight.double().t() + (added.double() if bias else 0) + residual.double()
    assert (linear(x, residual) != exact.bfloat16()).float().mean() < 0.01
    unpacked = Linear(weight.float(), added.float() if bias else None)
    assert not unpacked.packed
    plain = F.linear(x.float(), weight.float(), added.float() if bias else None) + residual.float()
    assert_as_exact(unpacked(x.float(), residual.float()), plain, exact)
