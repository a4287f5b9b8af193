"""Runs AITER's real Triton kernels, single calls and whole generations, and compares them with plain torch.

    python -m tests.checks.aiter_triton --device cuda     on a GPU: single calls, then the embedded model
    python -m tests.checks.aiter_triton --device cpu      the same calls in Triton's interpreter, then tiny models
    ... --repository aiter --revisions v0.1.16,v0.1.20    several versions one after the other, from a git repository

AITER is the sources in the folder that SPECDEC_AITER names, what is exported from a repository, or the installed `amd-aiter`.
Single calls may be as far from float64 as plain torch is (`tests.helpers.bounds`). The exit status is 1 when a call is wrong, when
AITER has mended what specdec refuses, or when a token differs from the reference's by more than a near-tie.
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.backend import AttentionMetadata
from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.core import Drafter, ForwardInput, Verifier
from specdec.engine.engine import SpecEngine
from specdec.kernels import aiter
from specdec.kv_cache import PagedKVCache, blocks_for
from tests.checks.aiter_triton_calls import check
from tests.helpers.aiter_real import INTERPRETER, REVISIONS, SOURCES, export, missing, real_aiter
from tests.helpers.attention_case import spec
from tests.helpers.scripted import ScriptedDrafter

NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest difference of logits that rounding may turn around."""

PROMPTS = (
    "What is the capital of France, and which river runs through it?",
    "Tom has 5 apples. He buys 7 more and gives 3 away. How many apples does he have now?",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "List the first eight prime numbers, separated by commas.",
    "Write a Python function that reverses a string.",
    "Explain to a child why the sky is blue.",
    "Name five animals that live in the ocean.",
    "Give me three tips for sleeping better.",
)
Prompts = list[list[int]]
Make = Callable[[Verifier], Drafter | None]


def _longest(verifier: Verifier) -> int | None:
    """Beyond 512 keys AITER splits them over programs, for which it refuses float32."""
    return min(480, verifier.max_model_len) if verifier.dtype == torch.float32 else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generate(
    verifier: Verifier, drafter: Drafter | None, prompts: Prompts, batch: int, args: argparse.Namespace
) -> tuple[list[list[int]], float]:
    """Output tokens of every prompt, and output tokens per verify step."""
    cache = CacheConfig(memory_bytes=2**28 if verifier.device.type == "cuda" else 2**23)
    config = EngineConfig(
        num_draft_tokens=None,
        max_num_seqs=batch,
        max_prefill_tokens=64,
        max_model_len=_longest(verifier),
        graphs=not args.no_graphs,
        cache=cache,
    )
    engine = SpecEngine(verifier, drafter, config)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=args.tokens)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert not any(request.error for request in requests), [request.error for request in requests]
    emitted = [count for request in requests for count in request.num_emitted]
    return [request.output_token_ids for request in requests], sum(emitted) / max(1, len(emitted))


@torch.inference_mode()
def gaps(reference: Verifier, prompt: list[int], output: list[int]) -> list[float]:
    """How far below the best logit of the reference each output token lies, given the tokens before it; 0 for its own choice."""
    tokens = [*prompt, *output[:-1]]
    count, device = len(tokens), reference.device
    blocks = blocks_for(count, 16)
    cache = PagedKVCache(reference.kv_specs, num_blocks=blocks, block_size=16, dtype=reference.dtype, device=device)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(count, device=device),
        num_reqs=1,
        num_tokens=count,
        max_query_len=count,
        max_seq_len=count,
    )
    places = torch.arange(count, device=device)
    rows = ForwardInput(torch.tensor(tokens, device=device), places, metadata, places[len(prompt) - 1 :])
    logits = reference.forward(rows, cache.layers).logits.float()
    chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
    return (logits.max(dim=1).values - chosen).tolist()


def compare(label: str, reference: Verifier, dtype: torch.dtype, prompts: Prompts, want: Prompts, got: Prompts, more: str) -> int:
    """Prints how a run agrees with the reference, its near-ties included; returns how many tokens differ by more."""
    near, wrong, total = [], 0, sum(map(len, got))
    for index, (prompt, output) in enumerate(zip(prompts, got, strict=True)):
        for place, gap in enumerate(gaps(reference, prompt, output)):
            if gap > 0:
                near.append(f"prompt {index} token {place}: {gap:.1e}")
                wrong += gap > NEAR_TIE[dtype]
    same = sum(a == b for a, b in zip(want, got, strict=True))
    print(f"  {label}: {same} of {len(got)} outputs equal; {total - len(near)} of {total} tokens are the reference's choice{more}")
    for line in near:
        print(f"    near-tie, logits apart: {line}")
    return wrong


