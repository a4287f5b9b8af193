"""A head's tables and angles of rotations on kernels, against plain torch; where they run:
`tests.helpers.triton_interpreter`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.dflash import edges as plain_edges
from drafters.dflash.edges import check_edges, edges_of
from specdec.device.deviation import deviation
from specdec.layers.rotary import rotary
from specdec.layers.rotary.rotary import Angles, Rope, check_angles
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from drafters.dflash import triton_edges  # noqa: E402 (only where Triton can run)
from specdec.layers.rotary import triton_angles  # noqa: E402


@pytest.mark.parametrize("as_logprobs", [False, True])
@pytest.mark.parametrize(
    ("count", "first_slot", "scaled"), [(16, 0, False), (4, 1, True), (1, 0, True)]
)
def test_tables(
    count: int, first_slot: int, scaled: bool, as_logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that looks its left side up, through the same call."""
    generator = torch.Generator().manual_seed(count)
    left, right = torch.randn(2, 50, 24, generator=generator)
    scores = (
        torch.randn(3, 4, count, generator=generator)
        .log_softmax(-1)
        .sort(dim=-1, descending=True)
        .values
    )
    token_ids, scale = (
        torch.randint(50, (3, 4, count), generator=generator),
        torch.rand(3, 4, generator=generator),
    )
    found = []
    assert plain_edges.KERNEL.runs_on(DEVICE)
    for ours, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(plain_edges.KERNEL, "runs_on", lambda device, ours=ours: ours)
        device = DEVICE if ours else torch.device("cpu")
        one, other = left.to(device, dtype), right.to(device, dtype)
        head: Any = SimpleNamespace(right=other, has_state=False, first_slot=first_slot)
        head.left = lambda hidden, previous, state, one=one: (one[previous], None)
        ids = token_ids.to(device)
        arguments = (
            ids[..., None].float(),
            ids[:, 0, 0],
            ids,
            ids,
            scores.to(device, dtype),
            scale.to(device, dtype) if scaled else None,
        )
        if dtype == torch.float64:
            monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        found.append(edges_of(head, *arguments, as_logprobs=as_logprobs))
    monkeypatch.undo()
    error, bound = deviation(*found)
    assert error <= bound


def test_angles() -> None:
    """Of a rope, on kernels and in plain torch; a factor for each number is left to torch."""
    assert rotary.KERNEL.runs_on(DEVICE)
    position_ids = torch.tensor([[0, 1, 4095], [7, 100000, 3]])
    rope = Rope(1.0 / 1e4 ** (torch.arange(24) / 24), amplitude=1.25)
    ours = Angles.of(position_ids.to(DEVICE), rope.to(DEVICE), torch.float32)
    plain = rotary._half_angles(position_ids, rope.frequencies, torch.float32, 1.25)
    exact = (position_ids[..., None] * rope.frequencies).double()
    for sides in zip(
        (ours.cos, ours.sin), plain, (exact.cos() * 1.25, exact.sin() * 1.25), strict=True
    ):
        error, bound = deviation(*sides)
        assert error <= bound
    each = Rope(rope.frequencies, amplitude=torch.full((24,), 1.25)).to(DEVICE)
    torch.testing.assert_close(
        Angles.of(position_ids.to(DEVICE), each, torch.float32).cos, ours.cos
    )
    assert Angles.of(position_ids[:0].to(DEVICE), rope.to(DEVICE), torch.bfloat16).cos.shape == (
        0,
        3,
        24,
    )


def test_the_checks_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass, and fail where a kernel is off."""
    for module, name, check in (
        (triton_edges, "edges", check_edges),
        (triton_angles, "angles", check_angles),
    ):
        found = check(DEVICE)
        assert found.error <= found.bound
        right = getattr(module, name)

        def wrong(*arguments: Any, right: Any = right, **options: Any) -> Any:
            found = right(*arguments, **options)
            return (
                found + 0.1
                if isinstance(found, torch.Tensor)
                else tuple(part + 0.1 for part in found)
            )

        monkeypatch.setattr(module, name, wrong)
        found = check(DEVICE)
        assert found.error > found.bound
