"""`specdec train bench`: the work it counts is what the step computes, and every shape runs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drafters.training.config import TrainConfig
from drafters.training.trainer import Trainer
from evals.bench import training
from evals.bench.shapes import config_file, entries, names
from specdec.cli.main import main
from specdec.parallel.group import Group
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_configs import CONFIGS

SHAPE = {
    "model_type": "qwen3", "dtype": "float32", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 96, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "vocab_size": 512,
}  # fmt: skip


class Products(TorchDispatchMode):
    """Counts the FLOP of products with weights; attention's are others."""

    flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = func.overloadpacket
        if kind in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.flop += flop_registry[kind](*args, **(kwargs or {}), out_val=out)
        return out


def bench(folder: Path, shape: dict[str, Any], *flags: str) -> int:
    file = folder / "config.json"
    file.write_text(json.dumps(shape))
    sizes = ["--max-length", "64", "--block-size", "4", "--layers", "2", "--bucket", "16"]
    where = ["--device", "cpu", "--dtype", "float32"]
    return main(["train", "bench", str(file), *sizes, *where, *flags])


@pytest.mark.parametrize("teacher", [False, True])
def test_the_work_that_is_counted_is_that_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: bool
) -> None:
    """Catches a part of a step that is left out or counted twice, attention aside."""
    found: list[float] = []
    flop_of, steps = training.flop_of, Trainer.steps

    def stated(*args: Any) -> dict[str, float]:
        parts = flop_of(*args)
        found.append(sum(parts.values()) - parts["attention"])
        return parts

    def counted(self: Trainer, count: int) -> dict[str, Any]:
        with Products() as products:
            row = steps(self, count)
        if count == 1:
            found.append(products.flop)
        return row

    monkeypatch.setattr(training, "flop_of", stated)
    monkeypatch.setattr(Trainer, "steps", counted)
    flags = ["--kl", "0.5"] if teacher else []
    assert bench(tmp_path, SHAPE, "--batch-size", "2", "--anchors", "3", *flags) == 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "widths"), [("gemma4", (64, 96, 64)), ("laguna", (96, 64, 96)), ("llama", (64,) * 3)]
)
def test_layers_whose_heads_differ_are_counted_one_by_one(
    name: str, widths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target runs up to the tap: three layers."""
    found: list[float] = []
    flop_of = training.flop_of

    def stated(model: Any, config: TrainConfig, *args: Any) -> dict[str, float]:
        parts = flop_of(model, config, *args)
        blocks = 6 * 64 * 64 * config.anchors * config.batch_size * 4  # of 4 rows, 64 wide
        found.append((parts["attention"] - blocks) / (64 * 64 * config.batch_size * 2))
        return parts

    monkeypatch.setattr(training, "flop_of", stated)
    target = json.loads(json.dumps(CONFIGS[name]().to_dict(), default=str))
    flags = ("--batch-size", "2", "--anchors", "2", "--layers", "1", "--taps", "2")
    heads = ("--heads", "4", "--kv-heads", "2", "--head-dim", "16")
    assert bench(tmp_path, target, *flags, *heads) == 0
    assert found == [sum(widths)]


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_shape_has_a_line_for_each_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shape = entries(config_file(name))
    part = shape.get("text_config", shape)
    part |= {key: value for key, value in SMALL.items() if key in part}
    assert bench(tmp_path, shape, "--batch-size", "1", "2", "--anchors", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "3"], ["2", "3"]]
    figures = [figure for line in lines[1:] for figure in line.split()[5:]]
    assert all(float(figure.replace(",", "")) >= 0 for figure in figures)


def test_a_size_without_room_is_said_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Trainer.steps

    def full(self: Trainer, count: int) -> dict[str, Any]:
        if self.config.anchors == 3:
            raise torch.OutOfMemoryError("no room")
        return steps(self, count)

    monkeypatch.setattr(Trainer, "steps", full)
    assert bench(tmp_path, SHAPE, "--batch-size", "1", "--anchors", "3", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "3", "out", "of", "memory"]
    assert lines[2].split()[:2] == ["1", "2"]


def test_sequences_of_any_length_share_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches lengths that are all alike, where packing has nothing to gain."""
    seen: list[Any] = []
    steps = Trainer.steps

    def noted(self: Trainer, count: int) -> dict[str, Any]:
        seen.append((self.train.lengths, self.batch(0)[0].packing))
        return steps(self, count)

    monkeypatch.setattr(Trainer, "steps", noted)
    flags = ["--batch-size", "2", "--anchors", "2", "--shortest", "8", "--pack-length", "128"]
    assert bench(tmp_path, SHAPE, *flags) == 0
    lengths, packing = seen[0]
    assert (min(lengths), max(lengths), len(set(lengths))) == (8, 64, 10)
    assert packing.slots.shape[1] == 2
    assert bench(tmp_path, SHAPE, "--shortest", "65") == 2
    assert main(["train", "--out", str(tmp_path), "--shortest", "8"]) == 2
    said = capsys.readouterr().err
    assert "shortest is 65; it must be 5 to max-length (64)" in said
    assert "--shortest is for specdec train bench alone" in said


def test_what_eight_cards_would_hold_is_said_without_running(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--max-length", "384", "--accumulation", "4", "--loss-rows", "2048", "--anchors", "24"]
    assert main(["train", "bench", "qwen3.6-27b", "--cards", "8", *flags]) == 0
    _, titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.split() == [
        "bits", "shard", "target", "weights", "optimizer", "activations", "logits", "total",
    ]  # fmt: skip
    found = {tuple(row.split()[:2]): [float(x) for x in row.split()[2:]] for row in rows}
    assert found.keys() == {("16", "no"), ("16", "yes"), ("8", "no"), ("8", "yes")}
    for figures in found.values():
        assert sum(figures[:-1]) == pytest.approx(figures[-1], abs=0.3)
    assert 52 < found["16", "no"][0] < 56 and 27 < found["8", "no"][0] < 31
    assert found["16", "yes"][-1] < 68 and found["16", "no"][1] > 2 * found["16", "yes"][1]
    assert main(["train", "bench", "qwen3.6-27b", "--cards", "5"]) == 2
    assert "cards is 5; batch-size (96) must be a multiple" in capsys.readouterr().err


def losses(group: Group | None, folder: Path) -> list[float]:
    """Of batches of 2 and of 4 sequences, the drafter divided over the ranks."""
    sizes: dict[str, Any] = {"max_length": 64, "block_size": 4, "layers": 2, "bucket": 16}
    run: dict[str, Any] = {"batch_size": 2, "anchors": 3, "epochs": 10.0, "shard": True}
    config = TrainConfig(out=str(folder), device="cpu", dtype="float32", **sizes, **run)
    configs = [config, replace(config, batch_size=4)]
    found = list(training.measure(str(folder / "config.json"), configs, torch.device("cpu")))
    return [one.loss for one in found if isinstance(one, training.Figures)]


@pytest.mark.slow
def test_two_processes_have_the_loss_of_one(tmp_path: Path) -> None:
    """Catches a process that takes other sequences, or other weights, than its part."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    alone, ranks = losses(None, tmp_path), run_ranks(2, losses, tmp_path)
    assert len(alone) == 2 and ranks[0] == ranks[1] == pytest.approx(alone, rel=1e-5)


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "bench"]) == 2
    assert "qwen3-8b" in capsys.readouterr().err
    assert main(["train", "bench", "no-such-shape"]) == 2
    assert "no config 'no-such-shape'" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path), "--anchors", "2", "3"]) == 2
    assert "--anchors 2 3: a run takes one" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
