"""`specdec train` from end to end on a toy pair: what it ends with, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.training import state, trainer
from drafters.training.config import TrainConfig
from drafters.training.families import dflash
from drafters.training.log import TrainLog
from drafters.training.loss.evaluate import ReplayResult
from drafters.training.optimizer import MasterOptimizer
from drafters.training.stages import run_stages
from drafters.training.trainer import Trainer
from specdec.base.blocks import BlockShape
from specdec.base.errors import CheckpointError, SpecDecError
from specdec.cli.main import main
from tests.drafters.training.figures import log_rows, with_answers
from tests.drafters.training.small import CPU, small_trainer
from tests.drafters.training.toy import (
    MASK,
    VOCAB,
    as_flags,
    toy_config,
    write_prompts,
    write_target,
)
from tests.helpers.guards import no_host_sync
from tests.helpers.ranks import run_command

pytestmark = pytest.mark.slow


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return content


def test_a_run_says_when_answers_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that goes on learning its answers by heart without a word, one that is told so
    too early, or while it gains.
    """
    taus = iter([1.0, 1.2, 1.2, 1.1, 1.3, 1.3, 1.2])  # before the first pass and behind each

    def replay(*_: Any) -> ReplayResult:
        return ReplayResult((BlockShape(7),), [0.0], [round(100 * next(taus))], [[100]], [0], [0])

    monkeypatch.setattr(trainer, "replay", replay)
    monkeypatch.setattr(ReplayResult, "figures", lambda self: {"7": self.tau()})
    assert small_trainer(tmp_path, epochs=6.0, eval_every=0.0, log_every=3).run()
    said = [line for line in capsys.readouterr().err.splitlines() if "tau no longer rises" in line]
    assert [line.split("seen ")[1].split(" times")[0] for line in said] == ["5", "6"]


def test_a_run_ends_with_a_drafter_that_does_in_the_engine_what_training_said(toy: Path) -> None:
    """Catches a loop that does not learn, a lossy export, a replay unlike the engine."""
    untrained, trained = (float(row["tau"]) for row in (log_rows(toy)[0], log_rows(toy)[-1]))
    assert untrained < 1.1
    assert trained > 1.7
    assert report(toy)["tau_replayed"] == pytest.approx(trained, rel=1e-4)
    assert report(toy)["tau_engine"] == pytest.approx(trained, rel=0.02)
    assert report(toy)["same_answers"] == 1.0
    drafts = report(toy)["drafts"]
    assert list(drafts) == ["7", "tree 16", "sampled tree 16"]
    for figures in drafts.values():
        assert figures["tau_engine"] == pytest.approx(figures["tau_replayed"], rel=0.02)
    # two may be the same by chance, in so few steps
    assert len({figures["tau_engine"] for figures in drafts.values()}) > 1


def test_both_layouts_hold_the_same_drafter(toy: Path) -> None:
    configs, tensors = zip(
        *(read_checkpoint(toy / "run" / name) for name in ("drafter", "drafter-speculators")),
        strict=True,
    )
    assert configs[0].mask_token_id == MASK
    for name in (
        "target_layer_ids",
        "block_size",
        "mask_token_id",
        "windows",
        "causal",
        "rope_parameters",
    ):
        assert getattr(configs[0], name) == getattr(configs[1], name)
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_windows_dpace_distillation_and_accumulation_agree_with_the_engine_too(
    answered: Path,
) -> None:
    """Catches a training mask that is not the engine's, and losses that do not train."""
    config = toy_config(
        answered,
        layers=2,
        window=8,
        loss="dpace",
        kl=0.3,
        tv=0.3,
        nla=0.1,
        ce=0.5,
        first_error=0.5,
        replay=0.5,
        ema=0.8,
        schedule="linear",
        accumulation=2,
        max_steps=40,
        max_length=64,
        taps=(0, 2, 4),
    )
    assert run_stages(("train", "finish"), config)
    assert report(answered)["tau_engine"] > 1.4
    assert read_checkpoint(answered / "run" / "drafter")[0].windows == (8, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"head": "selector", "head_candidates": 8, "tied_tables": True},
        {
            "head": "markov", "head_candidates": 0, "convolutions": True, "kl": 0.3,
            "confidence": 0.2, "base_until": 0.5,
        },
        {"head": "xpress", "tied_tables": True, "kl": 0.3, "base_share": 0.3},
    ],
)  # fmt: skip
def test_a_head_is_trained_on_an_earlier_drafter_and_agrees_with_the_engine(
    toy: Path, answered: Path, changes: dict[str, Any]
) -> None:
    """Catches a head that changes drafts too early, learns nothing, or differs."""
    config = toy_config(
        answered, init=str(toy / "run" / "drafter"), head_rank=8, max_steps=30, **changes
    )
    assert run_stages(("train", "finish"), config)
    first, last = log_rows(answered)[0], log_rows(answered)[-1]
    assert float(first["tree"]) == pytest.approx(
        report(toy)["drafts"]["tree 16"]["tau_replayed"], rel=1e-4
    )
    for figures in report(answered)["drafts"].values():
        assert figures["tau_engine"] == pytest.approx(figures["tau_replayed"], rel=0.02)
    assert float(last["tree"]) > float(first["tree"])
    tied, whole = (
        read_checkpoint(answered / "run" / name) for name in ("drafter", "drafter-speculators")
    )
    assert tied[0].tied_tables == config.tied_tables and not whole[0].tied_tables
    assert tied[0].head == whole[0].head
    tables = "markov_w2.weight", "successor_codebook", "readout.weight"
    learned = [name for name in whole[1] if name.endswith(tables)]
    assert [whole[1][name].shape for name in learned] == [(VOCAB, 8)] and whole[1][learned[0]].any()


