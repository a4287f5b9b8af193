"""Stop strings are looked for all at once: one look per character, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The automaton of Aho and Corasick (1975). A node stands for the longest ending of a text that
    begins a string; 0 for none.

    Attributes:
        depth: length of that ending, by node.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth, self._shorter, self._found = [0], [0], [0]
        for string in strings:
            node = 0
            for sign in string:
                node = self._next[node].get(sign) or self._add(node, sign)
            self._found[node] = len(string)
        for node in sorted(range(len(self._next)), key=self.depth.__getitem__):
            for sign, longer in self._next[node].items():
                self._shorter[longer] = self._step(self._shorter[node], sign) if node else 0
                self._found[longer] = self._found[longer] or self._found[self._shorter[longer]]

    def search(self, node: int, text: str) -> tuple[int, int, int]:
        """Goes on from a node.

        Returns:
            The node after the text, or after the string that was completed first, of those the
            longest; where that one ends in the text, and its length, which is 0 where there is
            none.

        >>> StopStrings(["ab", "cab"]).search(0, "acab")
        (5, 4, 3)
        """
        found = self._found
        for end, sign in enumerate(text, start=1):
            node = self._step(node, sign)
            if found[node]:
                return node, end, found[node]
        return node, len(text), 0

    def _add(self, node: int, sign: str) -> int:
        self._next[node][sign] = made = len(self._next)
        self._next.append({})
        self.depth.append(self.depth[node] + 1)
        self._shorter.append(0)
        self._found.append(0)
        return made

    def _step(self, node: int, sign: str) -> int:
        while node and sign not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(sign, 0)


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """One object for all outputs with these strings, which only read it."""
    return StopStrings(strings)
