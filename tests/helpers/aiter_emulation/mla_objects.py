"""Which latent decode kernels exist: AITER picks one of the code objects it ships, and aborts when
there is none.
"""

from typing import Literal

from tests.helpers.aiter_emulation.machine import Machine
from tests.helpers.aiter_emulation.signatures import nearest, version_key

Kind = Literal["bf16", "a16w8", "fp8"]
"""bf16 query and cache; bf16 query on an fp8 cache; fp8 query and cache."""

# heads, (p)ersistent or (n)ot, query length; 0 is any. `lse`: also returns it. `open`: not causal.
_SHIPPED: dict[tuple[str, str, Kind], str] = {
    ("0.1.15", "gfx942", "bf16"): "16n1 16n4 16n8 16p4 32n0 64n0 128n0",
    ("0.1.15", "gfx942", "a16w8"): "16p4",
    ("0.1.15", "gfx942", "fp8"): "16n1 16n2 16n4 16p1 16p2 16p4 128n0 128p0",
    ("0.1.15", "gfx950", "bf16"): (
        "16n1 16n4 16n8 16p4 32n0 32p4 64n0 64n1 64n1+lse 64p1 64p1+lse 128n0"
    ),
    ("0.1.15", "gfx950", "a16w8"): "16p4",
    ("0.1.15", "gfx950", "fp8"): (
        "16n1 16n2 16n4 16p1 16p1+lse 16p2 16p4 16p4+lse 32p1 32p2 32p2+lse 32p4 64p1 64p1+lse"
        " 128n0 128p0 128p0+lse"
    ),
    ("0.1.16", "gfx950", "bf16"): (
        "16n1 16n4 16n8 16p4 16p4+lse 32n0 32p4 32p4+lse 64n0 64n1 64n1+lse 64p1 64p1+lse 128n0"
    ),
    ("0.1.16", "gfx950", "fp8"): (
        "16n1 16n2 16n4 16p1 16p1+lse 16p2 16p4 16p4+lse 32p2 32p2+lse 32p4 32p4+lse 64p1 64p1+lse"
        " 128n0"
    ),
    ("0.1.17", "gfx950", "fp8"): (
        "16n1 16n2 16n4 16p1 16p1+lse 16p2 16p4 16p4+lse 32p1 32p1+lse 32p2 32p2+lse 32p4 32p4+lse"
        " 64p1 64p1+lse 128n0"
    ),
    ("0.1.18", "gfx942", "fp8"): "16n1 16n2 16n4 16p1 16p2 16p4 64p1 64p1+lse 128n0 128p0",
    ("0.1.19", "gfx950", "bf16"): (
        "16n1 16n4 16n8 16p4 16p4+lse 32n0 32p4 32p4+lse 64n0 64n1 64p1 64p1+lse 128n0"
    ),
    ("0.1.20", "gfx950", "bf16"): (
        "16n1 16n4 16n8 16p4 16p4+lse 32n0 32p4 32p4+lse 32p4+lse+open 32p4+open 64n0 64n1 64p1"
        " 64p1+lse 64p1+lse+open 64p1+open"
        " 128n0"
    ),
    ("0.1.20", "gfx950", "fp8"): (
        "16n1 16n1+open 16n2 16n4 16n4+open 16p1 16p1+lse 16p1+lse+open 16p1+open 16p2 16p4"
        " 16p4+lse 16p4+lse+open 16p4+open"
        " 32p1 32p1+lse 32p4 32p4+lse 32p4+lse+open 32p4+open 128n0 128n0+open"
    ),
}


