"""Every launch of a whole generation is bound and compiled for sm_90 with its very arguments, and
none is run.

The interpreter takes arguments that Triton's compiler would refuse, and `test_triton_compile.py`
guesses how they are specialised. What the kernels would compute stays uninitialized memory, so
tokens mean nothing here.
"""

import os
from collections.abc import Callable, Hashable
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch
import triton
from transformers import AutoModelForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specdec.attention.triton import fa as triton_fa
from specdec.attention.triton import triton_attention
from specdec.attention.triton.fa import TritonFaBackend
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.kernels import triton_argmax, triton_norm, triton_prefetch, triton_rope
from specdec.kernels.triton_prefetch import prefetch_programs
from specdec.layers import linear_choice, triton_linear
from specdec.layers.ops import fused, triton_embedding
from specdec.sampling import argmax
from specdec.sampling.params import SamplingParams
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import random_dflash
from verifiers.config.shape import attention_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

SHARED_MEMORY = 227 * 1024


class PretendedDriver:
    """A GPU that need not be here."""

    def get_current_device(self) -> int:
        return 97  # what is compiled for it must not be taken for what a real device needs

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class TwoLaunches:
    """In the place of a graph: a step that is launched again compiles nothing, for no value of the
    host is compiled in.
    """

    def __init__(self, compiled: set[tuple[str, str]]) -> None:
        self.compiled, self.num_captures = compiled, 0

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        launch()
        before = set(self.compiled)
        launch()
        assert self.compiled == before
        self.num_captures += 1
        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, kept_kernels: None) -> set[tuple[str, str]]:
    """Names and hashes of the kernels that were launched."""
    found: set[tuple[str, str]] = set()
    awaited: list[torch.Tensor] = []
    launch = JITFunction.run

    def bind_and_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.metadata.shared <= SHARED_MEMORY
        assert not kernel.metadata.global_scratch_size, "it would be allocated at launch"
        assert all(count <= 65535 for count in grid[1:])
        if self.fn.__name__ == "_few_rows_kernel" and awaited:
            assert args[1] is awaited.pop(), "hints are about the product that comes next"
        if (hints := options.get("PREFETCH")) is not None:
            awaited[:] = [options["prefetch"]]  # of one before, torch's product has come
        assert ("cp.async.bulk.prefetch" in kernel.asm["ptx"]) == bool(hints)
        assert not hints or grid[0] > prefetch_programs(options["prefetch"], options["num_warps"])
        found.add((self.fn.__name__ + (" with hints" if hints else ""), kernel.hash))
        return kernel

    monkeypatch.setattr(triton.runtime.driver, "_active", PretendedDriver())
    monkeypatch.setattr(JITFunction, "run", bind_and_compile)
    kernels = triton_argmax.argmax

    def filled(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices, finite = kernels(logits)
        return indices.zero_(), finite.fill_(True)  # tokens, at least, and the requests do not end

    for kernel in (argmax.KERNEL, fused.FUSED_LAYERS, fused.FEW_ROWS, fused.EMBEDDING):
        monkeypatch.setattr(kernel, "runs_on", lambda *where: True)
    monkeypatch.setattr(triton_argmax, "argmax", filled)
    monkeypatch.setattr(triton_fa, "unavailable_reasons", lambda device: [])
    monkeypatch.setattr(linear_choice, "can_block", lambda weight: False)  # a layout for CPUs
    for module in (triton_fa, triton_linear):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    for module in (
        triton_argmax,
        triton_attention,
        triton_embedding,
        triton_linear,
        triton_norm,
        triton_prefetch,
        triton_rope,
    ):
        monkeypatch.setattr(
            module, "overlap_options", lambda device: {"OVERLAP": True, "launch_pdl": True}
        )
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.slow
def test_a_generation_compiles(compiled: set[tuple[str, str]], name: str) -> None:
    """Prefill, drafts, verify and commit."""
    config = CONFIGS[name]()
    if name == "llama":  # sizes that suit the products of few rows
        config.hidden_size, config.intermediate_size = 64, 128
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
    )
    spec = attention_spec(config, device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16)
    verifier = verifier_for(model, name=name, backend=TritonFaBackend(spec))
    cache = CacheConfig(memory_bytes=2**22)
    engine = SpecEngine(
        verifier,
        random_dflash(verifier),
        EngineConfig(num_draft_tokens=None, max_num_seqs=2, max_model_len=400, cache=cache),
    )
    capture = TwoLaunches(compiled)
    engine.runner.graphs = StepGraphs(capture, engine.slots, engine.runner.step_table)
    for length in (3, 80):  # more rows than the products of few rows take
        engine.add_request(
            list(range(3, 3 + length)), SamplingParams(max_tokens=12, ignore_eos=True)
        )
    for _ in range(4):
        engine.step()
    assert capture.num_captures
    kernels = {
        "_attention_kernel",
        "_merge_kernel",
        "_rms_norm_kernel",
        "_rope_store_kernel",
        "_activation_kernel",
    }
    kernels |= {"_slice_max_kernel", "_row_max_kernel"}
    kernels |= {"_rms_norm_kernel with hints", "_rope_store_kernel with hints"}
    kernels |= {"_embed_kernel", "_few_rows_kernel"}
    if name == "llama":
        kernels |= {"_few_rows_kernel with hints"}
    assert {kernel for kernel, _ in compiled} == kernels
