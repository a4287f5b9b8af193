"""The drafter in the package: its files, who gets it, and what it is worth."""

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import shipped
from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.drafter import DFlashDrafter
from drafters.ngram import NGramDrafter
from drafters.shipped import load_shipped, shipped_drafter_path
from drafters.training.config import build_config
from drafters.training.loss.heads import new_head
from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.prompt_sets import load_prompt_set
from evals.report.provenance import provenance
from specdec import CacheConfig, EngineConfig, SamplingParams, SpecDecoder
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.base.metrics import pooled
from specdec.cli.main import main
from specdec.engine.requests.request import Request
from specdec.session.drafter_choice import find_drafter
from tests.drafters.tiny import FakeVerifier
from tests.evals.tiny import PROMPTS, save_tiny, tiny_decoder
from tests.helpers.engines import finish

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target, which the shipped drafter does not fit."""
    return save_tiny(tmp_path_factory.mktemp("target"))


def of_its_shape(name: str) -> FakeVerifier:
    """A target that the shipped drafter fits; the tables of its head are made of zeros."""

    class Fitting(FakeVerifier):
        def embed(self, token_ids: Tensor) -> Tensor:
            return torch.zeros(*token_ids.shape, self.hidden_size)

        def head(self, hidden: Tensor) -> Tensor:
            return torch.zeros(*hidden.shape[:-1], self.vocab_size)

    verifier = Fitting()
    verifier.name = name
    verifier.num_layers = 30
    verifier.hidden_size = 576
    verifier.vocab_size = 49152
    return verifier


def sha256() -> str:
    return hashlib.sha256((shipped_drafter_path() / "model.safetensors").read_bytes()).hexdigest()


def test_the_files_are_those_of_the_card() -> None:
    """Catches weights that were exchanged without their card, and a config of another shape."""
    card = (shipped_drafter_path() / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"SHA-256 of `model\.safetensors`: `([0-9a-f]{64})`", card) == [sha256()]
    config, tensors = read_checkpoint(shipped_drafter_path())
    assert (config.block_size, config.num_hidden_layers, config.verifier_name) == (
        16,
        5,
        "embedded",
    )
    assert (config.num_target_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_its_recipe_makes_a_drafter_with_its_head() -> None:
    """Catches options that this version no longer knows, and a recipe of another drafter."""
    recipe = build_config({"out": "x"}, str(shipped_drafter_path() / "recipe.toml"))
    config = read_checkpoint(shipped_drafter_path())[0]
    assert (new_head(recipe), recipe.tied_tables) == (config.head, config.tied_tables)


@pytest.mark.parametrize("name", ["auto", "smollm2-dflash", "embedded"])
def test_the_embedded_model_gets_its_own_drafter(name: str) -> None:
    drafter = find_drafter(name)(of_its_shape("embedded"))
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.max_draft_tokens == 15


def test_other_targets_get_ngram_and_the_summary_says_so(target: Path, capsys: Capture) -> None:
    assert isinstance(
        SpecDecoder.from_pretrained(str(target), dtype="float32").engine.drafter, NGramDrafter
    )
    assert (
        main(
            [
                "generate", "abc", "--raw", "--model", str(target), "--max-tokens", "8",
                "--ignore-eos",
            ]
        )
        == 0
    )  # fmt: skip
    assert "(drafter ngram, k up to 8, trees of up to 7 drafts)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["auto", "smollm2-dflash", "embedded"])
@pytest.mark.parametrize("there", [[], ["config.json"]], ids=str)
def test_an_installation_without_the_weights_is_said_in_one_line(
    there: Sequence[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fall back to n-gram lookup that nobody notices."""
    for file in there:
        shutil.copy(shipped_drafter_path() / file, tmp_path)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(
        CheckpointError, match=r"lacks .*model\.safetensors in .*; install specdec again"
    ) as caught:
        find_drafter(name)(of_its_shape("embedded"))
    assert "\n" not in str(caught.value)
    assert ("config.json" in str(caught.value)) == (not there)


def test_a_path_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="comes with the package; leave out 'x'"):
        load_shipped("x", verifier=tiny_decoder().verifier)


