"""The drawing of a step's tree: its structure, not its pixels."""

import re
from typing import Any
from xml.etree import ElementTree

from evals.report.tree import draw_tree

SVG = "{http://www.w3.org/2000/svg}"

# the anchor, then 1 and 2 behind it, 3 and 4 behind 1, 5 behind 2, 6 behind 5; the target takes 2
# and 5
STEP: dict[str, Any] = {
    "tokens": ["the", " cat", "<b>", " sat", " ran", "\n", " supercalifragilistic"],
    "parents": [0, 0, 1, 1, 2, 5],
    "ranks": [0, 1, 0, 1, 0, 0],
    "accepted": [2, 5],
    "next_token": " on",
}


def drawn(
    step: dict[str, Any],
) -> tuple[dict[str, tuple[str, float, float]], list[tuple[str, float, float]]]:
    """Of every box by its token the kind, left end and middle; and of every edge its kind and where
    it ends.
    """
    root = ElementTree.fromstring(draw_tree(step))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and title.text and box is not None
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= float(root.attrib["width"])
        middle = float(box.attrib["y"]) + float(box.attrib["height"]) / 2
        boxes[title.text] = group.attrib["class"], float(box.attrib["x"]), middle
    edges = []
    for path in root.iter(f"{SVG}path"):
        numbers = re.fullmatch(r"M\d+ \d+ H\d+ V(\d+) H(\d+)", path.attrib["d"])
        assert numbers
        edges.append((path.attrib["class"], float(numbers[2]), float(numbers[1])))
    return boxes, edges


def test_every_draft_is_drawn_in_the_column_of_its_depth() -> None:
    """Catches drafts that are missing, and a parent that is taken for another row."""
    boxes, _ = drawn(STEP)
    assert [kind for kind, *_ in boxes.values()].count("left-behind") == 4
    columns = sorted({left for _, left, _ in boxes.values()})
    depths = {token: columns.index(left) for token, (_, left, _) in boxes.items()}
    assert depths == {
        "'the'": 0, "' cat'": 1, "'<b>'": 1, "' sat'": 2, "' ran'": 2, r"'\n'": 2,
        "' supercalifragilistic'": 3, "' on'": 3,
    }  # fmt: skip


def test_the_path_that_was_taken_leads_to_the_targets_own_token() -> None:
    """Catches accepted drafts that look like others, and a token that hangs on another draft than
    the last accepted.
    """
    boxes, edges = drawn(STEP)
    assert {token: kind for token, (kind, *_) in boxes.items() if kind != "left-behind"} == {
        "'the'": "anchor",
        "'<b>'": "accepted",
        r"'\n'": "accepted",
        "' on'": "own",
    }
    ends = {(kind, left, middle) for kind, left, middle in boxes.values() if kind != "anchor"}
    assert sorted(edges) == sorted(ends), (
        "an edge comes to every box but the anchor's, and looks like it"
    )
    assert [kind for kind, *_ in edges] == ["left-behind"] * 4 + ["accepted"] * 2 + ["own"], (
        "what was taken lies on top"
    )
    alone = drawn(STEP | {"accepted": []})[0]
    assert alone["' on'"][1] == alone["' cat'"][1], (
        "without accepted drafts it comes behind the anchor"
    )


def test_no_two_boxes_lie_on_each_other() -> None:
    """The first child stands in its parent's line, every other one in a line of its own."""
    boxes, _ = drawn(STEP)
    places = [(left, middle) for _, left, middle in boxes.values()]
    assert len(set(places)) == len(places) == 8
    assert (
        boxes["'the'"][2]
        == boxes["' cat'"][2]
        == boxes["' sat'"][2]
        < boxes["' ran'"][2]
        < boxes["'<b>'"][2]
    )
    assert (
        boxes["'<b>'"][2]
        == boxes[r"'\n'"][2]
        == boxes["' supercalifragilistic'"][2]
        < boxes["' on'"][2]
    )


def test_tokens_are_shown_as_they_are() -> None:
    """Catches markup that comes from a token, spaces that vanish, and ranks that begin at 0."""
    svg = draw_tree(STEP)
    texts = re.findall(r'xml:space="preserve">(.*?)</text>', svg)
    assert texts[:3] == ["the", "·cat", "&lt;b&gt;<tspan> 2</tspan>"]
    assert "↵" in texts and "·supercalifra…" in texts
    assert 'aria-label="tree of 6 drafts, 2 accepted"' in svg
