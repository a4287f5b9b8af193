"""Comparing the emulation's signatures with AITER's sources: a folder, and every release of a
repository.
"""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.aiter_emulation.compare_signatures import differences, folder_reader, main
from tests.helpers.aiter_emulation.signatures import SOURCES, VERSIONS, signatures


def test_comparison_with_an_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A moved argument, a changed default and a missing function are each reported."""
    for path in set(SOURCES.values()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert len(differences(folder_reader(tmp_path), "0.1.20")) == len(SOURCES)
    (tmp_path / "ops/cache.py").write_text(
        "def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping,"
        " kv_cache_dtype, k_scale, v_scale): ...\n"
        "def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,"
        " k_scale=None, v_scale=None,"
        " asm_layout=True): ...\n"
    )
    found = differences(folder_reader(tmp_path), "0.1.20")
    assert len(found) == len(SOURCES) - 1 and any("asm_layout=True" in line for line in found)
    assert main([str(tmp_path), "0.1.20"]) == 1
    assert "reshape_and_cache (ops/cache.py)" in capsys.readouterr().out


def git(repository: Path, *arguments: str) -> None:
    """Runs git as nobody in particular."""
    who = [
        "-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c",
        "commit.gpgsign=false",
    ]  # fmt: skip
    subprocess.run(
        ["git", "-C", str(repository), *who, *arguments], check=True, capture_output=True
    )


def write_package(repository: Path, version: str) -> None:
    """The `aiter` package of a version, with its functions' signatures and nothing in them."""
    texts = dict.fromkeys(SOURCES.values(), "")
    for name, known in signatures(version):
        texts[SOURCES[name]] += f"def {name}{known}: ...\n"
    for path, text in texts.items():
        file = repository / "aiter" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_comparison_with_every_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tags in order of their numbers, a post release with its own, and main; others are no
    releases. One is not what it says.
    """
    git(tmp_path, "init", "-b", "main")
    contents = {
        "v0.1.14": "0.1.15",
        "v0.1.16.post1": "0.1.16",
        "v0.1.15.post3": "0.1.15.post1",
        "v0.1.18": "0.1.17",
    }
    contents |= {"v0.1.21-rc1": "0.1.15", "v0.1.21": "0.1.20"}
    for tag, version in contents.items():
        write_package(tmp_path, version)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--allow-empty", "-m", tag)
        git(tmp_path, "tag", tag)
    write_package(tmp_path, VERSIONS[-1])
    git(tmp_path, "commit", "--all", "-m", "on the way to the next")
    assert main(["--repository", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "v0.1.15.post3", "v0.1.16.post1", "v0.1.18", "get_mla_metadata_v1", "v0.1.21", "main",
    ]  # fmt: skip
    equal, count = (
        [line[line.index("  ") :].strip() for line in lines if line.startswith(("v", "main"))],
        len(SOURCES),
    )
    assert [line.split("  ")[-1] for line in equal] == [
        f"{count} of {count} signatures equal the emulation of 0.1.15.post1",
        f"{count} of {count} signatures equal the emulation of 0.1.16",
        f"{count - 1} of {count} signatures equal the emulation of 0.1.18",
        f"{count} of {count} signatures equal the emulation of 0.1.21",
        f"{count} of {count} signatures equal the emulation of {VERSIONS[-1]}",
    ]
    git(tmp_path, "tag", "-d", "v0.1.18")
    assert main(["--repository", str(tmp_path)]) == 0
    with pytest.raises(SystemExit, match="No such file"):
        main(["--repository", str(tmp_path / "aiter" / "nowhere")])
