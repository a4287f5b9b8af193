"""`specdec train bench SHAPE`: a step of the trainer, with random weights and answers."""

import argparse
import gc
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import cycle, product
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from drafters.dflash.model import DFlashModel
from drafters.training.config import BENCH_ALONE, SEVERAL, TrainConfig, build_config
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.loss.memory import Memory, memory_of
from drafters.training.processes import process_group
from drafters.training.shape import dflash_drafter, new_config, with_options
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from evals.bench.shapes import config_file
from evals.report.grid import cell
from specdec.base.errors import InvalidInputError
from specdec.cli.options import say_gpu
from specdec.device.device import resolve_device, resolve_dtype
from verifiers.config.shape import expert_counts, head_shape
from verifiers.dummy import dummy_verifier, random_model, read_config
from verifiers.sizes import weight_bytes

PEAKS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312,
    "MI300X": 1307, "MI325X": 1307, "MI350X": 2300, "MI355X": 2500,
}  # fmt: skip
"""TFLOP/s of dense products in bfloat16 that the makers state, by a part of the card's name."""

STEPS = 5
PROMPT = 4
"""One part in so many of a sequence is its prompt."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One size: milliseconds of a step and its parts, FLOP of a device, bytes, the loss."""

    batch_size: int
    anchors: int
    step: float
    target: float
    optimizer: float
    flop: float
    memory: int | None
    loss: float

    def row(self, peak: float | None) -> tuple[str, ...]:
        """A row of the table, under `COLUMNS`."""
        rate, samples = self.flop / self.step / 1e9, self.batch_size / self.step * 1e3
        drafter = self.step - self.target - self.optimizer
        times = (self.target, drafter, self.optimizer, self.step)
        speeds = f"{samples * self.anchors:,.0f}", f"{samples:,.1f}", f"{rate:,.3g}"
        share = cell(peak and rate / peak, ".1%"), cell(self.memory and self.memory / 1e9, ",.1f")
        sizes = str(self.batch_size), str(self.anchors)
        return *sizes, *(f"{one:,.1f}" for one in times), *speeds, *share, f"{self.loss:.5f}"