def check_model(
    make: Callable[[str, torch.dtype], Verifier],
    drafters: dict[str, Make],
    prompts: Prompts,
    args: argparse.Namespace,
    calls: dict[str, int],
) -> int:
    """Generates with each type, drafter and batch size; returns how many tokens are wrong.

    Args:
        make: the target on the named backend in the given type.
        drafters: how to make each; one that is right three times out of four joins them.
        prompts: token ids.
        args: options of the command.
        calls: counts of the kernel calls.
    """
    reference = make("torch_ref", torch.float32)
    want, _ = generate(reference, None, prompts, len(prompts), args)
    known = dict(zip(map(tuple, prompts), want, strict=True))
    drafters = drafters | {"mostly right drafts": lambda verifier: ScriptedDrafter(known, 4, [{3}])}
    wrong = 0
    for dtype in map(_dtype, args.dtypes.split(",")):
        verifier = make("rocm_aiter_fa", dtype)
        for (name, drafter), batch in itertools.product(drafters.items(), map(int, args.batches.split(","))):
            before = dict(calls)
            got, tau = generate(verifier, drafter(verifier), prompts, batch, args)
            used = ", ".join(f"{calls[function] - before[function]} {function}" for function in calls)
            label = f"{_name(dtype)}, {name}, batch {batch}"
            wrong += compare(label, reference, dtype, prompts, want, got, f"; tau {tau:.2f}; calls: {used}")
            if name.startswith("DFlash") and before["flash_attn_with_kvcache"] == calls["flash_attn_with_kvcache"]:
                print("    WRONG: no block went through flash_attn_with_kvcache")
                wrong += 1
    if torch.bfloat16 in map(_dtype, args.dtypes.split(",")):
        got, _ = generate(make("torch_ref", torch.bfloat16), None, prompts, len(prompts), args)
        compare("for comparison torch_ref in bfloat16", reference, torch.bfloat16, prompts, want, got, "")
    return wrong


def embedded(args: argparse.Namespace, device: torch.device, calls: dict[str, int]) -> int:
    """The embedded model, or the one that was named, with n-gram and DFlash drafts."""
    from drafters.dflash.drafter import load_dflash
    from drafters.ngram import load_ngram
    from drafters.shipped import load_shipped
    from verifiers.load import load_verifier

    def make(backend: str, dtype: torch.dtype) -> Verifier:
        return load_verifier(args.target, device=device, dtype=dtype, attention=backend)[0]

    tokenizer = load_verifier(args.target, device=torch.device("cpu"), dtype=torch.float32)[1]
    texts = ([{"role": "user", "content": text}] for text in PROMPTS[: args.prompts])
    prompts = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False) for text in texts]
    shipped = {"random": random_drafter, "shipped": lambda verifier: load_shipped(verifier=verifier)}
    drafters: dict[str, Make] = {
        f"DFlash ({args.drafter})": shipped.get(args.drafter, lambda verifier: load_dflash(args.drafter, verifier=verifier)),
        "n-gram": lambda verifier: load_ngram(None, verifier=verifier),
    }
    print(f"{args.target}, {args.prompts} prompts, {args.tokens} tokens each; reference: torch_ref in float32, plain decoding")
    return check_model(make, drafters, prompts, args, calls)


def tiny(args: argparse.Namespace, device: torch.device, calls: dict[str, int]) -> int:
    """Tiny random models: ordinary, with sinks and windows, with a softcap; with DFlash drafts."""
    from transformers import AutoModelForCausalLM

    from tests.helpers.tiny_models import CONFIGS, paged_verifier, random_prompts

    wrong = 0
    for name in args.tiny.split(","):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config.tie_word_embeddings = False
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()

        def make(backend: str, dtype: torch.dtype, model: Any = model) -> Verifier:
            assert dtype == torch.float32
            verifier: Any = paged_verifier(model, block_size=16)
            if backend == "rocm_aiter_fa":
                verifier.attention = RocmAiterFaBackend(verifier.attention.spec)
            return verifier

        prompts = random_prompts(args.prompts)
        print(f"tiny {name}, {len(prompts)} prompts, {args.tokens} tokens each; reference: torch_ref in float32, plain decoding")
        wrong += check_model(make, {"DFlash (random)": random_drafter}, prompts, args, calls)
    return wrong


