"""Whole tiny models on our kernels against plain torch; see `tests.helpers.triton_interpreter`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.attention.selector import select_backend
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.layers.ops.ops import Ops
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import run_all
from tests.helpers.guards import guard_steps
from tests.helpers.tiny_models import plain_model, random_dflash, random_prompts
from tests.helpers.triton_interpreter import require_triton
from verifiers.config.shape import backend_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

DEVICE = require_triton()

from specdec.layers.recurrence.ops import RecurrentOps  # noqa: E402


def verifier_on(backend: str, model: PreTrainedModel, *, fuse: bool = True) -> Verifier:
    """The same weights behind paged attention of that name."""
    config = copy.deepcopy(model.config)
    paged: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
    )
    paged.load_state_dict(model.state_dict())
    spec = backend_spec(config, device=DEVICE, dtype=torch.float32, block_size=4)
    return verifier_for(
        paged.to(DEVICE), name=config.model_type, backend=select_backend(backend, spec), fuse=fuse
    )


def generate(
    backend: str,
    model: PreTrainedModel,
    *,
    guarded: bool = False,
    fuse: bool = True,
    **sampling: Any,
) -> tuple[list[list[int]], list[Tensor]]:
    """Output tokens of two requests, and every draft of a random DFlash drafter."""
    verifier = verifier_on(backend, model, fuse=fuse)
    drafts: list[Tensor] = []
    cache = CacheConfig(memory_bytes=2**22)
    # A captured step drafts on the host once, and then overwrites what it drafted.
    config = EngineConfig(
        max_num_seqs=2, max_prefill_tokens=6, num_draft_tokens=3, cache=cache, graphs=False
    )
    engine = SpecEngine(verifier, random_dflash(verifier, block_size=4), config)
    bound = engine.runner.drafter
    assert bound is not None
    propose = bound.propose

    def recorded(batch: DecodeBatch) -> DraftOutput:
        drafts.append((output := propose(batch)).token_ids)
        return output

    bound.propose = recorded  # type: ignore[method-assign]
    if guarded:
        guard_steps(engine)
    # two steps with drafts at least
    params = SamplingParams(max_tokens=3, ignore_eos=True, **sampling)
    return run_all(engine, random_prompts(2, longest=9), params), drafts


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma4_shared",
        "gemma4_moe",
        "smollm3",
        "qwen2_moe",
        "gpt_oss",
        "lfm2",
        "nemotron_h",
        "qwen3_next",
    ],
)
def test_whole_model_with_drafter_equals_torch_ref(name: str) -> None:
    """Tokens and drafts: norms everywhere, windows, softcaps, multipliers, layers without RoPE,
    tapped features, the drafter's own windows and causality, chunked prefill."""
    model = plain_model(name)
    tokens, drafts = generate("triton_fa", model)
    expected_tokens, expected_drafts = generate("torch_ref", model)
    assert tokens == expected_tokens
    assert len(drafts) == len(expected_drafts) and all(
        ours.equal(theirs) for ours, theirs in zip(drafts, expected_drafts, strict=True)
    )


def test_states_beside_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and drafts, where our kernels have the recurrent layers alone."""
    model = plain_model("kimi_linear")
    verifier: Any = verifier_on("torch_ref", model)
    assert isinstance(verifier._ops, RecurrentOps)
    tokens, drafts = generate("torch_ref", model)
    monkeypatch.setenv("SPECDEC_KERNELS", "-recurrence")
    verifier = verifier_on("torch_ref", model)
    assert type(verifier._ops) is Ops
    expected_tokens, expected_drafts = generate("torch_ref", model)
    assert tokens == expected_tokens
    assert all(ours.equal(theirs) for ours, theirs in zip(drafts, expected_drafts, strict=True))


def test_a_model_with_its_own_modules() -> None:
    """Softcaps, through transformers' layers."""
    model = plain_model("gemma2")
    assert (
        generate("triton_fa", model, fuse=False)[0] == generate("torch_ref", model, fuse=False)[0]
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter itself reads values on the host")
def test_step_never_waits() -> None:
    """Draft, verify, accept and commit under the guard."""
    generate("triton_fa", plain_model("llama"))  # compiling may wait
    generate("triton_fa", plain_model("llama"), guarded=True)


def test_a_drafter_embeds_with_its_own_table() -> None:
    """And with the target's when it has none."""
    verifier: Any = verifier_on("triton_fa", plain_model("llama"))
    drafter = random_dflash(verifier)
    ids = torch.tensor([3, 5, 3], device=DEVICE)
    for own in (None, torch.nn.Embedding(verifier.vocab_size, verifier.hidden_size, device=DEVICE)):
        drafter.model.embed_tokens = own
        drafter.network._table = None if own is None else own.weight
        assert drafter.embed(ids).equal(
            verifier._embedding.table[ids] if own is None else own.weight[ids]
        )


def test_joined_draft_projections_share_memory() -> None:
    """The drafter's weights are stored once."""
    verifier = verifier_on("triton_fa", plain_model("llama"))
    drafter = random_dflash(verifier)
    joined: Any = drafter.network._decoder.layers[0].linears[0]
    attention: Any = drafter.model.layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() == joined.weight.data_ptr()
    assert torch.cat(
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    ).equal(joined.weight)
