"""Time to the first token and time of a decode step:
`python -m tests.checks.latency --shape NAME [options]`.

A shape is a few layers with random weights and the heads of a published model, since attention is
what is compared: prompts in 8 bits or in 16 (`--prefill-dtype`), layouts of the cache and backends
(`--attention`). Without a shape, the target is `--model`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    LlamaConfig,
    PreTrainedConfig,
)

from specdec.base.config import CacheConfig, EngineConfig
from specdec.cli.options import load_decoder, model_options
from specdec.engine.engine import SpecEngine
from specdec.sampling.params import SamplingParams
from tests.checks.step import step_time, wait
from tests.helpers.tiny_models import tiny_tokenizer

_COMMON = {
    "vocab_size": 32000,
    "num_hidden_layers": 4,
    "max_position_embeddings": 163840,
    "hidden_size": 4096,
}
_LATENT = {
    **_COMMON,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TINY = {
    "vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 512, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 32,
}  # fmt: skip
"""The heads stay as they are: kernels have no others."""
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        **_COMMON,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "deepseek": lambda: DeepseekV3Config(**_LATENT),
    "deepseek-sparse": lambda: DeepseekV32Config(
        **_LATENT, index_n_heads=64, index_head_dim=128, index_topk=2048
    ),
    "tiny": lambda: DeepseekV3Config(**_LATENT | _TINY),
    "tiny-sparse": lambda: DeepseekV32Config(
        **_LATENT | _TINY, index_n_heads=32, index_head_dim=128, index_topk=16
    ),
}


def save_random(name: str, folder: Path) -> str:
    """A checkpoint in bfloat16 with random weights of that shape."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def first_token_time(engine: SpecEngine, length: int, repeats: int) -> float:
    """Median milliseconds from a prompt of `length` tokens to its first token, but for the first
    one, which may compile.
    """
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(repeats + 1):
        prompt = torch.randint(
            3, engine.verifier.vocab_size, (length,), generator=generator
        ).tolist()
        wait(engine.verifier.device)
        started = time.perf_counter()
        request = engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert request.output_token_ids, request.error
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.latency",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    model_options(parser)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), help="random weights in place of --model")
    add(
        "--prompts",
        type=int,
        nargs="+",
        default=[2048, 8192, 32768],
        metavar="N",
        help="tokens, for the time to the first token",
    )
    add(
        "--contexts",
        type=int,
        nargs="+",
        default=[8192, 65536],
        metavar="N",
        help="tokens, for the time of a decode step",
    )
    add("--requests", type=int, nargs="+", default=[1, 32], metavar="N", help="decoded at once")
    add("--repeats", type=int, default=5)
    add("--out", type=Path, help="write milliseconds by title as JSON")
    args = parser.parse_args()
    found: dict[str, float] = {}

    def note(title: str, milliseconds: float) -> None:
        found[title] = milliseconds
        print(f"  {title:<56}{milliseconds:>10.2f} ms", flush=True)

    with ExitStack() as stack:
        if args.shape:
            args.model = save_random(args.shape, Path(stack.enter_context(TemporaryDirectory())))
        # The cache of this decoder is made as small as can be; each measurement has an engine of
        # its own.
        verifier: Any = load_decoder(
            args, None, EngineConfig(max_num_seqs=1, max_model_len=2)
        ).verifier
        print(
            f"{args.shape or args.model}, {verifier.attention.name}, {verifier.dtype},"
            f" {verifier.device}, torch {torch.__version__}"
        )
        for line in verifier.attention.describe(verifier.attention.spec):
            print(f"  {line}")
        for length in args.prompts:
            cache = CacheConfig(prefix_caching=False)
            config = EngineConfig(
                max_num_seqs=1, max_model_len=length + 16, max_prefill_tokens=length, cache=cache
            )
            engine = SpecEngine(verifier, None, config)
            note(
                f"first token of a prompt of {length:,}",
                first_token_time(engine, length, args.repeats),
            )
        for context in args.contexts:
            for num_reqs in args.requests:
                config = EngineConfig(max_num_seqs=num_reqs, max_model_len=context + 128)
                engine = SpecEngine(verifier, None, config)
                note(
                    f"decode step of {num_reqs} x {context:,}",
                    step_time(engine, num_reqs, context, steps=8 * args.repeats),
                )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
