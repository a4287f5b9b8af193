"""Links within the repository's pages lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[(?:[^][]|\[[^]]*\])*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(rf"{FENCED.pattern}|`[^`]*`", FENCED.flags)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Names of a page's headings, as forges make them.

    >>> sorted(anchors("# What `auto` takes\\n\\n## A step, with a tree!"))
    ['a-step-with-a-tree', 'what-auto-takes']
    """
    titles = HEADING.findall(FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    """Targets of links that are not there; those to other sites are not followed."""
    for pair in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = "".join(pair)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            yield f"{page.name}: {target}"


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("drafters/*/*.md")]


def test_links_lead_somewhere() -> None:
    assert len(pages()) > 15
    assert [line for page in pages() for line in broken(page)] == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [path.name for path in ROOT.glob("docs/*.md") if f"docs/{path.name}" not in text] == []


@pytest.mark.parametrize("link", ["[a](no.md)", "[a](#no)", "[`a`\nb](page.md#b)", '<img src="c">'])
def test_a_broken_link_is_seen(tmp_path: Path, link: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"# Title\n\n[fine](#title) [away](https://example.org) `[code](no)`\n\n{link}\n"
    )
    assert len(list(broken(page))) == 1