@pytest.mark.parametrize("verb", ["generate", "bench", "eval", "profile"])
def test_every_verb_explains_the_default(verb: str, capsys: Capture) -> None:
    assert main([verb, "--help"]) == 0
    assert (
        "--drafter NAME" in (text := " ".join(capsys.readouterr().out.split()))
        or "--drafter NAME [NAME ...]" in text
    )
    assert (
        "auto (smollm2-dflash for the embedded model, else ngram), smollm2-dflash, ngram, suffix,"
        " mtp, a checkpoint" in text
    )


def test_a_sweep_names_what_auto_stands_for_and_knows_each_drafters_k() -> None:
    """Catches a report that says "auto", and one drafter measured twice under two names."""
    base = tiny_decoder()
    base.verifier = of_its_shape("some/target")
    assert list(Bench(base, BenchConfig(sets=(PROMPTS,), drafters=("auto", "ngram"))).drafters) == [
        "ngram"
    ]
    assert list(
        Bench(
            base,
            BenchConfig(sets=(PROMPTS,), drafters=("smollm2-dflash",), num_draft_tokens=(8, 15)),
        ).drafters
    ) == ["smollm2-dflash"]
    with pytest.raises(
        InvalidInputError, match="k is 16 and drafter 'smollm2-dflash' gives 1 to 15"
    ):
        Bench(
            base, BenchConfig(sets=(PROMPTS,), drafters=("smollm2-dflash",), num_draft_tokens=(16,))
        )
    base.verifier.name = "embedded"
    assert isinstance(
        Bench(base, BenchConfig(sets=(PROMPTS,))).drafters["smollm2-dflash"], DFlashDrafter
    )


def test_provenance_holds_the_drafters_hash() -> None:
    """Catches the hash of the target, which has the same name."""
    found = provenance(tiny_decoder(), ["smollm2-dflash", "ngram"])["drafters"]
    assert list(found) == ["smollm2-dflash"]
    assert found["smollm2-dflash"]["name"] == "smollm2-dflash"
    assert found["smollm2-dflash"]["sha256"]["model.safetensors"] == sha256()


@pytest.fixture(scope="module")
def chains() -> SpecDecoder:
    """The embedded model with what it gets by default, in float32."""
    return SpecDecoder.from_pretrained(
        device="cpu", dtype="float32", engine=engine_config(num_draft_tokens=15)
    )


def engine_config(**drafts: Any) -> EngineConfig:
    cache = CacheConfig(memory_bytes=2**28)
    return EngineConfig(max_num_seqs=4, max_model_len=256, cache=cache, **drafts)


def asked(count: int) -> list[list[dict[str, str]]]:
    items = load_prompt_set("bundled").items[:count]
    return [[{"role": "user", "content": item.turns[0]}] for item in items]


@pytest.mark.slow
def test_it_drafts_well_for_the_embedded_model(chains: SpecDecoder) -> None:
    """The tokens of plain decoding, and tau near the 4.48 that it had when it was added.

    Catches weights that are read as something else: outputs stay right, and tau falls, to 2.0 with
    another mask token.
    """
    plain, drafted = (one.generate(asked(4), max_tokens=32) for one in (chains.plain(), chains))
    assert isinstance(plain, list) and isinstance(drafted, list)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert pooled(result.stats for result in drafted).tau >= 4.0


@pytest.mark.slow
def test_its_trees_accept_more(chains: SpecDecoder) -> None:
    """16 drafts in a tree against 15 in a chain, greedy and sampled side by side: the same tokens
    in fewer steps.

    Catches features or noise of a path that are another one's: they leave outputs as they are, and
    tau falls.
    """
    config = engine_config(num_draft_tokens=None, tree_nodes=16)
    trees = SpecDecoder(chains.verifier, chains.tokenizer, chains.engine.drafter, config)
    prompts = [chains.tokenize(chat) for chat in asked(2)]

    def run(decoder: SpecDecoder) -> list[Request]:
        params = [SamplingParams(max_tokens=24, temperature=heat, seed=3) for heat in (0.0, 0.8)]
        requests = [
            decoder.engine.add_request(prompt, each) for prompt in prompts for each in params
        ]
        finish(decoder.engine)
        return requests

    in_chains, in_trees = run(chains), run(trees)
    assert [one.output_token_ids for one in in_trees] == [one.output_token_ids for one in in_chains]
    steps = [sum(len(one.num_emitted) for one in some) for some in (in_chains, in_trees)]
    assert steps[1] < 0.9 * steps[0]
