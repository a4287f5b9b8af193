"""Checkpoints by name: what is fetched from the hub, what a cache alone is good for, and what is
said of what cannot be had.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from drafters.training.config import build_config
from evals.report.provenance import checkpoint
from specdec import SpecDecoder
from specdec.base.checkpoint import hub
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.cli.main import main
from tests.drafters.tiny import TINY, tiny_target, write_tiny_dflash
from tests.helpers.hub_cache import COMMIT, cached, offline
from tests.helpers.tiny_models import tiny_tokenizer

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a DFlash drafter for it; neither has more files than it must."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_target(vocab_size=97).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "target" / "generation_config.json").unlink()
    write_tiny_dflash(folder / "drafter", replace(TINY, vocab_size=97))
    return folder


@pytest.fixture
def cache(folders: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A cache of both, the target under tag v1.0 alone, and no network."""
    cached(tmp_path / "hub", "acme/tiny", folders / "target", revision="v1.0")
    cached(tmp_path / "hub", "acme/tiny-dflash", folders / "drafter")
    offline(monkeypatch, tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    "target", ["acme/tiny@v1.0", f"acme/tiny@{COMMIT}", f"acme/tiny@{COMMIT[:7]}"]
)
def test_a_revision_from_the_cache(target: str, cache: Path) -> None:
    """By tag, commit or its beginning; reports tell the commit that was loaded, also when the cache
    has moved on.
    """
    decoder = SpecDecoder.from_pretrained(
        target, drafter="acme/tiny-dflash@main", device="cpu", dtype="float32"
    )
    assert decoder.generate([5, 6, 7], max_tokens=4).token_ids and decoder.verifier.name == target
    (cache / "models--acme--tiny" / "refs" / "v1.0").write_text("f" * 40)
    assert (
        checkpoint(target)["revision"] == checkpoint("acme/tiny-dflash@main")["revision"] == COMMIT
    )
    assert checkpoint(target)["sha256"].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_cache_without_optional_files(command: str, cache: Path, capsys: Capture) -> None:
    """No index of a single file, no README, no generation config; `--revision` is the same as a
    name with @.
    """
    models = [
        "--model", "acme/tiny", "--revision", "v1.0", "--drafter", "acme/tiny-dflash", "--device",
        "cpu", "--dtype", "float32",
    ]  # fmt: skip
    prompt = ["ab", "--raw", "--max-tokens", "3"] if command == "generate" else []
    assert main([command, *prompt, *models]) == 0
    assert command == "generate" or "would run     yes" in capsys.readouterr().out
    assert main([command, *prompt, *models[:2], *models[4:]]) == 2  # there is no main
    assert "cannot fetch target 'acme/tiny': the hub is out of reach and" in capsys.readouterr().err


def test_a_cache_without_what_is_needed(cache: Path) -> None:
    """The config alone does not make optional files out of weights, nor another file one out of the
    config.
    """
    snapshot = cache / "models--acme--tiny-dflash" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    assert hub.checkpoint_file("acme/tiny-dflash", "README.md", what="drafter") is None
    with pytest.raises(CheckpointError, match=r"drafter 'acme/tiny-dflash'.*weights"):
        SpecDecoder.from_pretrained("acme/tiny@v1.0", drafter="acme/tiny-dflash", device="cpu")
    (snapshot / "config.json").rename(snapshot / "README.md")
    for file in ("config.json", "generation_config.json"):
        with pytest.raises(
            CheckpointError, match=f"out of reach and {file} is not in its cache; go online"
        ):
            hub.checkpoint_file("acme/tiny-dflash", file, what="drafter")


IN_BOTH = ("config.json", "hf_quant_config.json", "model.safetensors")
DAMAGED = [(what, file) for what in ("target", "drafter") for file in IN_BOTH]
DAMAGED += [("target", "tokenizer_config.json"), ("target", "generation_config.json")]


@pytest.mark.parametrize(("what", "file"), DAMAGED)
def test_messages_have_the_name_that_was_typed(what: str, file: str, cache: Path) -> None:
    """And not the path in the cache."""
    name = "acme/tiny@v1.0" if what == "target" else "acme/tiny-dflash"
    damaged = (
        cache / f"models--{name.partition('@')[0].replace('/', '--')}" / "snapshots" / COMMIT / file
    )
    damaged.unlink(missing_ok=True)
    damaged.write_bytes(b"[")
    with pytest.raises(CheckpointError) as caught:
        SpecDecoder.from_pretrained("acme/tiny@v1.0", drafter="acme/tiny-dflash", device="cpu")
    assert f"{what} {name!r}" in str(caught.value) and str(cache) not in str(caught.value)


