"""Times whole steps of the engine on this machine's GPU, and compares its memory with the forecast: `python -m tests.checks.step`.

Targets and DFlash drafters have random weights, so nearly no draft is accepted: what counts is how long a step takes, by the wall
clock, captured, results read one step late as in any generation. For the shape of each target: one and 32 requests, a long context,
plain and with 1, 3, 7 and 15 drafts.
"""

import gc
import sys
import time
from typing import Any

import torch

from drafters.dflash.config import DFlashConfig
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from specdec.attention.backend import AttentionSpec
from specdec.attention.triton.fa import TritonFaBackend
from specdec.config import EngineConfig, SamplingParams
from specdec.core import Verifier
from specdec.engine.engine import SpecEngine
from specdec.engine.memory import graph_bytes
from specdec.engine.prefill_graphs import most_prefill_rows
from specdec.engine.request import Status
from tests.checks.triton import BLOCK, DEVICE, SHAPES, random_verifier


def random_drafter(shape: dict[str, Any], verifier: Verifier) -> DFlashDrafter:
    """A DFlash drafter of 5 layers and blocks of 16, with random weights, for a target of that shape."""
    config = DFlashConfig(
        block_size=16,
        mask_token_id=1,
        target_layer_ids=tuple(range(1, shape["num_hidden_layers"] - 1, shape["num_hidden_layers"] // 5))[:5],
        windows=(None,) * 5,
        causal=(False,) * 5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40960,
        num_target_layers=shape["num_hidden_layers"],
        **{name: value for name, value in shape.items() if name not in ("model_type", "num_hidden_layers")},
    )
    with DEVICE:
        return DFlashDrafter(DFlashModel(config), verifier)


def check_step(name: str) -> None:
    """Lines for whole steps of the engine, captured: one or 32 requests, plain and with drafts, also at a long context."""
    shape = SHAPES[name]
    heads = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
    verifier = random_verifier(shape, TritonFaBackend(AttentionSpec(DEVICE, torch.bfloat16, *heads, BLOCK)))
    for drafts in (0, 1, 3, 7, 15):
        first = 0.0
        for num_reqs, context in ((1, 1024), (32, 1024), (1, 32768)):
            if context > 1024 and drafts in (1, 3, 7):
                continue
            drafter = random_drafter(shape, verifier) if drafts else None
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            config = EngineConfig(
                max_num_seqs=num_reqs, max_model_len=context + 1024, max_prefill_tokens=4096, num_draft_tokens=drafts or None
            )
            loaded = torch.cuda.memory_allocated()
            engine = SpecEngine(verifier, drafter, config)
            cache = sum(tensor.nbytes for layer in engine.kv_cache.layers for tensor in layer)
            predicted = loaded + cache + graph_bytes(verifier, num_reqs * (drafts + 1), most_prefill_rows(verifier, num_reqs))
            milliseconds = step_time(engine, num_reqs, context)
            first = first or milliseconds
            peak = torch.cuda.max_memory_allocated()
            title = f"{name}, {num_reqs} x {context:,}, {drafts} drafts"
            print(
                f"{title:<46}{milliseconds:>8.2f} ms per step, {milliseconds / first:.2f} of the first;"
                f" peak {peak / 2**30:.1f} GiB, {peak / predicted:.2f} of the prediction",
                flush=True,
            )
            del engine, drafter


def step_time(engine: SpecEngine, num_reqs: int, context: int, steps: int = 40) -> float:
    """Milliseconds per step, wall clock, results read one step late as in any generation."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_reqs):
        prompt = torch.randint(2, engine.verifier.vocab_size, (context,), generator=generator).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
    while engine.scheduler.waiting or any(request.status is not Status.RUNNING for request in engine.scheduler.working):
        engine.step()
    for _ in range(10):
        engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * 1e3


def main() -> int:
    """All shapes, the larger first."""
    if not torch.cuda.is_available():
        print("no CUDA or ROCm device here")
        return 2
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in SHAPES:
        check_step(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
