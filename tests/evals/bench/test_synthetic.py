"""`specdec bench --synthetic-acceptance`: tokens per second at a given acceptance."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.dflash.config.layout import parse_config
from drafters.dflash.dummy import dummy_config, dummy_drafter
from evals import roofline
from evals.bench import synthetic
from evals.bench.dummy import DummyConfig
from evals.bench.dummy_engine import WARM_STEPS, OwnSteps, Room
from evals.bench.shapes import config_file, names
from evals.bench.synthetic import survival_of
from evals.peers import vllm_steps
from evals.report.report import read_report
from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from specdec.engine.engine import SpecEngine
from specdec.parallel.group import Group
from tests.evals.bench.fake_vllm import FakeVllm
from tests.evals.bench.test_dummy import prompts_of, tiny_target
from tests.helpers.engines import finish
from tests.helpers.ranks import run_command
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model
from verifiers.dummy import read_config

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

TOKENS = 2
"""That the fake peer's steps put out for a request."""


class DraftingVllm(FakeVllm):
    """Each step gives every request `TOKENS` tokens in one second.

    Attributes:
        drafter: what lay in the drafter's folder when the engine started.
        steps: of the engine.
        aborted: names of requests.
    """

    def __init__(self, monkeypatch: Patch) -> None:
        super().__init__(monkeypatch)
        self.drafter: dict[str, Any] = {}
        self.files: set[str] = set()
        self.steps = 0
        self.aborted: list[str] = []
        for module in (vllm_steps, synthetic):
            monkeypatch.setattr(module, "library_for", lambda _: vllm_steps.import_vllm("vllm"))
        monkeypatch.setitem(roofline.MEASURED_BYTES, "cpu", 2**22)

    def start(self, **options: Any) -> SimpleNamespace:
        folder = Path(options["speculative_config"]["model"])
        self.drafter = json.loads((folder / "config.json").read_text())
        self.files = {file.name for file in folder.iterdir()}
        return super().start(**options)

    def step(self) -> list[Any]:
        self.steps, self.clock.now = self.steps + 1, self.clock.now + 1
        self.running |= dict.fromkeys(self.waiting, 0)
        self.waiting.clear()
        self.running = {name: count + TOKENS for name, count in self.running.items()}
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.running.items()
        ]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        self.running.clear()


def bench(folder: Path, name: str, *options: str) -> list[str]:
    CONFIGS[name]().to_json_file(folder / "config.json")
    fast = ["--prompt-tokens", "9", "--max-tokens", "6", "--repeats", "2", "--warmup", "0"]
    device = ["--device", "cpu", "--dtype", "float32", "--out", str(folder / "report.json")]
    return ["bench", "--dummy-weights", str(folder), *fast, *device, *options]


