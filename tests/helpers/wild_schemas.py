"""Random JSON schemas of all keywords, in combinations that nobody would write."""

from __future__ import annotations

import random
from typing import Any

from specdec.grammar.schema.formats import FORMATS

_VALUES: list[Any] = ["a", 'b"', 1, 2.5, None, True, False, [1], {"k": "v"}, "", -3, "é\n"]
_BOUNDS = [-5, 0, 1, 3, 10, 2.5, -0.001, 1e-7, 100.125, -1e6, 1234567.891]
_PATTERNS = ["^a*$", '^["x]+$', r"^(?=.*\d)[\w\\]+$", "b", r"\d$", "^x|y$", "^[^a]{2,3}$"]
_NAMES: list[Any] = [
    {"pattern": "^[ab]+$"},
    {"enum": ["x", "y"]},
    {"maxLength": 2},
    {"$ref": "#/$defs/N"},
    {"format": "date"},
]


def wild_schema(draw: random.Random) -> dict[str, Any]:
    """A schema, most likely one that is refused or has a value."""
    make = _Maker(draw)
    name = {"type": "string", "minLength": 1, "maxLength": 2}
    return make.schema(0) | {"$defs": {"A": make.schema(2), "B": make.schema(2), "N": name}}


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def _often(self, share: float) -> bool:
        return self._draw.random() < share

    def schema(self, depth: int) -> dict[str, Any]:
        if depth > 3 or self._often(0.12):
            return {"type": self._draw.choice(["integer", "boolean", "null", "string", "number"])}
        return self._draw.choice(
            [self._number, self._string, self._values, self._choice, self._array, self._object]
        )(depth)

    def _some(self, **ways: tuple[float, Any]) -> dict[str, Any]:
        """Keywords, each as often as its share says."""
        return {name: made() for name, (share, made) in ways.items() if self._often(share)}

    def _number(self, depth: int) -> dict[str, Any]:
        kind, pick = self._draw.choice(["integer", "number"]), lambda: self._draw.choice(_BOUNDS)
        bounds = dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (0.35, pick)
        )
        steps = (0.15, lambda: self._draw.choice([1, 2, 5, 0.5]))
        return {"type": kind} | self._some(
            **bounds, multipleOf=steps, format=(0.2, lambda: "int64")
        )

    def _string(self, depth: int) -> dict[str, Any]:
        return {"type": "string"} | self._some(
            minLength=(0.3, lambda: self._draw.randint(0, 3)),
            maxLength=(0.3, lambda: self._draw.randint(1, 6)),
            pattern=(0.3, lambda: self._draw.choice(_PATTERNS)),
            format=(0.2, lambda: self._draw.choice([*FORMATS, "zip"])),
            type=(0.1, lambda: ["string", "null"]),
        )

    def _values(self, depth: int) -> dict[str, Any]:
        values = self._draw.sample(_VALUES, self._draw.randint(1, 4))
        made: dict[str, Any] = {"const": values[0]} if self._often(0.3) else {"enum": values}
        types = (0.2, lambda: self._draw.choice(["string", "integer", ["string", "null"]]))
        return made | self._some(type=types, maxLength=(0.2, lambda: 3))

    def _choice(self, depth: int) -> dict[str, Any]:
        kind = self._draw.choice(["anyOf", "oneOf", "allOf", "$ref"])
        if kind == "$ref":
            return {"$ref": self._draw.choice(["#/$defs/A", "#/$defs/B", "#"])}
        parts = [
            self.schema(depth + 1)
            for _ in range(1 if kind == "allOf" else self._draw.randint(1, 3))
        ]
        return {kind: parts} | self._some(
            type=(0.1, lambda: self._draw.choice(["string", "object", "number"]))
        )

    def _array(self, depth: int) -> dict[str, Any]:
        return self._some(
            type=(0.9, lambda: "array"),
            items=(0.7, lambda: False if self._often(0.2) else self.schema(depth + 1)),
            prefixItems=(
                0.3,
                lambda: [self.schema(depth + 1) for _ in range(self._draw.randint(1, 2))],
            ),
            minItems=(0.4, lambda: self._draw.randint(0, 2)),
            maxItems=(0.4, lambda: self._draw.randint(0, 3)),
            unevaluatedItems=(0.1, lambda: self._draw.choice([False, {"type": "null"}])),
        )

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(["a", "b", 'c"', "ab", "d\n", "é"], self._draw.randint(1, 3))
        named: dict[str, Any] = {}
        if self._often(0.7):
            named["properties"] = {
                name: self.schema(depth + 1) if self._often(0.95) else True for name in names
            }
            named |= self._some(
                required=(0.5, lambda: self._draw.sample(names, self._draw.randint(0, len(names))))
            )
        return named | self._some(
            type=(0.9, lambda: "object"),
            additionalProperties=(
                0.35,
                lambda: self._draw.choice([False, True, self.schema(depth + 1)]),
            ),
            propertyNames=(0.15, lambda: self._draw.choice(_NAMES)),
            patternProperties=(
                0.12,
                lambda: {self._draw.choice(["^x", "^a|b$", '"']): self.schema(depth + 1)},
            ),
            minProperties=(0.2, lambda: self._draw.randint(0, 2)),
            maxProperties=(0.2, lambda: self._draw.randint(0, 3)),
            unevaluatedProperties=(0.1, lambda: self._draw.choice([False, self.schema(depth + 1)])),
        )