def test_a_revision_in_a_training_config(tmp_path: Path) -> None:
    """As every flag of `specdec train`; one on the command line wins."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"out": "run", "model": "some/model", "revision": "v1"}))
    assert build_config({}, str(file)).model == "some/model@v1"
    assert build_config({"revision": "v2"}, str(file)).model == "some/model@v2"
    assert build_config({"model": "other@v3", "revision": None}, str(file)).model == "other@v3"


def test_a_folder_of_a_repository(folders: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """It is named behind a colon; the repository alone is refused with the folders that
    there are.
    """
    for name in ("full", "compressed"):
        shutil.copytree(folders / "drafter", tmp_path / "both" / name)
    cached(tmp_path / "hub", "acme/variants", tmp_path / "both", revision="v2")
    offline(monkeypatch, tmp_path / "hub")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    for name in (str(tmp_path / "both" / "full"), "acme/variants:full@v2"):
        SpecDecoder.from_pretrained(folders / "target", drafter=name, **options)
    assert checkpoint("acme/variants:full@v2")["revision"] == COMMIT
    (tmp_path / "both" / "more").mkdir()
    for name, shown in (
        ("acme/variants@v2", "acme/variants:compressed@v2"),
        (f"{tmp_path}/both", f"{tmp_path}/both/compressed"),
    ):
        said = (
            rf"has no config.json itself, but its folders compressed, full have; name one, such"
            rf" as '{shown}'"
        )
        with pytest.raises(CheckpointError, match=said):
            SpecDecoder.from_pretrained(folders / "target", drafter=name, **options)


def test_a_folder_whose_name_looks_like_a_revision(folders: Path, tmp_path: Path) -> None:
    for folder in ("owner/name@v1", "owner/name:full"):
        shutil.copytree(folders / "target", tmp_path / folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            SpecDecoder.from_pretrained(folder, drafter="none", device="cpu")
            with pytest.raises(
                InvalidInputError, match="revision 'v1' is of a checkpoint on the hub"
            ):
                hub.pinned(folder, "v1")


@pytest.mark.parametrize(
    "name",
    [
        "./a", "/no/where", "~/none/x", "a/b/c", "a b", "a/b@", "a/b@../x", "a/b:../c", "a/b:.",
        "../a", "a/b@v:c", "a\0b", "x" * 5000 + "/",
    ],
)  # fmt: skip
def test_names_that_can_be_none_on_the_hub(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Nobody is asked. Where this runs, and beside it, is nothing."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for call in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(hub, call, lambda *args, **options: pytest.fail("the hub was asked"))
    for find in (
        hub.checkpoint_folder,
        lambda name, what: hub.json_file(name, "config.json", what=what),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"is not a folder, and no name on the hub; give a folder with config\.json",
        ):
            find(name, what="target")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gpt2", ("gpt2", None, None)),
        ("a/b", ("a/b", None, None)),
        ("a/b-1.5_c@refs/pr/3", ("a/b-1.5_c", None, "refs/pr/3")),
        ("a/b@v1.0+cu", ("a/b", None, "v1.0+cu")),
        ("a/b:c/d@v1", ("a/b", "c/d", "v1")),
    ],
)
def test_names_on_the_hub(name: str, found: tuple[str | None, ...]) -> None:
    assert hub._place(name, "target") == found
    assert hub.unpinned(name) == name.partition("@")[0]


def fetching(files: list[str], folder: Path, asked: list[dict[str, Any]]) -> Callable[..., str]:
    """A hub's client for a repository of these files, all of them empty."""

    def snapshot(repo: str, **options: Any) -> str:
        asked.append(options)
        base = folder / "snapshots" / COMMIT
        for file in filter_repo_objects(
            files,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        ):
            (base / file).parent.mkdir(parents=True, exist_ok=True)
            (base / file).touch()
        return str(base)

    return snapshot


SMALL = [
    "config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "README.md",
]  # fmt: skip
TEMPLATE = "additional_chat_templates/rag.jinja"
OTHERS = [
    "model.gguf", "a.pth", "original/model.safetensors", "consolidated.safetensors",
    "adapter_model.safetensors", "onnx/config.json",
]  # fmt: skip
WEIGHTS = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "mask_embedding.pt"]