def is_native(machine: Machine, kind: Kind, heads: int, query_len: int) -> bool:
    """Whether the persistent kernel takes so many heads at once; otherwise they are folded into
    groups of 16.
    """
    new = version_key(machine.version)
    if heads == 16:
        return True
    if kind == "bf16":
        return machine.architecture == "gfx950"
    if kind == "a16w8":
        return False
    if machine.architecture == "gfx942":
        return heads == 128 or (new >= (0, 1, 18) and heads == 64 and query_len == 1)
    if new >= (0, 1, 20):
        return heads in (32, 64, 128)
    if new >= (0, 1, 18):
        return heads in (64, 128) or (heads == 32 and query_len != 3)
    if new >= (0, 1, 16):
        own = (1, 2, 4) if new >= (0, 1, 17) else (2, 4)
        return heads in (64, 128) or (heads == 32 and query_len in own)
    # The last two keep the layout of the query by counting the folded heads as further queries.
    exact = (
        (heads == 128 and query_len != 4)
        or (heads == 32 and query_len in (1, 2, 4))
        or (heads == 64 and query_len == 1)
    )
    return exact or query_len * (heads // 16) == 4 or (heads == 64 and query_len == 2)


def code_object(
    machine: Machine,
    kind: Kind,
    heads: int,
    query_len: int,
    *,
    persistent: bool,
    lse: bool = False,
    causal: bool = True,
) -> str | None:
    """The kernel for `heads` heads after folding, or None: AITER aborts the process."""
    new = version_key(machine.version)
    wanted = _bf16(machine, heads, query_len, persistent) if kind == "bf16" else None
    if kind == "a16w8" and persistent and heads == 16 and query_len <= 4:
        wanted = 16, 4
    if kind == "fp8":
        wanted = _fp8(machine, heads, query_len, persistent)
    if wanted is None:
        return None
    name = f"{wanted[0]}{'p' if persistent else 'n'}{wanted[1]}"
    name += "+lse" if lse and (persistent or new < (0, 1, 19)) else ""
    name += "" if causal or query_len == 1 else "+open"
    return name if name in _shipped(machine, kind).split() else None


def _shipped(machine: Machine, kind: Kind) -> str:
    """What lies in the release, which lists only what has changed."""
    known = {
        version: names
        for (version, *where), names in _SHIPPED.items()
        if where == [machine.architecture, kind]
    }
    return known.get(nearest(known, machine.version) or "", "")


def _bf16(machine: Machine, heads: int, query_len: int, persistent: bool) -> tuple[int, int] | None:
    new, rows = version_key(machine.version), heads * query_len
    if not persistent:
        if heads == 16:
            return next(((16, longest) for longest in (1, 4, 8) if query_len <= longest), None)
        return heads, int(heads == 64 and query_len == 1)
    if machine.architecture == "gfx950":
        if (rows >= 128 or heads > 64) and heads != 48:
            return 32, 4
        if new >= (0, 1, 17):
            narrow = rows >= 64 or heads >= 16
        elif new >= (0, 1, 16):
            narrow = (rows >= 64 or heads > 16) and rows != 32
        else:
            narrow = heads != 32 and (rows >= 64 or heads > 16)
        if narrow:
            return 64, 1
    return (heads, 4) if heads in (16, 32) and query_len <= 4 else None


def _fp8(machine: Machine, heads: int, query_len: int, persistent: bool) -> tuple[int, int] | None:
    new, wide = version_key(machine.version), machine.architecture == "gfx950" and persistent
    if (
        wide
        and new >= (0, 1, 18)
        and (heads == 128 or query_len >= {16: 5, 32: 4, 64: 2}.get(heads, 10**9))
    ):
        return 32, 4
    if (
        wide
        and new >= (0, 1, 20)
        and (heads, query_len) in ((16, 3), (16, 4), (32, 2), (32, 3), (64, 1))
    ):
        return 16, 4
    if (
        wide
        and (0, 1, 16) <= new < (0, 1, 18)
        and (heads == 128 or (heads, query_len) in ((32, 4), (64, 2), (64, 3), (64, 4)))
    ):
        return 32, 4
    if (
        wide
        and new < (0, 1, 16)
        and heads in (32, 64)
        and query_len * heads in (64, 128)
        and (heads, query_len) != (64, 1)
    ):
        return (32, 4) if heads == 64 else (32, query_len)
    if heads == 16:
        return next(((16, longest) for longest in (1, 2, 4) if query_len <= longest), None)
    if heads == 128:
        return 128, 0
    return (
        (heads, query_len) if persistent and heads in (32, 64) and query_len in (1, 2, 4) else None
    )
