"""Ranks of one machine: `torchrun --nproc-per-node 2 -m tests.checks.ranks`.

1. Bits: a row of partial products, added over the ranks alone and among others. In order it has to
  be the same.
2. Microseconds of a sum over the ranks, by its size, as a captured step has them.
3. The same of a sum with the norm behind it, in two kernels and in one.
4. Tokens of a target with random weights, computed by all ranks, beside those that each computes
  alone: the same in float32.

How long steps of real shapes take on one and on several GPUs, `specdec bench --dummy-weights`
tells: docs/tensor-parallel.md.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import LlamaConfig

from evals.bench.dummy_engine import FreeDrafter
from specdec.base.config import CacheConfig, EngineConfig
from specdec.device.device import resolve_device
from specdec.engine.engine import SpecEngine
from specdec.layers.ops.exchange import shared_rows
from specdec.model.core import Verifier
from specdec.parallel.collectives import all_reduce
from specdec.parallel.group import Group, join_group, rank_device
from specdec.parallel.one_shot import OneShot
from specdec.parallel.ordered import gathered
from specdec.sampling.params import SamplingParams
from verifiers.dummy import dummy_rank

Say = Callable[[str], None]


def modes(group: Group) -> dict[str, Group]:
    """Ways to add."""
    alone = replace(group, one_shot=None)
    found = {"the backend's own": alone, "gathered, in order": replace(alone, ordered=True)}
    return found | ({"one kernel for small ones": group} if group.one_shot is not None else {})


def check_bits(group: Group, device: torch.device, say: Say) -> bool:
    """Lines by mode; whether the modes in order kept the bits, and all ranks had the same."""
    right = True
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator(device).manual_seed(group.rank)
        for width in (4096, 8192):
            rows = torch.randn(16, width, device=device, generator=generator).to(dtype)
            for name, mode in modes(group).items():
                among = all_reduce(rows.clone(), mode)
                alone = torch.cat([all_reduce(row[None].clone(), mode) for row in rows])
                differ = int((among != alone).sum())
                everywhere = gathered(among, group.size, group.device_group)
                same = bool((everywhere == everywhere[0]).all())
                say(
                    f"{dtype} {width:>6}, {name:<28}{differ / among.numel():>8.2%} of the numbers"
                    f" differ; ranks agree: {same}"
                )
                right &= same and (differ == 0 or name == "the backend's own")
    return right


SIZES = (8, 64, 128, 256, 512, 1024, 2048, 4096)
"""Of messages, in KiB."""


def check_times(group: Group, device: torch.device, say: Say, calls: int = 50) -> None:
    """Lines by bytes of a message; the kernel for small ones is measured beyond what it is used
    for, which may be wrong.
    """
    ways = modes(group)
    if group.one_shot is not None:
        ways["one kernel for small ones"] = replace(
            group, one_shot=OneShot(group.size, group.device_group, device, SIZES[-1] * 1024)
        )
        say(f"the kernel for small ones is used up to {group.one_shot.max_bytes // 1024} KiB")
    for kilobytes in SIZES:
        x = torch.randn(kilobytes * 512, device=device).bfloat16().view(-1, 4096)
        found = [
            f"{name} {_microseconds(partial(all_reduce, x, mode), device, calls):.1f}"
            for name, mode in ways.items()
        ]
        say(f"{kilobytes:>6} KiB: {', '.join(found)} us")


def check_norms(group: Group, device: torch.device, say: Say) -> None:
    """Lines by rows."""
    ranks = shared_rows(group, 4096, device, torch.bfloat16)
    say(f"sums within norms: {ranks is not None}")
    if ranks is None:
        return
    from specdec.kernels.triton_norm import add_rms_norm  # it imports Triton

    weight = torch.ones(4096, device=device).bfloat16()
    for rows in (1, 8, 32, 64):
        x = torch.randn(rows, 4096, device=device).bfloat16()

        def in_two(x: torch.Tensor = x) -> object:
            return add_rms_norm(all_reduce(x, group), x, weight, 1e-5)

        ways: dict[str, Callable[[], object]] = {
            "in two kernels": in_two,
            "in one": partial(add_rms_norm, x, x, weight, 1e-5, ranks=ranks),
        }
        found = [f"{name} {_microseconds(way, device, 50):.1f}" for name, way in ways.items()]
        say(f"{rows:>6} rows of 4096, sum and norm: {', '.join(found)} us")


def _microseconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Of one call, among many of a captured graph on a GPU."""

    def launch() -> None:
        for _ in range(calls):
            work()

    launch()
    replay, wait = launch, lambda: None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            launch()
        replay, wait = graph.replay, torch.cuda.synchronize
    replay()
    wait()
    started = time.perf_counter()
    for _ in range(5):
        replay()
    wait()
    return (time.perf_counter() - started) / 5 / calls * 1e6


BLOCKS = {"no drafts": (0, 0), "7 drafts": (7, 0), "a tree of 15": (7, 15)}
"""Depth, and nodes of a tree or 0."""


def tokens(verifier: Verifier, block: str, max_tokens: int) -> list[list[int]]:
    """Greedy tokens of a few prompts with random drafts."""
    k, nodes = BLOCKS[block]
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=256,
        num_draft_tokens=k if k and not nodes else None,
        tree_nodes=nodes or None,
        cache=CacheConfig(memory_bytes=2**28),
    )
    engine = SpecEngine(verifier, FreeDrafter(k) if k else None, config)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(2, verifier.vocab_size, (length,), generator=generator).tolist()
        for length in (3, 17, 40, 90, 33, 8)
    ]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.add_request(prompt, sampling) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def check_tokens(group: Group, device: torch.device, say: Say, *, small: bool) -> bool:
    """Lines by type and number of drafts; whether all were the same in float32."""
    hidden, width, layers, heads = (64, 96, 2, 4) if small else (2048, 5632, 8, 16)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=group.size, vocab_size=32003,
        max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    right = True
    for dtype in (torch.float32, torch.bfloat16):
        whole, part = (
            dummy_rank(config, one, device, dtype, name="random") for one in (None, group)
        )
        for block in BLOCKS:
            together, alone = (tokens(one, block, 8 if small else 64) for one in (part, whole))
            equal = sum(one == other for one, other in zip(together, alone, strict=True))
            say(f"{dtype}, {block}: {equal} of {len(alone)} outputs are those of one process")
            right &= equal == len(alone) or dtype == torch.bfloat16
    return right


def main() -> int:
    """All checks; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto", help="cuda or cpu (default %(default)s)")
    args = parser.parse_args()
    device = rank_device(resolve_device(args.device))
    torch.set_grad_enabled(False)
    group = join_group(device)
    if group is None:
        print(
            "one process is no group; start it with torchrun --nproc-per-node 2 -m"
            " tests.checks.ranks"
        )
        return 2

    def say(line: str) -> None:
        if group.rank == 0:
            print(line, flush=True)

    say(
        f"{group.size} ranks on {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'},"
        f" torch {torch.__version__}"
    )
    say(f"small sums in one kernel: {group.one_shot is not None}")
    small = device.type == "cpu"
    right = check_bits(group, device, say)
    check_times(group, device, say, calls=2 if small else 50)
    check_norms(group, device, say)
    right &= check_tokens(group, device, say, small=small)
    say("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
