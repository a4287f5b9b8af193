"""Weights in GGUF's blocks beside bfloat16: `python -m tests.checks.blocks [FILE.gguf]`.

First each product of the Qwen2.5 1.5B in Q4_K_M, with random numbers: relative error against
float64, microseconds (median of graph replays that rotate over copies, so that the L2 cache does
not flatter it), those of bfloat16, and the time that the bytes alone would take; of 128 and 256
rows also with the weight made numbers first. `--sweep` tries other divisions of few rows. Then,
with a file, whole steps of the engine with its weights as stored and in bfloat16, in turns: plain,
and with 7 and 15 drafts, which verify 8 and 16 rows; and how far either's logits are from
float32's. The status is 1 when an error is too large.
"""

import argparse
import gc
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.ngram import NGramDrafter
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import PagedKVCache
from specdec.layers.packed import triton_packed
from specdec.layers.packed.check import random_blocks
from specdec.layers.packed.gguf import GgufWeight
from specdec.layers.packed.triton_packed import Tile, Wide
from specdec.layers.triton_linear import few_rows
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier
from tests.checks.step import step_time
from tests.helpers.card import BLOCK, TOLERANCE, bandwidth, microseconds
from verifiers.load import load_verifier


class Product(NamedTuple):
    """A product of the model.

    Attributes:
        parts: types and outputs of what is joined.
        inputs: of a row.
        activation: of gate and up.
        may_split: the norm behind it adds up partial sums.
    """

    parts: tuple[tuple[str, int], ...]
    inputs: int
    activation: str | None = None
    may_split: bool = False


PRODUCTS = {
    "qkv, Q4_K": Product((("Q4_K", 2048),), 1536),
    "qkv, Q4_K and Q6_K": Product((("Q4_K", 1792), ("Q6_K", 256)), 1536),
    "output, Q4_K": Product((("Q4_K", 1536),), 1536, may_split=True),
    "gate and up, Q4_K": Product((("Q4_K", 17920),), 1536, "silu"),
    "down, Q4_K": Product((("Q4_K", 1536),), 8960, may_split=True),
    "down, Q6_K": Product((("Q6_K", 1536),), 8960, may_split=True),
    "head, Q6_K": Product((("Q6_K", 151936),), 1536),
    "gate and up of the 0.5B, Q5_0": Product((("Q5_0", 9728),), 896, "silu"),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)


class Sides:
    """A product with random numbers, by our kernels and in bfloat16.

    Args:
        title: in `PRODUCTS`.
        copies: of each weight.
    """

    def __init__(self, title: str, copies: int = 1) -> None:
        self.product = PRODUCTS[title]
        parts, inputs = self.product.parts, self.product.inputs
        blocks = [random_blocks(kind, (outputs, inputs), torch.bfloat16) for kind, outputs in parts]
        joined = GgufWeight.joined([one.to(torch.device("cuda")) for one in blocks])
        self.weight = joined.packed().arranged()
        self.weights = [self.weight._changed(torch.Tensor.clone) for _ in range(copies)]
        self.numbers = [self.weight.dequantized() for _ in range(copies)]

    def rows(self, count: int) -> Tensor:
        """Random ones."""
        return torch.randn(count, self.product.inputs, device="cuda", dtype=torch.bfloat16)

    def stored(self, x: Tensor, i: int = 0) -> Tensor:
        """By our kernels."""
        weight, product = self.weights[i], self.product
        if len(x) > triton_packed.MAX_ROWS:
            return triton_packed.product(x, weight)
        activation, may_split = product.activation, product.may_split
        out = triton_packed.few_rows(x, weight, activation=activation, may_split=may_split)
        assert out is not None, "the kernels take it"
        return out

    def tiled(self, x: Tensor, i: int = 0) -> Tensor:
        """By our kernels alone, as products of many rows with long groups are."""
        most = triton_packed.MAX_TILED_ROWS
        return triton_packed.product(x, self.weights[i], max_tiled_rows=most)

    def dense(self, x: Tensor, i: int = 0) -> Tensor:
        """In bfloat16, as a step would."""
        numbers, product = self.numbers[i], self.product
        activation, may_split = product.activation, product.may_split
        out = few_rows(x, numbers, activation=activation, may_split=may_split)
        return x @ numbers.T if out is None else out

    def divided(self, x: Tensor, tile: Tile, i: int = 0) -> Tensor:
        """With another division."""
        activation = self.product.activation
        return triton_packed.multiply(x, self.weights[i], None, tile, activation=activation)

    def error(self, x: Tensor) -> float:
        """Of our kernels, relative to the largest number."""
        exact = x.double() @ self.weight.dequantized(torch.float64).T
        if self.product.activation is not None and len(x) <= triton_packed.MAX_ROWS:
            gate, up = exact.chunk(2, dim=-1)
            exact = F.silu(gate) * up
        got = self.stored(x)
        return relative(got.sum(0) if got.ndim == 3 else got, exact)