def test_a_lattice_is_trained_and_agrees_with_the_engine(answered: Path) -> None:
    """Catches the context of another token than the one before the anchor, in training or behind an
    accepted path, and pairs that learn nothing.
    """
    sizes = {"head_candidates": 8, "head_state": 32, "head_rank": 16, "max_steps": 60}
    config = toy_config(answered, head="lilicorr", replay=0.3, **sizes)
    assert run_stages(("train", "finish"), config)
    for name, figures in report(answered)["drafts"].items():
        assert figures["tau_engine"] == pytest.approx(figures["tau_replayed"], rel=0.02), name
    first, last = log_rows(answered)[0], log_rows(answered)[-1]
    assert float(first["tau"]) < 1.2 and float(last["tau"]) > 1.6


def test_a_target_with_latent_attention_trains_and_agrees_with_the_engine(tmp_path: Path) -> None:
    """Catches features that the engine does not tap, or that cannot be trained on."""
    write_target(tmp_path / "target", family="deepseek_v3")
    write_prompts(tmp_path / "prompts.txt", count=80)
    assert run_stages(("answers", "train", "finish"), toy_config(tmp_path, kl=0.3, max_steps=60))
    assert report(tmp_path)["tau_engine"] > 1.8
    assert report(tmp_path)["same_answers"] == 1.0


