"""The tree of one step as SVG: drafts by position, the likeliest continuation straight on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

FONT = 13
"""Size of its texts, in pixels."""

_ADVANCE = 0.62 * FONT  # of a character of a monospaced font, rounded up
# of a box: around its text, to the next one, its height, to the one below
_PAD, _GAP, _HEIGHT, _LINE = 5, 22, 22, 28
_LONGEST = 14  # characters of a token that are shown


@dataclass(slots=True)
class _Node:
    """One box: its looks, its text, and where it is, in columns by depth and lines from the top."""

    kind: str
    text: str
    rank: int
    parent: int | None
    depth: int
    line: int = -1

    @property
    def label(self) -> str:
        """The token as far as it is shown, with its spaces and line ends to be seen."""
        shown = "".join({" ": "·", "\n": "↵", "\t": "→"}.get(char, char) for char in self.text)
        return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"

    @property
    def note(self) -> str:
        """The draft's place among the candidates of its position, where that is not the first."""
        return f" {self.rank + 1}" if self.rank else ""

    @property
    def width(self) -> float:
        """Width of the box, in pixels."""
        return _ADVANCE * len(self.label + self.note) + 2 * _PAD


def draw_tree(step: Mapping[str, Any]) -> str:
    """The block of one step (`evals.bench.tree_step`), which drafts were accepted, what followed.

    Args:
        step: `tokens`, `parents`, `ranks`, `accepted` and `next_token`.
    """
    nodes = _nodes(step)
    _set_lines(nodes)
    depths = range(max(node.depth for node in nodes) + 1)
    widths = [max(node.width for node in nodes if node.depth == depth) for depth in depths]
    lefts = [1 + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    width, height = lefts[-1] + widths[-1] + 1, (1 + max(node.line for node in nodes)) * _LINE

    def middle(node: _Node) -> int:
        return node.line * _LINE + _LINE // 2

    edges, boxes = [], []
    for node in nodes:
        if node.parent is not None:
            above = nodes[node.parent]
            start, end = lefts[above.depth] + above.width, lefts[node.depth]
            way = f"M{start:.0f} {middle(above)} H{end - _GAP / 2:.0f} V{middle(node)} H{end:.0f}"
            edges.append((node.kind != "left-behind", f'<path class="{node.kind}" d="{way}"/>'))
        x, y = lefts[node.depth], middle(node)
        note = f"<tspan>{node.note}</tspan>" if node.note else ""
        boxes.append(
            f'<g class="{node.kind}"><title>{escape(repr(node.text))}</title>'
            f'<rect x="{x:.0f}" y="{y - _HEIGHT // 2}" width="{node.width:.0f}" height="{_HEIGHT}"'
            f' rx="4"/>'
            f'<text x="{x + _PAD:.0f}" y="{y + 4.5:.1f}"'
            f' xml:space="preserve">{escape(node.label)}{note}</text></g>'
        )
    # the way that was taken lies on top
    lines = [line for _, line in sorted(edges, key=lambda edge: edge[0])]
    label = f"tree of {len(step['parents'])} drafts, {len(step['accepted'])} accepted"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}"'
            f' width="{width:.0f}" height="{height}"'
            f' viewBox="0 0 {width:.0f} {height}">',
            *lines,
            *boxes,
            "</svg>",
        ]
    )


def _nodes(step: Mapping[str, Any]) -> list[_Node]:
    """The anchor, the drafts, and the target's own token."""
    nodes = [_Node("anchor", step["tokens"][0], 0, None, 0)]
    accepted: Sequence[int] = step["accepted"]
    for row, (text, parent, rank) in enumerate(
        zip(step["tokens"][1:], step["parents"], step["ranks"], strict=True), start=1
    ):
        kind = "accepted" if row in accepted else "left-behind"
        nodes.append(_Node(kind, text, rank, parent, nodes[parent].depth + 1))
    last = accepted[-1] if accepted else 0
    return [*nodes, _Node("own", step["next_token"], 0, last, nodes[last].depth + 1)]


def _set_lines(nodes: Sequence[_Node]) -> None:
    """A node's first child stands in its own line, the others, with what follows them, below."""
    children: list[list[int]] = [[] for _ in nodes]
    for row, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(row)
    waiting, lines = [0], 0
    while waiting:
        row = waiting.pop()
        node = nodes[row]
        if node.parent is not None and children[node.parent][0] == row:
            node.line = nodes[node.parent].line
        else:
            node.line, lines = lines, lines + 1
        waiting += reversed(children[row])
