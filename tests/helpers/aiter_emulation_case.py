"""What the tests of AITER's emulation share: loading it, the plain formula of attention, and calls
that must raise.
"""

import importlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine, MisuseError, install
from tests.helpers.aiter_emulation.signatures import SOURCES

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
GFX950 = {"architecture": "gfx950"}
Load = Callable[..., tuple[Any, Machine]]
Attempt = Callable[[Any, Machine], Any]


class Misuse(NamedTuple):
    """A call, what it raises, and on which machine."""

    attempt: Attempt
    message: str
    error: type[Exception] = MisuseError
    machine: Mapping[str, Any] = MappingProxyType({})


def loader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Load:
    """A function that installs the emulation and imports it, functions of submodules beside the
    exported ones.
    """

    def load(**machine: Any) -> tuple[Any, Machine]:
        pretended = install(
            monkeypatch,
            folder,
            Machine(
                **{"any_shape": True, "num_compute_units": 8, "signatures": "shown", **machine}
            ),
        )
        module = importlib.import_module("aiter")
        for name in ("mla_decode_fwd", "fp8_mqa_logits", "deepgemm_fp8_paged_mqa_logits"):
            home = "aiter." + SOURCES[name].removesuffix(".py").replace("/", ".")
            setattr(module, name, getattr(importlib.import_module(home), name))
        return module, pretended

    return load


def check_misuse(load: Load, misuse: Misuse) -> None:
    """The call raises what it has to."""
    aiter, machine = load(**misuse.machine)
    with pytest.raises(misuse.error, match=misuse.message):
        misuse.attempt(aiter, machine)


def starts(lengths: list[int]) -> Tensor:
    """Where each of the lengths starts, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    causal: bool,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Rows [Sq, heads, D], the last of [Sk, heads, D], in `dtype`; also the logarithm of the
    denominator [Sq, heads].
    """
    scores = torch.einsum("ihd,jhd->ihj", q.to(dtype), keys.to(dtype)) * scale
    if causal:
        hidden = torch.ones(len(q), len(keys)).triu(len(keys) - len(q) + 1).bool()
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("ihj,jhd->ihd", scores.softmax(-1), values.to(dtype)), scores.logsumexp(-1)


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """`got`, of 16 bits, is `exact` in float64 but for one rounding.

    Sums in float32 are a thousand times as exact as that and add next to nothing to its error; a
    factor off by 1e-3 adds more than the tenth that is allowed.
    """
    assert got.dtype.itemsize == 2 and exact.dtype == torch.float64 and got.shape == exact.shape
    found, rounding = (
        float((x.double() - exact).square().mean().sqrt()) for x in (got, exact.to(got.dtype))
    )
    # false for NaN, too
    assert found <= 1.1 * rounding, f"off by {found:.3e}, where rounding is off by {rounding:.3e}"