COLUMNS = (
    "batch", "anchors", "target ms", "drafter ms", "optimizer ms", "step ms", "anchors/s",
    "samples/s", "TFLOP/s", "MFU", "memory GB", "loss",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints a line for each batch size and number of anchors; see `measure`.

    Raises:
        SpecDecError: an option, the config or the device is wrong.
    """
    if len(args.stages) != 2:
        raise InvalidInputError("train bench takes one shape, such as qwen3-8b, or a config.json")
    given = {name: vars(args).pop(name, None) for name in SEVERAL}
    shortest, cards = (vars(args).pop(name, None) for name in BENCH_ALONE)
    with TemporaryDirectory() as folder:
        args.out = folder
        config = build_config(vars(args), args.config)
        config = replace(config, epochs=2.0 * STEPS, max_steps=None, max_minutes=None)
        sizes = list(product(*(given[name] or [getattr(config, name)] for name in SEVERAL)))
        configs = [replace(config, batch_size=batch, anchors=anchors) for batch, anchors in sizes]
        if cards is not None:
            for line in on_cards(args.stages[1], config, cards):
                print(line)
            return 0
        with process_group(resolve_device(config.device)) as device:
            if not dist.is_initialized() or dist.get_rank() == 0:
                say_gpu(config.device)
                _print(measure(args.stages[1], configs, device, shortest), device, config.dtype)
            else:
                deque(measure(args.stages[1], configs, device, shortest), maxlen=0)
    return 0


def _print(rows: Iterator["Row"], device: torch.device, dtype: str) -> None:
    """A table of them, line by line."""
    peak = None
    if device.type == "cuda" and resolve_dtype(dtype, device) == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    widths = [max(len(title), 7) for title in COLUMNS]
    print(_line(COLUMNS, widths))
    for one in rows:
        print(_line(one if isinstance(one, tuple) else one.row(peak), widths), flush=True)


def on_cards(name: str, config: TrainConfig, cards: int) -> Iterator[str]:
    """Lines on what each of so many cards would hold in a step, by arithmetic: nothing is made.

    The target is in 16 bits a number, or in 8 (FP8); the drafter's weights are whole, or divided.

    Raises:
        InvalidInputError: the batch cannot be split so.
    """
    if cards < 1 or config.batch_size % (cards * config.accumulation):
        raise InvalidInputError(
            f"cards is {cards}; batch-size ({config.batch_size}) must be a multiple of accumulation"
            f" ({config.accumulation}) x cards"
        )
    shape = read_config(config_file(name))
    target: Any = SimpleNamespace(
        config=shape,
        name=name,
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_position_embeddings,
        eos_token_ids=(),
    )
    drafter = with_options(new_config(config, target, _Spare(shape.vocab_size - 1)), config)
    yield (
        f"{name} on {cards} cards, batches of {config.batch_size} sequences of"
        f" {config.max_length:,} tokens with {config.anchors} anchors in {config.accumulation}"
        f" forwards; GB of each card:"
    )
    parts = [info.name for info in fields(Memory)]
    titles = "bits", "shard", *parts, "total"
    widths = [max(len(title), 6) for title in titles]
    yield _line(titles, widths)
    for bits, shard in product((16, 8), (False, True)):
        stored = None if bits == 16 else {"quant_method": "fp8"}
        size, own = weight_bytes(shape, stored, torch.bfloat16), replace(config, shard=shard)
        length = config.max_length
        memory = memory_of(drafter, own, target_bytes=size, length=length, world=cards)
        figures = [f"{size / 1e9:.1f}" for size in (*astuple(memory), memory.total)]
        yield _line((str(bits), "yes" if shard else "no", *figures), widths)


Row = Figures | tuple[str, ...]


def measure(
    name: str, configs: list[TrainConfig], device: torch.device, shortest: int | None = None
) -> Iterator[Row]:
    """Times the trainer's own steps on random sequences.

    Args:
        name: a shape of `evals.bench.shapes`, a config.json, or a folder with one.
        configs: runs that differ in `batch_size` and `anchors`.
        shortest: tokens of the shortest sequence, of evenly spread lengths up to `max_length`.

    Yields:
        Figures of each run, or the beginning of its row and why there are none.
    """
    first = configs[0]
    shortest = first.max_length if shortest is None else shortest
    if not PROMPT < shortest <= first.max_length:
        raise InvalidInputError(
            f"shortest is {shortest}; it must be {PROMPT + 1} to max-length ({first.max_length})"
        )
    shape = read_config(config_file(name))
    model = random_model(shape, device, resolve_dtype(first.dtype, device), seed=first.seed)
    weights = _products(model, shape)
    verifier: Any = dummy_verifier(model, name=name, attention=first.attention, fuse=False)
    del model
    drafter = dflash_drafter(first, verifier, _Spare(verifier.vocab_size - 1))
    taps, whole = drafter.config.target_layer_ids, first.uses_teacher
    target = Target(verifier, taps, distribution=whole, compile=first.compile)
    kept = verifier.num_layers if whole else max(taps) + 1
    size = sum(parameter.numel() for parameter in drafter.parameters())
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes == 1 or dist.get_rank() == 0:
        print(
            f"train bench: {name}, {kept} of {verifier.num_layers} layers run; a drafter of"
            f" {size / 1e6:,.0f} M parameters; sequences of {shortest:,} to {first.max_length:,}"
            f" tokens; {STEPS} steps" + (f"; {processes} processes" if processes > 1 else ""),
            file=sys.stderr,
        )
    for config in configs:
        try:
            yield _timed(config, target, sum(weights[:kept]), shape, shortest)
        except torch.OutOfMemoryError:
            yield str(config.batch_size), str(config.anchors), "out of memory"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(config: TrainConfig, target: Target, weights: float, shape: Any, least: int) -> Figures:
    verifier, device = target.verifier, target.device
    model = dflash_drafter(config, verifier, _Spare(verifier.vocab_size - 1))
    answers = _answers(config, target, model, least)
    trainer = Trainer(config, model, target, answers, answers)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def milliseconds(call: Callable[[], object], times: int = STEPS) -> float:
        call()
        started = _now(on_gpu)
        for _ in range(times):
            call()
        return (_now(on_gpu) - started) / STEPS * 1e3

    def update() -> None:
        for _ in range(config.accumulation):
            trainer.optimizer.accumulate()
        trainer.optimizer.step(torch.ones((), device=device), 0.0)

    trainer.steps(1 if least == config.max_length else STEPS)  # compiles
    trainer.step = 0  # and of the epoch with all lengths
    went = trainer.steps(STEPS)
    step = config.batch_size / went["sequences_per_second"] * 1e3
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else None
    epoch = product(range(STEPS), range(config.accumulation))
    parts = [trainer.batch(micro)[0] for trainer.step, micro in epoch]
    turn = cycle(parts)
    forward = milliseconds(lambda: target.features(next(turn)), len(parts))
    optimizer = milliseconds(update)
    mean = sum(answers.lengths) / len(answers)
    flop = sum(flop_of(model, config, weights, shape, mean).values()) / trainer.world
    sizes = config.batch_size, config.anchors
    return Figures(*sizes, step, forward, optimizer, flop, memory, went["loss"])


def flop_of(
    model: DFlashModel, config: TrainConfig, weights: float, shape: Any, length: float
) -> dict[str, float]:
    """FLOP of a step by part: what its products need, not what a kernel computes twice.

    2 for each weight and row forward, 2 for the gradient of each that has one. Attention of the
    target is causal; a block attends to half of its sequence on average. A head's corrections are
    left out, and so are convolutions and the scans of recurrent layers.

    Args:
        weights: of the target's products, for one token.
        length: tokens of a sequence, padding left out.
    """
    own = model.config
    tokens = config.batch_size * length
    blocks = config.batch_size * config.anchors
    rows = blocks * (own.max_draft_tokens + (not own.sample_from_anchor))
    layers = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, nn.Linear))
    context = model.context_projection()[0].numel()
    features = 0 if model.fc is None else model.fc.weight.numel()
    head = own.hidden_size * (own.draft_vocab_size or own.vocab_size)
    theirs = own.hidden_size * own.vocab_size if config.uses_teacher else 0
    heads = own.num_attention_heads * own.head_dim * own.num_hidden_layers
    ran = shape.num_hidden_layers if config.uses_teacher else max(own.target_layer_ids) + 1
    shapes = [head_shape(shape, layer) for layer in range(ran)]
    width = sum(one.num_heads * one.head_dim for one in shapes)
    return {
        "target": tokens * 2 * weights,
        "context": tokens * (6 * context + 4 * features),  # features have no gradient
        "blocks": rows * 6 * layers,
        "head": blocks * own.max_draft_tokens * (4 * head + 2 * theirs),
        "attention": length * (tokens * 2 * width + rows * 6 * heads),
    }


def _products(model: nn.Module, shape: Any) -> list[float]:
    """Weights by which a token is multiplied, of each layer; of experts those that it chooses."""
    counts = expert_counts(shape)
    found = [0.0] * shape.num_hidden_layers
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and parameter.ndim >= 2:
            share = counts[1] / counts[0] if counts and ".experts." in name else 1.0
            found[int(layer[1])] += parameter.numel() * share
    return found


def _answers(config: TrainConfig, target: Target, model: DFlashModel, shortest: int) -> AnswerSet:
    """Random tokens, as many answers as the steps take, of lengths from `shortest` up."""
    count, mask = STEPS * config.batch_size, model.config.mask_token_id
    generator = torch.Generator().manual_seed(config.seed)
    shape = count, config.max_length
    rows = torch.randint(mask, shape, generator=generator).tolist()  # the mask is the last token
    lengths = torch.linspace(shortest, config.max_length, count).long().tolist()
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    answers = [Answer(row[: len(row) // PROMPT], row[len(row) // PROMPT :]) for row in rows]
    sizes = {"max_length": config.max_length, "bucket": config.bucket}
    return AnswerSet(answers, device=target.device, mask_token_id=mask, **sizes)


class _Spare:
    """In place of a tokenizer, of which a drafter asks for a token to spare: the last one here."""

    bos_token_id = eos_token_id = pad_token_id = unk_token_id = chat_template = None

    def __init__(self, size: int) -> None:
        self._size = size
        self.added_tokens_decoder: dict[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        """Tokens, all but the last one here, by what they are called."""
        return {f"word {row}": row for row in range(self._size)}


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=False)).rstrip()