def test_a_hybrid_target_is_checked_in_chains_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that asks for trees which the engine refuses, and a log of them."""
    write_target(tmp_path / "target", family="qwen3_5")
    write_prompts(tmp_path / "prompts.txt", count=24)
    config = toy_config(
        tmp_path, max_steps=3, heldout=4, max_tokens=12, batch_size=4, anchors=3, taps=(0, 2)
    )
    assert run_stages(("answers", "train", "finish"), config)
    said = capsys.readouterr().err
    assert "in chains alone" in said and "has no chat template" in said
    drafts = report(tmp_path)["drafts"]
    assert list(drafts) == ["7", "sampled 7"]
    for figures in drafts.values():
        assert figures["tau_engine"] == pytest.approx(figures["tau_replayed"], rel=1e-6)
    last = log_rows(tmp_path)[-1]
    assert not last["tree"] and float(last["sampled"]) >= 1


def in_two_processes(toy: Path, folder: Path, **changes: Any) -> Path:
    """A folder with the same answers, where two processes have trained."""
    processes = with_answers(toy, folder / "processes")
    # of which the answers are
    same = {"model": str(toy / "target"), "prompts": (str(toy / "prompts.txt"),)}
    flags = as_flags(toy_config(processes, **same, **changes))
    run_command(2, ["train", "answers", "train", *flags])
    return processes


def test_processes_share_the_optimizer_and_one_goes_on(toy: Path, answered: Path) -> None:
    """Catches weights that no process moves, and a state for so many processes only."""
    changes: dict[str, Any] = {"optimizer": "muon", "ema": 0.8, "replay": 0.5, "log_every": 4}
    assert run_stages(("train",), toy_config(answered, max_steps=8, **changes))
    processes = in_two_processes(toy, answered, max_steps=8, **changes)
    for row in (1, 2):
        for name in ("loss", "train_tau", "grad_norm"):
            ours, theirs = (float(log_rows(one)[row][name]) for one in (answered, processes))
            assert ours == pytest.approx(theirs, rel=2e-2), name
    states = [state.load_state(one / "run" / "training", CPU) for one in (answered, processes)]
    one, other = (found["optimizer"] for found in states if found)
    assert one.keys() == other.keys()
    for kind in one.keys() - {"steps"}:
        shapes = [{n: t.shape for n, t in side[kind].items()} for side in (one, other)]
        assert shapes[0] == shapes[1], kind
        if kind in ("masters", "means"):
            for name, tensor in one[kind].items():
                torch.testing.assert_close(tensor, other[kind][name], atol=0.02, rtol=0)
    same = {"model": str(toy / "target"), "prompts": (str(toy / "prompts.txt"),)}
    assert run_stages(("train",), toy_config(processes, max_steps=12, **same, **changes))
    assert int(log_rows(processes)[-1]["step"]) == 12


def test_a_step_is_the_same_however_it_is_split(toy: Path, answered: Path) -> None:
    """Catches losses that are averaged per forward or per process, and anchors or sequences that
    depend on the split.

    The processes come from another stage, with whose group they go on.
    """
    short = with_answers(toy, answered / "short")
    assert run_stages(("train",), toy_config(short, max_steps=10))
    assert run_stages(("train",), toy_config(answered, accumulation=4, max_steps=10))
    processes = in_two_processes(toy, answered, max_steps=10)
    for folder in (answered, processes):
        for name in ("loss", "train_tau", "grad_norm"):
            assert float(log_rows(folder)[1][name]) == pytest.approx(
                float(log_rows(short)[1][name]), rel=2e-3
            ), name


@pytest.mark.parametrize("change", ["taps", "mask", "rope"])
def test_a_drafter_that_differs_from_the_trained_one_fails_loudly(
    toy: Path,
    answered: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    """Catches an agreement check that cannot fail."""
    write = write_checkpoint
    changes: dict[str, Any] = {
        "taps": lambda config: {"target_layer_ids": tuple(reversed(config.target_layer_ids))},
        "mask": lambda config: {"mask_token_id": 7},
        "rope": lambda config: {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
    }

    def damaged(path: Path, config: DFlashConfig, *args: Any, **kwargs: Any) -> None:
        write(path, replace(config, **changes[change](config)), *args, **kwargs)

    monkeypatch.setattr(dflash, "write_checkpoint", damaged)
    (answered / "run" / "training").symlink_to(toy / "run" / "training")
    assert main(["train", "finish", *as_flags(toy_config(answered))]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "in the engine" in error and "row alignment" in error


def test_no_step_makes_the_host_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a synchronization in the loop, which would leave an accelerator idle."""
    forward_backward, optimizer_step = Trainer._forward_backward, MasterOptimizer.step
    guarded = []

    def forward(self: Trainer, *args: Any) -> Any:
        self.batch(0)  # an epoch's order goes to the device once
        with no_host_sync():
            guarded.append("forward")
            return forward_backward(self, *args)

    def step(self: MasterOptimizer, *args: Any) -> Any:
        with no_host_sync():
            guarded.append("step")
            return optimizer_step(self, *args)

    monkeypatch.setattr(Trainer, "_forward_backward", forward)
    monkeypatch.setattr(MasterOptimizer, "step", step)
    assert small_trainer(tmp_path, max_steps=2, loss="dpace", kl=1.0).run()
    assert guarded == ["forward", "step"] * 2


def test_minutes_are_those_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches evaluations and saves that eat the time to train."""
    now = [0.0]

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            now[0] += seconds
            return call(*args, **options)

        return slow

    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trainer, "replay", taking(1e6, trainer.replay))
    monkeypatch.setattr(trainer, "save_state", taking(1e6, trainer.save_state))
    monkeypatch.setattr(MasterOptimizer, "step", taking(1.0, MasterOptimizer.step))
    often: dict[str, Any] = {"log_every": 1, "eval_every": 0.05, "save_every": 0.05}
    assert small_trainer(tmp_path, max_minutes=0.1, **often).run()
    rows = log_rows(tmp_path)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5", "6", "6"]
    assert [row["step"] for row in rows if row["tau"]] == ["0", "3", "6"]


@pytest.mark.usefixtures("drawn")
def test_curves_are_drawn(tmp_path: Path) -> None:
    """Catches a plot that fails only at the end of a long run."""
    pytest.importorskip("matplotlib")
    log = TrainLog(tmp_path, last_step=0)
    log.write({"step": 0, "tau": 1.0}, 0.0)
    log.write({"step": 10, "loss": 2.5, "train_tau": 1.5}, 1.0)
    log.close()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, 40])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, steps: int) -> None:
    """After one step no loss has seen the weights yet."""
    with pytest.raises(SpecDecError, match="the loss is not finite after step"):
        small_trainer(tmp_path, lr=1e30, clip=1e30, max_steps=steps).run()
    assert (tmp_path / "run" / "training" / state.STATE_FILE).exists()


def test_finish_refuses_options_of_another_drafter(toy: Path) -> None:
    """Catches other taps of the same shape, which would agree on a low tau."""
    other = (
        r"the saved run trained another drafter, with target_layer_ids=\(1, 3\)|with"
        r" target_layer_ids=[^=]*; give the model"
    )
    with pytest.raises(CheckpointError, match=other):
        run_stages(("finish",), toy_config(toy, taps=(0, 2)))


def test_a_target_may_be_spelled_in_another_way(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder, from elsewhere: the run goes on."""
    monkeypatch.chdir(toy / "run")
    assert run_stages(("answers", "train"), toy_config(toy, model="../target"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"taps": (1, 6)},
            r"taps \[1, 6\] are not different layers .*, which has 6; choose from 0 to 4",
        ),
        ({"taps": (1, 1)}, r"taps \[1, 1\] are not different layers"),
        (
            {"mask_token": 7},
            r"mask-token 7 is 'w7', which real texts hold; choose a reserved token such as 63",
        ),
        ({"mask_token": 2}, "mask-token 2 begins, ends or pads texts"),
        ({"mask_token": 64}, "the target has 64 embeddings"),
        ({"heads": 3, "kv_heads": 2}, "3 query heads on 2 key heads"),
        ({"mask_path": "flex"}, "choose dense"),
        ({"init": "nowhere"}, "'nowhere' is not a folder"),
    ],
)
def test_a_drafter_that_does_not_suit_the_target_is_refused(
    answered: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecDecError, match=message):
        run_stages(("train",), toy_config(answered, **changes))


