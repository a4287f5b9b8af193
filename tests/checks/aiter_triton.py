"""Runs the Triton-only tier of `rocm_aiter_fa` on AITER's real kernels and compares it with torch_ref in float32.

    python -m tests.checks.aiter_triton --device cuda     on a GPU: single calls, then the embedded model
    python -m tests.checks.aiter_triton --device cpu      the same calls in Triton's interpreter, then tiny models

AITER is the installed `amd-aiter`, or the sources in the folder that SPECDEC_AITER names. The exit status is 1 when a call is wrong
or a token differs from the reference's by more than a near-tie.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.backend import AttentionMetadata
from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.core import Drafter, ForwardInput, Verifier
from specdec.engine.engine import SpecEngine
from specdec.kernels import aiter
from specdec.kv_cache import PagedKVCache, blocks_for
from tests.helpers.aiter_real import INTERPRETER, missing, real_aiter
from tests.helpers.attention_case import Case, spec
from tests.helpers.scripted import ScriptedDrafter

LENGTHS = [37, 5, 64]
LONG = 1000
"""A bound on the lengths from which AITER splits the keys over several programs."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
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


def cases(device: torch.device, every: int) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Name, requests and layer options of single calls: of the plain ones only every n-th."""
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies the bits of bfloat16
    plain = itertools.product([torch.float32, half], [(4, 2), (9, 3)], [1, 4, 16], [True, False], [None, 9, 40])
    for dtype, (heads, kv_heads), rows, causal, window in itertools.islice(plain, 0, None, every):
        asked = spec(device=device, dtype=dtype, num_heads=heads, num_kv_heads=kv_heads)
        lengths = [max(length, rows) for length in LENGTHS]
        case = Case(asked, lengths, [rows] * len(lengths), uniform=True, causal=causal)
        yield f"{_kind(rows, causal)}, heads {heads}/{kv_heads}, window {window or '-'}, {_name(dtype)}", case, {"window": window}
    for dtype, extra in ((torch.float32, "no extras"), (half, "sinks"), (torch.float32, "softcap")):
        how: dict[str, Any] = {}
        if extra != "no extras":
            how[extra] = 0.7 if extra == "softcap" else torch.randn(4).to(device)
        case = Case(spec(device=device, dtype=dtype), [40, 17, 35, 33, 50], [3, 17, 1, 33, 20], uniform=False)
        yield f"prefill, extend and decode together, with {extra}, {_name(dtype)}", case, how
    for rows, causal in ((1, True), (4, True), (4, False)):
        case = Case(spec(device=device, dtype=half), [200, 16], [rows] * 2, uniform=True, causal=causal)
        case.metadata = replace(case.metadata, max_seq_len=LONG, block_table=_wider(case.metadata.block_table))
        yield f"{_kind(rows, causal)}, keys split over programs, {_name(half)}", case, {}


def _longest(verifier: Verifier) -> int | None:
    """Beyond 512 keys AITER splits them over programs, for which it refuses float32."""
    return min(480, verifier.max_model_len) if verifier.dtype == torch.float32 else None


def _kind(rows: int, causal: bool) -> str:
    return f"{'causal' if causal else 'bidirectional':<13} {rows:>2} rows"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wider(table: Tensor) -> Tensor:
    """The same block table for requests of up to `LONG` tokens."""
    return torch.cat([table, table[:, :1].expand(-1, blocks_for(LONG, 16) - table.shape[1])], dim=1).contiguous()


def check_calls(device: torch.device, every: int) -> int:
    """Prints the largest error of every single call; returns how many are wrong."""
    wrong = 0
    for name, case, how in cases(device, every):
        want = case.want(scale=0.125, **how)
        got = case.attend(RocmAiterFaBackend(case.spec), scale=0.125, **how).float()
        error, relative = float((got - want).abs().max()), float((got - want).norm() / want.norm())
        bad = not error <= TOLERANCE[case.spec.dtype]  # also when it is not a number
        wrong += bad
        print(f"  {name:<70} max error {error:.1e}, relative {relative:.1e}{'  WRONG' if bad else ''}", flush=True)
    return wrong


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
    from verifiers.load import load_verifier

    def make(backend: str, dtype: torch.dtype) -> Verifier:
        return load_verifier(args.target, device=device, dtype=dtype, attention=backend)[0]

    tokenizer = load_verifier(args.target, device=torch.device("cpu"), dtype=torch.float32)[1]
    texts = ([{"role": "user", "content": text}] for text in PROMPTS[: args.prompts])
    prompts = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False) for text in texts]
    dflash = f"DFlash ({args.drafter})"
    drafters: dict[str, Make] = {
        dflash: random_drafter if args.drafter == "random" else lambda verifier: load_dflash(args.drafter, verifier=verifier),
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


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 when something is wrong, 2 when AITER or Triton is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks.aiter_triton", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, or cpu for Triton's interpreter")
    add("--part", default="all", choices=["all", "calls", "models"])
    add("--every", type=int, help="of the plain calls take every n-th (default 1 on a GPU, 7 in the interpreter)")
    add("--aiter-version", default="0.1.20", help="of the sources that SPECDEC_AITER names (default %(default)s)")
    add("--architecture", default="gfx1100", help="to pretend in the interpreter (default %(default)s)")
    add("--target", default="embedded", help="on a GPU: a name or folder (default %(default)s)")
    add("--tiny", default="llama,gpt_oss,gemma2", help="in the interpreter: which tiny models (default %(default)s)")
    add("--drafter", default="random", help="on a GPU: a DFlash checkpoint (default %(default)s)")
    add("--dtypes", help="of the target (default float32,bfloat16 on a GPU, float32 in the interpreter)")
    add("--batches", help="(default 1,8 on a GPU, 3 in the interpreter)")
    add("--prompts", type=int, help="(default 8 on a GPU, 3 in the interpreter)")
    add("--tokens", type=int, help="of each output (default 64 on a GPU, 6 in the interpreter)")
    add("--no-graphs", action="store_true", help="launch steps operation by operation")
    args = parser.parse_args(argv)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    device = torch.device(args.device)
    interpreted = device.type == "cpu"
    needed = {"TRITON_F32_DEFAULT": "ieee", **(INTERPRETER if interpreted else {})}  # float32 products in float32, not in TF32
    if any(os.environ.get(name) != value for name, value in needed.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.checks.aiter_triton", *(argv or sys.argv[1:])], os.environ | needed)
    args.dtypes = args.dtypes or ("float32" if interpreted else "float32,bfloat16")
    args.batches = args.batches or ("3" if interpreted else "1,8")
    args.every = args.every or (7 if interpreted else 1)
    args.prompts = args.prompts or (3 if interpreted else len(PROMPTS))
    args.tokens = args.tokens or (6 if interpreted else 64)

    import triton

    wrong = 0
    if interpreted:
        np.seterr(all="ignore")  # masked rows divide by 0 before they are left out
    with real_aiter(device, version=args.aiter_version, architecture=args.architecture) as calls:
        where = f"Triton's interpreter as {args.architecture}" if interpreted else torch.cuda.get_device_name(device)
        print(f"{where}; torch {torch.__version__}, triton {triton.__version__}, amd-aiter {aiter.installed_version()}")
        if reasons := RocmAiterFaBackend.unsupported_reasons(spec(device=device, non_causal=True)):
            print("; ".join(reasons), file=sys.stderr)
            return 2
        if args.part != "models":
            print("single calls against torch_ref in float32")
            wrong += check_calls(device, args.every)
        if args.part != "calls":
            wrong += (tiny if interpreted else embedded)(args, device, calls)
    print("all right" if not wrong else f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