def random_drafter(verifier: Verifier) -> Drafter:
    """A DFlash drafter with random weights: full and sliding layers, bidirectional and causal."""
    from drafters.dflash.config import DFlashConfig
    from drafters.dflash.drafter import DFlashDrafter
    from drafters.dflash.model import DFlashModel

    torch.manual_seed(1)
    large = verifier.hidden_size > 100
    config = DFlashConfig(
        block_size=16 if large else 5,
        mask_token_id=verifier.vocab_size - 1,
        target_layer_ids=(1, verifier.num_layers // 2, verifier.num_layers - 1),
        windows=(None, 16, 16),
        causal=(False, True, False),
        hidden_size=verifier.hidden_size,
        intermediate_size=512 if large else 48,
        num_attention_heads=9 if large else 4,
        num_key_value_heads=3 if large else 2,
        head_dim=64 if large else 16,
        vocab_size=verifier.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=8192 if large else 512,
        num_target_layers=verifier.num_layers,
    )
    return DFlashDrafter(DFlashModel(config), verifier)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def each_revision(args: argparse.Namespace, argv: list[str]) -> int:
    """The same command on the sources of each revision; the worst exit status."""
    worst = 0
    for revision in args.revisions.split(","):
        version = revision.removeprefix("v") if revision.startswith("v") else args.aiter_version
        with TemporaryDirectory() as folder:
            export(args.repository, revision, Path(folder))
            print(f"AITER {revision}", flush=True)
            command = [sys.executable, "-m", "tests.checks.aiter_triton", *argv, "--repository", "", "--aiter-version", version]
            worst = max(worst, subprocess.run(command, env=os.environ | {SOURCES: folder}, check=False).returncode)
    return worst


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 when something is wrong, 2 when AITER or Triton is missing."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tests.checks.aiter_triton", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, or cpu for Triton's interpreter")
    add("--part", default="all", choices=["all", "calls", "models"])
    add("--every", type=int, help="of the calls on ordinary heads take every n-th (default 5 on a GPU, 7 in the interpreter)")
    add("--verbose", action="store_true", help="print every call, not only the table")
    add("--repository", default="", help="a git repository of AITER, of which --revisions are taken")
    add("--revisions", default=",".join(REVISIONS), help="tags or branches of it (default %(default)s)")
    add("--aiter-version", default="0.1.20", help="of the sources that SPECDEC_AITER names (default %(default)s)")
    add("--architecture", default="gfx1100", help="to pretend in the interpreter (default %(default)s)")
    add("--target", default="embedded", help="on a GPU: a name or folder (default %(default)s)")
    add("--tiny", default="llama,gpt_oss,gemma2", help="in the interpreter: which tiny models (default %(default)s)")
    add("--drafter", default="shipped", help="on a GPU: a DFlash checkpoint, shipped or random (default %(default)s)")
    add("--dtypes", help="of the target (default float32,bfloat16 on a GPU, float32 in the interpreter)")
    add("--batches", help="(default 1,8 on a GPU, 3 in the interpreter)")
    add("--prompts", type=int, help="(default 8 on a GPU, 3 in the interpreter)")
    add("--tokens", type=int, help="of each output (default 64 on a GPU, 6 in the interpreter)")
    add("--no-graphs", action="store_true", help="launch steps operation by operation")
    args = parser.parse_args(argv)
    if args.repository:
        return each_revision(args, argv)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    device = torch.device(args.device)
    interpreted = device.type == "cpu"
    needed = {"TRITON_F32_DEFAULT": "ieee", **(INTERPRETER if interpreted else {})}  # float32 products in float32, not in TF32
    if any(os.environ.get(name) != value for name, value in needed.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.checks.aiter_triton", *argv], os.environ | needed)
    args.dtypes = args.dtypes or ("float32" if interpreted else "float32,bfloat16")
    args.batches = args.batches or ("3" if interpreted else "1,8")
    args.every = args.every or (7 if interpreted else 5)
    args.prompts = args.prompts or (3 if interpreted else len(PROMPTS))
    args.tokens = args.tokens or (6 if interpreted else 64)

    import triton

    wrong, start = 0, perf_counter()
    if interpreted:
        np.seterr(all="ignore")  # masked rows divide by 0 before they are left out
    with real_aiter(device, version=args.aiter_version, architecture=args.architecture) as calls:
        where = f"Triton's interpreter as {args.architecture}" if interpreted else torch.cuda.get_device_name(device)
        print(f"{where}; torch {torch.__version__}, triton {triton.__version__}, amd-aiter {aiter.installed_version()}")
        if reasons := RocmAiterFaBackend.unsupported_reasons(spec(device=device, non_causal=True)):
            print("; ".join(reasons), file=sys.stderr)
            return 2
        if args.part != "models":
            print("single calls against float64")
            wrong += check(device, args.every, aiter.version_numbers(args.aiter_version), calls, args.verbose)
            print(f"  {perf_counter() - start:.0f} s", flush=True)
        if args.part != "calls":
            start = perf_counter()
            wrong += (tiny if interpreted else embedded)(args, device, calls)
            print(f"  {perf_counter() - start:.0f} s", flush=True)
    print("all right" if not wrong else f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