def test_tokens_by_time(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Catches sides at other acceptance, too few rates, and prefill or warm-up in the time."""
    vllm = DraftingVllm(monkeypatch)
    options = ["-k", "4", "--max-num-seqs", "1", "3", "--peer", "vllm"]
    assert main(bench(tmp_path, "qwen3", "--synthetic-acceptance", "3", *options)) == 0
    report = read_report(tmp_path / "report.json", "specdec-dummy-bench")
    assert report["complete"]
    rows = {(row["num_reqs"], row["work"]): row for row in report["rows"]}
    assert list(rows) == [(count, work) for count in (1, 3) for work in ("plain", "drafts 4")]
    assert [row["tau"] for row in rows.values()] == [1, 3, 1, 3]  # by every step
    drafted = rows[3, "drafts 4"]
    assert drafted["theirs"]["values"] == [3.0 * TOKENS] * 2
    assert (drafted["peer_tau"], rows[3, "plain"]["theirs"]) == (TOKENS, None)
    assert drafted["ratio"] == pytest.approx(drafted["ours"]["median"] / (3 * TOKENS))
    assert vllm.steps == 2 * 2 * (1 + WARM_STEPS + 6)
    assert (len(vllm.aborted), vllm.open) == (2 * (1 + 3), 0)
    told = vllm.started["speculative_config"]
    assert (told["method"], told["num_speculative_tokens"]) == ("dflash", 4)
    assert told["rejection_sample_method"] == "synthetic"
    assert told["synthetic_acceptance_rates"] == [1.0, 1.0, 0.0, 0.0]
    assert vllm.started["load_format"] == "dummy"
    assert parse_config(vllm.drafter) == dummy_config(CONFIGS["qwen3"]())
    printed = capsys.readouterr().out
    assert "3 requests, drafts 4: tau 3.00" in printed
    assert "vLLM tau 2.00, 1000.00 ms" in printed


def test_experts_have_the_drafter_read_from_files(tmp_path: Path, monkeypatch: Patch) -> None:
    vllm = DraftingVllm(monkeypatch)
    assert main(bench(tmp_path, "qwen3_moe", "--synthetic-acceptance", "2", "--peer", "vllm")) == 0
    assert vllm.started["load_format"] == "auto"
    assert "model.safetensors" in vllm.files


@pytest.mark.parametrize("name", names())
def test_every_shape_has_a_drafter(name: str) -> None:
    config = dummy_config(read_config(config_file(name)))
    assert config.max_draft_tokens == 15
    assert len(config.target_layer_ids) == 5


@pytest.mark.parametrize("shape", [BlockShape(7), BlockShape(12, 7), None], ids=str)
def test_requests_differ_within_the_spread(shape: BlockShape | None) -> None:
    """Each request has its own mean, in chains, trees, and shapes that are chosen."""
    verifier = tiny_target("qwen3")
    drafter = dummy_drafter(dummy_config(CONFIGS["qwen3"]()), verifier)
    room, rows = Room.of(verifier, 4, 12, 6, 4), survival_of([2.5], 1.5, 7, 2)
    own = OwnSteps(verifier, room, shape=shape, drafter=drafter, survival=rows)
    requests = own._submit(prompts_of(4), 40)
    finish(own.engine)
    if shape is not None and not shape.is_tree:
        means = [sum(one.num_emitted) / len(one.num_emitted) for one in requests]
        assert all(1 <= mean <= 2 for mean in means[::2])
        assert all(3 <= mean <= 4 for mean in means[1::2])
    most = max(count for one in requests for count in one.num_emitted)
    assert 1 < most <= 4
    own.close()


def test_a_target_with_weights_cannot_be_forced(capsys: Capture) -> None:
    """Catches output that is spoilt by accident, from the engine and from the command line."""
    engine = SpecEngine(paged_verifier(plain_model("llama")))
    with pytest.raises(InvalidInputError, match="random weights"):
        engine.runner.force([[1.0]])
    assert main(["bench", "--synthetic-acceptance", "3"]) == 2
    assert "without --dummy-weights; add that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "spread"),
    [([0.5, 0.75], 0), ([1.0, 1.5], 0), ([9.5], 0), ([2.0], 1.5), ([0.5, 0.5], 1), ([1.0] * 9, 0)],
)
def test_acceptance_that_no_step_has(values: list[float], spread: float) -> None:
    with pytest.raises(InvalidInputError):
        survival_of(values, spread, 8)


@pytest.mark.parametrize("kinds", [1, 2, 64])
def test_rows_of_a_spread_have_the_mean_together(kinds: int) -> None:
    rows = torch.tensor(survival_of([6.5], 3, 15, kinds))
    assert len(rows) == kinds
    assert float(rows.sum(dim=1).mean()) == pytest.approx(5.5)
    reach = float(rows.sum(dim=1).max() - rows.sum(dim=1).min())
    assert reach == pytest.approx(6 * (kinds - 1) / kinds)


def test_the_spread_is_that_of_so_many_requests(tmp_path: Path) -> None:
    options = ["--synthetic-acceptance", "2", "--synthetic-spread", "1", "--max-num-seqs", "1", "4"]
    assert main(bench(tmp_path, "qwen3", *options, "-k", "4")) == 0
    report = read_report(tmp_path / "report.json", "specdec-dummy-bench")
    assert report["settings"]["kinds"] == 4
    one, four = (row for row in report["rows"] if row["work"] == "drafts 4")
    assert one["tau"] == 2  # alone, a request has the mean
    assert abs(four["tau"] - 2) <= 6 * 0.5 / (4 * 12) ** 0.5


@pytest.mark.parametrize("option", [[], ["--divide-drafter"], ["--no-divide-drafter"]])
def test_two_ranks_with_parts_of_the_drafter_or_all_of_it(
    tmp_path: Path, option: list[str]
) -> None:
    """One so narrow is whole unless it is asked for."""
    options = ["--synthetic-acceptance", "3", "-k", "4", "--tree", "6", "--warmup", "0"]
    run_command(2, bench(tmp_path, "qwen3", *options, *option))
    report = read_report(tmp_path / "report.json", "specdec-dummy-bench")
    assert report["complete"]
    taus = {row["work"]: row["tau"] for row in report["rows"]}
    assert (taus["plain"], taus["drafts 4"]) == (1, 3)
    assert 2 < taus["drafts tree 6"] <= 3  # whose paths may be shorter
    divided = option == ["--divide-drafter"]
    assert report["settings"]["drafter_divided"] == divided
    alone = dummy_drafter(dummy_config(CONFIGS["qwen3"]()), tiny_target("qwen3"))
    assert (report["drafter_bytes"] < 0.6 * alone.weight_bytes) == divided


def test_one_process_divides_nothing(tmp_path: Path, capsys: Capture) -> None:
    options = ["--synthetic-acceptance", "3", "-k", "4", "--divide-drafter"]
    assert main(bench(tmp_path, "qwen3", *options)) == 2
    assert "one process has the whole drafter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drafts", "peers", "words"), [("auto", (), "give -k a number"), (4, ("vllm",), "one process")]
)
def test_what_ranks_do_not_measure(drafts: Any, peers: tuple[str, ...], words: str) -> None:
    verifier: Any = tiny_target("qwen3")
    verifier.group = Group(0, 2, None, None)
    with pytest.raises(InvalidInputError, match=words):
        synthetic.SyntheticBench(
            verifier,
            {},
            DummyConfig(prompt_tokens=(9,), steps=6, peers=peers),
            drafter=dummy_config(CONFIGS["qwen3"]()),
            survival=lambda count: survival_of([3.0], 0, 15),
            drafts=(drafts,),
        )


def test_a_drafter_is_divided_only_of_random_weights(capsys: Capture) -> None:
    assert main(["bench", "--no-divide-drafter", "--dummy-weights", "nothing"]) == 2
    assert "without --synthetic-acceptance; add that" in capsys.readouterr().err


def test_more_drafts_than_the_drafter_has(tmp_path: Path, capsys: Capture) -> None:
    assert main(bench(tmp_path, "qwen3", "--synthetic-acceptance", "3", "-k", "16")) == 2
    assert "choose 1 to 15" in capsys.readouterr().err
