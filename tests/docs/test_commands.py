"""Commands that pages show are taken: every option exists, and every value is of its form."""

import re
import shlex
from pathlib import Path

import pytest

from specdec.base.errors import SpecDecError
from tests.docs.test_links import FENCED, ROOT, pages
from tests.specdec.cli.test_options import verb_parser

SHOWN = re.compile(r"(?:^|&& |-m )specdec ([a-z].*)$", re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Arguments of every `specdec` command in the page's blocks of code."""
    blocks = FENCED.findall(page.read_text(encoding="utf-8"))
    lines = SHOWN.findall("\n".join(block.replace("\\\n", " ") for block in blocks))
    found = [shlex.split(line, comments=True) for line in lines]
    stands_for_others = re.compile(r"OPTIONS|\$.*")
    return [line for line in found if not any(map(stands_for_others.fullmatch, line))]


def test_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in pages()) > 80


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page: Path) -> None:
    refused = []
    for verb, *arguments in commands(page):
        try:
            verb_parser(verb).parse(arguments)
        except SpecDecError as error:
            refused.append(f"specdec {verb} {shlex.join(arguments)}: {error}")
        except SystemExit:  # argparse has printed --help
            continue
    assert refused == []


def test_a_command_that_is_not_taken_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nspecdec generate hello --no-such-option    # a comment\n```\n")
    with pytest.raises(AssertionError, match="no-such-option"):
        test_commands_are_taken(page)
