"""A round of learning: what it takes, what it writes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.training.data.dataset import Answer
from drafters.training.learning.round import learn
from drafters.training.learning.served import read_served, split, trainable
from drafters.training.learning.verdict import of_steps
from specdec import EngineConfig, SpecDecoder
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import pooled
from specdec.cli.main import main
from tests.drafters.eagle3.heads import write_head
from tests.drafters.training.families.test_eagle3 import SGLANGS
from tests.drafters.training.learning.kept import (
    prompts,
    round_config,
    write_kept,
    write_untrained,
)
from tests.drafters.training.toy import as_flags, write_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    write_target(folder / "target")
    (folder / "prompts.txt").write_text("w5\n")
    write_untrained(folder)
    write_kept(folder, 160)
    return folder


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "round" / "learned.json").read_text())
    return found


def tau_of(world: Path, drafter: Path) -> float:
    """In the engine, on prompts of which nothing was kept."""
    decoder = SpecDecoder.from_pretrained(
        world / "target",
        drafter=drafter,
        device="cpu",
        engine=EngineConfig(max_num_seqs=16, num_draft_tokens=7),
    )
    results = decoder.generate(prompts(32, seed=17), max_tokens=32)
    return pooled(result.stats for result in results).tau


@pytest.fixture(scope="module")
def learned(world: Path) -> Path:
    """A folder with a round of the command."""
    config = round_config(world, world / "untrained", world / "kept-0")
    assert main(["train", "learn", *as_flags(config)]) == 0
    return world


def test_better_weights_are_written_and_are_better(learned: Path) -> None:
    """By the command, whose figures hold in the engine; the settings of the checkpoint stay."""
    told = report(learned)
    assert told["better"] and told["conversations"] == 24
    assert told["tau"][1] > 1.3 * told["tau"][0] and told["interval"][0] > 1
    drafter = learned / "round" / "drafter"
    assert tau_of(learned, drafter) > 1.3 * tau_of(learned, learned / "untrained")
    assert read_checkpoint(drafter)[0] == read_checkpoint(learned / "untrained")[0]
    assert not (learned / "round" / "training" / "state.pt").exists()


@pytest.mark.parametrize("lr", [1e-12, 3.0])
def test_weights_that_are_not_better_are_not_written(
    learned: Path, tmp_path: Path, lr: float
) -> None:
    """Those that are the same, and those that a wild learning rate has ruined."""
    again = {"lr": lr, "max_steps": 3, "out": str(tmp_path / "round")}
    assert learn(round_config(learned, learned / "round" / "drafter", learned / "kept-0", **again))
    told = report(tmp_path)
    assert not told["better"] and not (tmp_path / "round" / "drafter").exists()
    assert told["tau"][1] <= told["tau"][0] and (lr < 1 or told["interval"][1] < 1)


def test_sampled_requests_teach_too(world: Path, tmp_path: Path) -> None:
    kept = write_kept(world, 96, temperature=0.05)
    out = str(tmp_path / "round")
    assert learn(round_config(world, world / "untrained", kept, out=out, max_steps=30))
    assert report(tmp_path)["better"]


def test_requests_are_read_once_and_the_newest_are_held_out(world: Path, tmp_path: Path) -> None:
    """One that was asked again counts as new, so it is not trained on and held out as well."""
    (name,) = (path.name for path in (world / "kept-0").iterdir())
    lines = (world / "kept-0" / name).read_text().splitlines()
    (tmp_path / "requests-00000000.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "requests-00000001.jsonl").write_text(lines[0] + "\n" + lines[1][:30])
    found = read_served(tmp_path)
    assert len(found) == len(lines)
    assert [list(found[-1].prompt_ids), list(found[0].prompt_ids)] == prompts(160)[:2]
    assert read_served(tmp_path, 5) == found[-5:]
    longest = max(len(one.prompt_ids) + len(one.answer_ids) for one in found)
    shorter = [one for one in found if len(one.prompt_ids) + len(one.answer_ids) < longest]
    assert len(shorter) < len(found)
    assert read_served(tmp_path, 5, max_length=longest - 1) == shorter[-5:]
    trained, heldout = split(found, 24)
    assert trained == found[:-24] and heldout == found[-24:]
    assert len(split(found, 1000)[1]) == len(found) // 4


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_ids": [1], "answer_ids": "x", "temperature": 0, "seed": 1}',
        '{"prompt_ids": [1], "answer_ids": [-2], "temperature": 0, "seed": 1}',
        '{"prompt_ids": [1], "answer_ids": [2], "temperature": "0", "seed": 1}',
        '{"prompt_ids": [1], "answer_ids": [99999999999], "temperature": 0, "seed": 1}',
        '{"answer_ids": [1]}',
        "[]",
    ],
)
def test_what_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "requests-00000000.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidInputError, match=r"requests-00000000\.jsonl:1"):
        read_served(tmp_path)


def test_what_cannot_teach_is_refused(world: Path, tmp_path: Path) -> None:
    few = [Answer([1], [2, 3])] * 63
    with pytest.raises(InvalidInputError, match="63 requests that fit --max-length"):
        split(few, 64)
    short = round_config(world, world / "untrained", world / "kept-0", max_length=8)
    with pytest.raises(InvalidInputError, match=r"^0 requests that fit --max-length"):
        learn(short)  # or chance would decide by the few that are left of those held out
    with pytest.raises(InvalidInputError, match="is no folder"):
        read_served(tmp_path / "none")
    with pytest.raises(InvalidInputError, match="give --init and one folder"):
        learn(replace(round_config(world, world / "untrained", world), init=None))
    head = write_head(tmp_path / "head", SGLANGS)
    with pytest.raises(InvalidInputError, match=r"goes token by token.*give the same requests to"):
        learn(round_config(world, head, world / "kept-0"))
    with pytest.raises(InvalidInputError, match="drafter 'suffix' cannot learn"):
        trainable("suffix")
    assert trainable(f"suffix+{world / 'untrained'}") == str(world / "untrained")
    assert read_checkpoint(trainable("smollm2-dflash"))[0].head is not None


def test_the_interval_covers_the_true_ratio() -> None:
    """Draws whose steps are known: 95 of 100 intervals hold it, not nearly all."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(1000):
        emitted = torch.randint(20, 200, (40,), generator=generator).double()
        one, other = (
            1 + emitted / 3 * (0.7 + 0.6 * torch.rand(40, generator=generator)) for _ in range(2)
        )
        verdict = of_steps("7", emitted.tolist(), (1.1 * one).tolist(), other.tolist())
        held += verdict.low < 1.1 < verdict.high
    assert 920 <= held <= 970