def compile_all(titles: list[str], *, sweep: bool) -> None:
    """Compiles what will be timed, many at a time, into Triton's cache."""
    cases = [(title, rows, sweep) for title in titles for rows in ROWS]
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, cases))


def _compile(case: tuple[str, int, bool]) -> None:
    title, rows, sweep = case
    torch.set_grad_enabled(False)
    sides = Sides(title)
    x = sides.rows(rows)
    sides.stored(x)
    sides.dense(x)
    for tile in divisions(sides.product, rows) if sweep else ():
        with suppress(Exception):  # what a chip has no room for is said when it is timed
            sides.divided(x, tile)


def divisions(product: Product, rows: int) -> list[Tile]:
    """Other ways to divide a product of few rows."""
    if rows not in (1, 16):
        return []
    tiles = []
    for lanes, depth, splits in itertools.product((2, 4, 8), (128, 256, 512), (1, 2, 3, 4)):
        if splits == 1 or product.may_split:
            wide = Wide(16, 16, depth)
            tile = Tile(16, lanes, depth, splits=splits, direct=True, medium=wide, wide=wide)
            tiles.append(tile)
    return tiles


def check_products(bytes_per_us: float, titles: list[str], *, sweep: bool) -> bool:
    """A line for each product and number of rows; whether all are near enough."""
    compile_all(titles, sweep=sweep)
    print(f"{'':<32}{'rows':>5}{'error':>10}{'us':>8}{'bf16 us':>9}{'floor us':>10}{'ratio':>7}")
    exact_enough = True
    for title in titles:
        stored = sum(outputs for _, outputs in PRODUCTS[title].parts) * PRODUCTS[title].inputs // 2
        sides = Sides(title, copies := 1 + 2**27 // stored)
        for rows in ROWS:
            x = sides.rows(rows)
            error = sides.error(x)
            exact_enough &= error <= TOLERANCE[torch.bfloat16]
            ours = microseconds(partial(sides.stored, x), copies)
            others = microseconds(partial(sides.dense, x), copies)
            floor = sides.weight.nbytes / bytes_per_us
            print(
                f"{title:<32}{rows:>5}{error:>10.1e}{ours:>8.1f}{others:>9.1f}{floor:>10.1f}",
                f"{ours / others:>6.2f}",
                flush=True,
            )
            if triton_packed.MAX_ROWS < rows <= triton_packed.MAX_TILED_ROWS:
                tiled = microseconds(partial(sides.tiled, x), copies)
                print(f"    {tiled:.1f} us in tiles, {tiled / others:.2f}", flush=True)
            found = []
            for tile in divisions(sides.product, rows) if sweep else ():
                try:
                    found.append((microseconds(partial(sides.divided, x, tile), copies, 5), tile))
                except Exception as error:
                    print(f"    {tile.lanes} lanes of {tile.depth}: {type(error).__name__}")
            for us, tile in sorted(found)[:4]:
                print(f"    {us:.1f} us: {tile.lanes} lanes of {tile.depth}, {tile.splits} splits")
        del sides
        torch.cuda.empty_cache()
    return exact_enough


def relative(got: Tensor, exact: Tensor) -> float:
    """The largest error, of the largest number."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


def check_steps(file: Path, device: torch.device, *, turns: int, steps: int, rows: int) -> bool:
    """Lines of steps in turns, then of logits; whether stored weights are as near as bfloat16."""

    def load(dtype: torch.dtype, as_stored: bool) -> Verifier:
        return load_verifier(str(file), device=device, dtype=dtype, as_stored=as_stored)[0]

    sides = {"bfloat16": load(torch.bfloat16, False), "as stored": load(torch.bfloat16, True)}
    for name, verifier in sides.items():
        codes = ", ".join(verifier.weight_codes) or "numbers"
        print(f"{name}: {verifier.weight_bytes / 1e9:.2f} GB of weights in {codes}", flush=True)
    for drafts in (0, 7, 15):
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, verifier in sides.items():
                times[name].append(milliseconds(verifier, drafts, steps))
        base, ours = (statistics.median(times[name]) for name in ("bfloat16", "as stored"))
        ratios = sorted(b / a for a, b in zip(times["bfloat16"], times["as stored"], strict=True))
        print(
            f"{drafts + 1:>2} rows a step: bfloat16 {base:.3f} ms, as stored {ours:.3f} ms,"
            f" {ours / base:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f} in {turns} turns)",
            flush=True,
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, sides["bfloat16"].vocab_size, (rows,), generator=generator)
    found = {name: logits(verifier, ids) for name, verifier in sides.items()}
    sides.clear()
    gc.collect()
    exact = logits(load(torch.float32, False), ids)
    errors: dict[str, float] = {}
    for name, one in found.items():
        same = (one.argmax(-1) == exact.argmax(-1)).double().mean()
        errors[name], most = float((one - exact).norm() / exact.norm()), relative(one, exact)
        off = f"{errors[name]:.1e}, at most {most:.1e}"
        print(f"{name}: logits off float32's by {off}; {same:.1%} name its token")
    return errors["as stored"] <= 2 * errors["bfloat16"]


def milliseconds(verifier: Verifier, drafts: int, steps: int) -> float:
    """Of a step with one request."""
    drafter = NGramDrafter(max_draft_tokens=drafts) if drafts else None
    config = EngineConfig(max_num_seqs=1, max_model_len=2048, num_draft_tokens=drafts or None)
    context = 512 if steps > 10 else 32
    return step_time(SpecEngine(verifier, drafter, config), 1, context, steps=steps)


def logits(verifier: Verifier, ids: Tensor) -> Tensor:
    """float64 [T, V] of a prompt."""
    device, count = verifier.device, len(ids)
    blocks = -(-count // BLOCK)
    cache = PagedKVCache(
        verifier.kv_specs,
        num_blocks=blocks + 1,
        block_size=BLOCK,
        dtype=verifier.dtype,
        device=device,
    )
    view = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(BLOCK, BLOCK + count, device=device),
        num_reqs=1,
        num_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        query_lens=[count],
        seq_lens_host=[count],
    )
    positions = torch.arange(count, device=device)
    rows = ForwardInput(ids.to(device), positions, view)
    return verifier.forward(rows, cache.layers).logits.double().cpu()


def main() -> int:
    """Products, then steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", help="a GGUF file (default: products alone)")
    parser.add_argument("--sweep", action="store_true", help="try other divisions of few rows")
    parser.add_argument("--only", nargs="*", help="products whose titles begin so (default: all)")
    parser.add_argument("--turns", type=int, default=5, help="of both sides (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default %(default)s; cpu: steps alone)")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    if not cpu and not torch.cuda.is_available():
        print("no CUDA or ROCm device here")
        return 2
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    checks: list[Callable[[], bool]] = []
    starts = tuple(PRODUCTS if args.only is None else args.only)
    titles = [title for title in PRODUCTS if title.startswith(starts)]
    if not cpu:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not cpu and titles:
        checks.append(lambda: check_products(bandwidth(), titles, sweep=args.sweep))
    if args.file is not None:
        steps, rows = (2, 16) if cpu else (100, 128)
        device = torch.device(args.device)
        run = partial(check_steps, args.file, device, turns=args.turns, steps=steps, rows=rows)
        checks.append(run)
    return sum(not check() for check in checks)


if __name__ == "__main__":
    sys.exit(main())