@pytest.mark.parametrize("root", ["", "full/"])
def test_what_is_fetched(root: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Small files before weights, all of one revision; pickles where there are no safetensors
    alone; nothing else.
    """
    name = f"some/model{root and ':full'}"
    for weights, picked in (
        (WEIGHTS, []),
        (["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
    ):
        asked: list[dict[str, Any]] = []
        home = tmp_path / weights[0]
        files = [
            root + file
            for file in [*SMALL, TEMPLATE, *OTHERS, *weights, *["pytorch_model.bin"] * (not picked)]
        ]
        monkeypatch.setattr(hub, "snapshot_download", fetching(files, home, asked))
        small = hub.checkpoint_folder(f"{name}@v1", what="target", weights=False)
        found = {path.relative_to(small).as_posix() for path in small.rglob("*") if path.is_file()}
        assert found == {*SMALL, TEMPLATE, *[file for file in weights if file.endswith(".json")]}
        assert hub.checkpoint_folder(f"{name}@v1", what="target", snapshot=small) == small
        found = {path.relative_to(small).as_posix() for path in small.rglob("*") if path.is_file()}
        assert found == {*SMALL, TEMPLATE, *(picked or weights)}
        assert [options["revision"] for options in asked] == [
            "v1",
            COMMIT,
            *[COMMIT] * bool(picked),
        ]


def raised(kind: type[Exception], text: str = "401\nmore") -> Exception:
    error = kind.__new__(kind)
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            raised(GatedRepoError),
            "is gated: accept the terms at {page}, set HF_TOKEN, and run again",
        ),
        (
            raised(RepositoryNotFoundError),
            "is neither a folder nor on the hub ({page}), or it is private; check the name, or set"
            " HF_TOKEN",
        ),
        (
            raised(RevisionNotFoundError),
            "'some/model' has no revision 'v1'; name a branch, a tag or a commit of it",
        ),
        (raised(LocalEntryNotFoundError), "the hub is out of reach and"),
        (
            OSError("no\nroute"),
            "cannot fetch drafter 'some/model@v1' from the hub: no route; check the name",
        ),
        (
            RuntimeError("of an HTTP library"),
            "from the hub: of an HTTP library; check the name, or give a local folder",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_fetched(
    error: Exception, said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """One line, the way out in front, whether files or folders were asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def refuse(*args: Any, **options: Any) -> str:
        raise error

    for call in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(hub, call, refuse)
    for find in (
        hub.checkpoint_folder,
        lambda name, what: hub.checkpoint_file(name, "config.json", what=what),
    ):
        with pytest.raises(CheckpointError) as caught:
            find("some/model@v1", what="drafter")
        assert said.format(page=f"{constants.ENDPOINT}/some/model") in str(
            caught.value
        ) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor", "--revision", "v1"], "--revision is about the target; name it with --model"),
        (
            ["train", "--out", "x", "--revision", "v1"],
            "revision 'v1' is of a checkpoint on the hub, and 'embedded' is none",
        ),
        (
            ["generate", "a", "--revision", "v1"],
            "revision 'v1' is of a checkpoint on the hub, and 'embedded' is none",
        ),
        (
            ["convert", "a", "b", "--to", "z-lab", "--model", "x/y@v2", "--revision", "v1"],
            "'x/y@v2' names a revision already",
        ),
    ],
)
def test_revisions_of_nothing(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["generate", "bench", "eval", "serve", "profile", "warmup", "couple", "train"]
)
def test_every_command_pins_its_target(command: str, monkeypatch: Patch) -> None:
    """The revision stands behind the name by the time a command runs."""
    from importlib import import_module

    from specdec.base.registry import VERBS

    home = import_module(next(verb.home for verb in VERBS if verb.name == command))
    seen: list[str] = []

    def run(args: Any) -> int:
        seen.append(args.model)
        return 0

    monkeypatch.setattr(home, "run", run)
    needed = {"generate": ["a"], "couple": ["folder"]}.get(command, [])
    assert main([command, *needed, "--model", "some/model", "--revision", "v1"]) == 0 and seen == [
        "some/model@v1"
    ]


def test_a_newer_client_wants_a_snapshot_whole(cache: Path, monkeypatch: Patch) -> None:
    """Once it has seen the list of a repository's files; weights are all that a load cannot do
    without.
    """

    def incomplete(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("README.md is missing")

    monkeypatch.setattr(hub, "snapshot_download", incomplete)
    assert hub.revision_of(hub.checkpoint_folder("acme/tiny-dflash", what="drafter")) == COMMIT


def test_an_older_client_gives_a_part_of_a_snapshot(cache: Path) -> None:
    """Which lists no tree of the repository: missing shards are told by the index."""
    snapshot = cache / "models--acme--tiny" / "snapshots" / COMMIT
    names = load_file(snapshot / "model.safetensors").keys()
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"target 'acme/tiny@v1.0'"):
        SpecDecoder.from_pretrained("acme/tiny@v1.0", drafter="none", device="cpu", dtype="float32")
