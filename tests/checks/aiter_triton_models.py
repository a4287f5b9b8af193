"""Whole generations on AITER's Triton kernels against plain decoding on torch_ref, for
`tests.checks.aiter_triton`.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import PagedKVCache, blocks_for
from specdec.model.batch import ForwardInput
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
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
    narrow = verifier.dtype == torch.float32 and verifier.attention.name.startswith("rocm_aiter")
    return min(480, verifier.max_model_len) if narrow else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Prompts,
    batch: int,
    args: argparse.Namespace,
) -> tuple[list[list[int]], float]:
    """Output tokens of every prompt, and output tokens per verify step."""
    cache = CacheConfig(memory_bytes=2**30 if verifier.device.type == "cuda" else 2**23)
    config = EngineConfig(
        num_draft_tokens=None,
        max_num_seqs=batch,
        max_prefill_tokens=64,
        max_model_len=_longest(verifier),
        graphs=not args.no_graphs,
        cache=cache,
    )
    engine = SpecEngine(verifier, drafter, config)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=args.tokens)) for prompt in prompts
    ]
    while engine.has_work:
        engine.step()
    assert not any(request.error for request in requests), [request.error for request in requests]
    emitted = [count for request in requests for count in request.num_emitted]
    return [request.output_token_ids for request in requests], sum(emitted) / max(1, len(emitted))


@torch.inference_mode()
def gaps(reference: Verifier, prompt: list[int], output: list[int]) -> list[float]:
    """How far below the best logit of the reference each output token lies, given the tokens before
    it; 0 for its own choice.
    """
    tokens = [*prompt, *output[:-1]]
    count, device = len(tokens), reference.device
    blocks = blocks_for(count, 16)
    cache = PagedKVCache(
        reference.kv_specs, num_blocks=blocks, block_size=16, dtype=reference.dtype, device=device
    )
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
    rows = ForwardInput(
        torch.tensor(tokens, device=device), places, metadata, places[len(prompt) - 1 :]
    )
    logits = reference.forward(rows, cache.layers).logits.float()
    chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
    return (logits.max(dim=1).values - chosen).tolist()


def compare(
    label: str,
    reference: Verifier,
    dtype: torch.dtype,
    prompts: Prompts,
    want: Prompts,
    got: Prompts,
    more: str,
) -> int:
    """Prints how a run agrees with the reference, its near-ties included; returns how many tokens
    differ by more.
    """
    near, wrong, total = [], 0, sum(map(len, got))
    for index, (prompt, output) in enumerate(zip(prompts, got, strict=True)):
        for place, gap in enumerate(gaps(reference, prompt, output)):
            if gap > 0:
                near.append(f"prompt {index} token {place}: {gap:.1e}")
                wrong += gap > NEAR_TIE[dtype]
    same = sum(a == b for a, b in zip(want, got, strict=True))
    print(
        f"  {label}: {same} of {len(got)} outputs equal; {total - len(near)} of {total} tokens are"
        f" the reference's choice{more}"
    )
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
        for (name, drafter), batch in itertools.product(
            drafters.items(), map(int, args.batches.split(","))
        ):
            before = dict(calls)
            got, tau = generate(verifier, drafter(verifier), prompts, batch, args)
            used = ", ".join(
                f"{calls[function] - before[function]} {function}" for function in calls
            )
            label = f"{_name(dtype)}, {name}, batch {batch}"
            wrong += compare(
                label, reference, dtype, prompts, want, got, f"; tau {tau:.2f}; calls: {used}"
            )
            if (
                name.startswith("DFlash")
                and before["flash_attn_with_kvcache"] == calls["flash_attn_with_kvcache"]
            ):
                print("    WRONG: no block went through flash_attn_with_kvcache")
                wrong += 1
    if torch.bfloat16 in map(_dtype, args.dtypes.split(",")):
        got, _ = generate(make("torch_ref", torch.bfloat16), None, prompts, len(prompts), args)
        compare(
            "for comparison torch_ref in bfloat16",
            reference,
            torch.bfloat16,
            prompts,
            want,
            got,
            "",
        )
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
    prompts = [
        tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        for text in texts
    ]
    shipped = {
        "random": random_drafter,
        "shipped": lambda verifier: load_shipped(verifier=verifier),
    }
    drafters: dict[str, Make] = {
        f"DFlash ({args.drafter})": shipped.get(
            args.drafter, lambda verifier: load_dflash(args.drafter, verifier=verifier)
        ),
        "n-gram": lambda verifier: load_ngram(None, verifier=verifier),
    }
    print(
        f"{args.target}, {args.prompts} prompts, {args.tokens} tokens each; reference: torch_ref in"
        f" float32, plain decoding"
    )
    return check_model(make, drafters, prompts, args, calls)


def tiny(args: argparse.Namespace, device: torch.device, calls: dict[str, int]) -> int:
    """Tiny random models: ordinary, with sinks and windows, with a softcap; with DFlash drafts."""
    from transformers import AutoModelForCausalLM

    from tests.helpers.tiny_configs import CONFIGS
    from tests.helpers.tiny_models import paged_verifier, random_prompts

    wrong = 0
    for name in args.tiny.split(","):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config.tie_word_embeddings = False
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()

        def make(backend: str, dtype: torch.dtype, model: Any = model) -> Verifier:
            assert dtype == torch.float32
            verifier: Any = paged_verifier(model, block_size=16)
            if backend == "rocm_aiter_fa":
                verifier.attention = RocmAiterFaBackend(verifier.attention.spec)
            return verifier

        prompts = random_prompts(args.prompts)
        print(
            f"tiny {name}, {len(prompts)} prompts, {args.tokens} tokens each; reference: torch_ref"
            f" in float32, plain decoding"
        )
        wrong += check_model(make, {"DFlash (random)": random_drafter}, prompts, args, calls)
    return wrong


def random_drafter(verifier: Verifier) -> Drafter:
    """A DFlash drafter with random weights: full and sliding layers, bidirectional and causal."""
    from drafters.dflash.config.config import DFlashConfig
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
