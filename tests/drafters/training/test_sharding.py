"""The drafter's weights divided over two processes: the run is that of one, and can be killed."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from drafters.training.config import TrainConfig
from drafters.training.loss.evaluate import replay
from drafters.training.loss.sharding import is_sharded
from drafters.training.state import load_state
from drafters.training.trainer import Trainer
from specdec.base.errors import InvalidInputError
from tests.drafters.tiny import TINY, tiny_model
from tests.drafters.training.small import CPU, small_trainer
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 6


def trainer_of(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Trainer:
    """A run with blocks behind others and a running mean."""
    options: dict[str, Any] = {"replay": 0.5, "ema": 0.8, "max_steps": STEPS, "accumulation": 2}
    return small_trainer(folder, dtype, **options | changes)


def kinds_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """The masters and what else is kept of each weight."""
    state = trainer.optimizer.state_dict()
    return {kind: parts for kind, parts in state.items() if kind != "steps"}


def in_a_rank(group: Any, folder: Path) -> dict[str, Any]:
    """One of two processes; a warning of FSDP's would reach every user."""
    warnings.filterwarnings("error", message="FSDP2")
    whole = trainer_of(folder / "whole", shard=True)
    rows = [whole.steps(STEPS)]
    with whole.optimizer.averaged():
        taus = [replay(whole.model, whole.target, whole.heldout, whole.config).tau()]
    whole.steps(0)
    found = kinds_of(whole)
    first = trainer_of(folder / "killed", shard=True)
    first.steps(3)
    (folder / "killed" / "run" / "training").mkdir(parents=True, exist_ok=True)
    first._save()
    dist.barrier()
    second = trainer_of(folder / "killed", shard=True)
    assert second.step == 3
    second.steps(STEPS - 3)
    again = kinds_of(second)
    low = trainer_of(folder / "low", torch.bfloat16, shard=True)
    rows.append(low.steps(2))
    shards = {n: p for n, p in low.model.named_parameters() if is_sharded(n)}
    local = sum(p.to_local().nbytes for p in shards.values())  # type: ignore[attr-defined]
    # as others see it between two forwards: no weight is whole that need not be
    held = {n: p.dtype for n, p in low.model.named_parameters()}
    same = all(
        torch.equal(found[kind][name], again[kind][name]) for kind in found for name in found[kind]
    )
    return {"kinds": found, "same": same, "rows": rows, "taus": taus, "bytes": local, "held": held}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    yield folder, run_ranks(2, in_a_rank, folder)


def test_two_processes_have_the_weights_of_one(
    ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """As near to float64 as one process comes: catches means of gradients in place of sums, parts
    that are clipped by their own norm, and moments of other weights.
    """
    alone, exact = trainer_of(tmp_path / "alone"), trainer_of(tmp_path / "low", torch.bfloat16)
    rows, low = alone.steps(STEPS), exact.steps(2)
    for name in ("loss", "train_tau", "grad_norm"):
        for rank in ranks[1]:
            assert rank["rows"][0][name] == pytest.approx(rows[name], rel=1e-5), name
            assert rank["rows"][1][name] == pytest.approx(low[name], rel=2e-2), name
    with Float64():
        wide = trainer_of(tmp_path / "wide", torch.float64)
        wide.steps(STEPS)
    found, plain, right = ranks[1][0]["kinds"], kinds_of(alone), kinds_of(wide)
    assert found.keys() == plain.keys()
    for kind in ("masters", "means", "exp_avg", "exp_avg_sq"):
        assert found[kind].keys() == plain[kind].keys()
        one, two, three = (
            torch.cat([parts[kind][name].flatten() for name in plain[kind]])
            for parts in (found, plain, right)
        )
        assert_as_exact(one, two, three.double())
    with alone.optimizer.averaged():
        tau = replay(alone.model, alone.target, alone.heldout, alone.config).tau()
    assert [rank["taus"] for rank in ranks[1]] == [[pytest.approx(tau, rel=1e-6)]] * 2


def test_a_killed_run_goes_on_to_the_same_bits(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    assert ranks[1][0]["same"], "what two processes saved and took up again"


def test_one_process_takes_up_what_two_saved(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    trainer = trainer_of(folder / "killed", shard=True)
    assert trainer.step == 3
    state = load_state(folder / "killed" / "run" / "training", CPU)
    assert state is not None
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, state["optimizer"]["masters"][name]), name
    trainer.steps(STEPS - 3)
    for name, master in kinds_of(trainer)["masters"].items():
        torch.testing.assert_close(master, results[0]["kinds"]["masters"][name], atol=2e-4, rtol=0)


def test_each_process_keeps_half(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    weights = dict(tiny_model(TINY).named_parameters())
    divided = sum(weight.nbytes for name, weight in weights.items() if is_sharded(name))
    assert divided > 0.5 * sum(weight.nbytes for weight in weights.values())
    assert [rank["bytes"] for rank in ranks[1]] == [divided / 2] * 2
    for rank in ranks[1]:
        for name, dtype in rank["held"].items():
            assert dtype == (torch.float32 if is_sharded(name) else torch.bfloat16), name


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(InvalidInputError, match="optimizer is 'muon'; it must be adamw with shard"):
        TrainConfig(out="x", shard=True, optimizer="muon")