def test_a_drafter_of_another_target_is_no_beginning(
    toy: Path, answered: Path, tmp_path: Path
) -> None:
    """One of another vocabulary, which nothing else looks at before weights are wrong."""
    config, tensors = read_checkpoint(toy / "run" / "drafter")
    write_checkpoint(tmp_path / "other", replace(config, vocab_size=65), tensors)
    with pytest.raises(CheckpointError, match="its vocabulary has 65 tokens, the target's 64"):
        run_stages(("train",), toy_config(answered, init=str(tmp_path / "other")))


def test_a_run_can_start_from_an_earlier_drafter(toy: Path, answered: Path) -> None:
    """Catches `init` weights that are dropped."""
    run_stages(
        ("train",), toy_config(answered, init=str(toy / "run" / "drafter"), max_steps=1, lr=1e-9)
    )
    assert float(log_rows(answered)[0]["tau"]) == pytest.approx(
        report(toy)["tau_replayed"], rel=1e-3
    )


def test_a_config_file_says_the_same_as_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches keys that are ignored, and flags that do not win."""
    from drafters.training.config import build_config

    file = tmp_path / "run.toml"
    file.write_text(
        'out = "run"\nmax-steps = 5\nlr = 1\ntemperatures = [0, 0.5]\nprompts = ["a.txt"]\ncompile'
        " = true\n"
    )
    config = build_config({"lr": 0.1}, str(file))
    assert config == TrainConfig(
        out="run", max_steps=5, lr=0.1, temperatures=(0.0, 0.5), prompts=("a.txt",), compile=True
    )
    for text, message in [
        ("steps = 5", "unknown key 'steps'"),
        ('out = "x"\nlr = "high"', "lr is 'high'; it must be a float"),
        ('out = "x"\nlr = -1', "lr is -1.0; it must be positive"),
        ('out = "x"\nlr = inf', "lr is inf; it must be a number that float32 or int64 holds"),
        ('out = "x"\nepochs = inf', "epochs is inf; it must be a number"),
        (f'out = "x"\nlr = {10**400}', "lr is 1000"),
        (f'out = "x"\nlr = 0x{"f" * 5000}', "lr is <an integer of 20,000 bits>; it must be"),
        ('out = "x"\nhead = "a\\nb"', r"head is 'a\nb'; it must be one of none"),
        ('out = "x"\ntemperatures = [0.5, nan]', "temperatures is (0.5, nan); it must be a number"),
        (
            f'out = "x"\nseed = {10**30}',
            "seed is 1000000000000000000000000000000; it must be a number",
        ),
        ('out = "x"\nlayers = 1000000', "layers is 1000000; it must be at most 1,024"),
        ('out = "x"\nbucket = 0', "bucket is 0; it must be at least 1"),
        ('out = "x"\nkl = -0.5', "kl is -0.5; it must be 0 or more"),
        ('out = "x"\nwarmup = 1.5', "warmup is 1.5; it must be between 0 and 1"),
        ("lr = ", "is not TOML"),
    ]:
        file.write_text(text)
        assert main(["train", "--config", str(file)]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "tarin", "--out", "x"]) == 2
    assert "unknown stage 'tarin'" in capsys.readouterr().err


def test_which_gpu_trains_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the first of the processes, before any work."""
    monkeypatch.setattr(
        "specdec.device.device.unseen_gpu", lambda: "an AMD GPU is here, but hidden"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("drafters.training.stages.run_stages", lambda stages, config: True)
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "train", "--out", str(tmp_path)]) == 0
        said.append(capsys.readouterr().err)
    assert said == ["specdec: no GPU is used: an AMD GPU is here, but hidden\n", ""]
