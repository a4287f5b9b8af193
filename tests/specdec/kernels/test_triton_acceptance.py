"""What steps come to on kernels, against plain torch; where they run, see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch

from specdec.engine import acceptance
from specdec.engine.acceptance import KERNEL, check_acceptance
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.engine import triton_acceptance  # noqa: E402 (only where Triton can run)


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 65])
@pytest.mark.parametrize("counted", [False, True])
def test_chains(rows: int, counted: bool) -> None:
    """None, some and all drafts accepted; rows that are not finite, before and behind the end."""
    assert KERNEL.runs_on(DEVICE)
    generator = torch.Generator().manual_seed(rows)
    target_ids = torch.randint(5, (7, rows), generator=generator)
    tokens = torch.cat([torch.zeros(7, 1, dtype=torch.int64), target_ids[:, :-1]], dim=1)
    for row in range(6):  # the last one has all right
        tokens[row, min(row + 1, rows - 1) :] += 1
    num_drafts = torch.randint(rows, (7,), generator=generator) if counted else None
    finite = torch.rand(7, rows, generator=generator) < 0.9
    expected = acceptance._plain_chain(tokens, target_ids, num_drafts, finite)
    there = [
        None if tensor is None else tensor.to(DEVICE)
        for tensor in (tokens, target_ids, num_drafts, finite)
    ]
    found = acceptance._of_chain(*there)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert counted or int(expected[0][-1]) == rows - 1


@pytest.mark.parametrize(("rows", "width"), [(2, 2), (16, 5), (65, 16)])
def test_paths(rows: int, width: int) -> None:
    """Rows out of order; what lies behind the end of a path may be anything."""
    generator = torch.Generator().manual_seed(rows)
    path, num_accepted = (
        torch.randint(rows, (7, width), generator=generator),
        torch.randint(width, (7,), generator=generator),
    )
    given = (
        path,
        num_accepted,
        torch.randint(999, (7, rows), generator=generator),
        torch.rand(7, rows, generator=generator) < 0.9,
    )
    expected = acceptance._plain_path(*given)
    found = acceptance._of_path(*(tensor.to(DEVICE) for tensor in given))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


def test_the_check_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and fails where a kernel is off."""
    assert check_acceptance(DEVICE).error == 0
    for name in ("chain_outcome", "path_outcome"):
        right = getattr(triton_acceptance, name)
        with monkeypatch.context() as patch:
            patch.setattr(
                triton_acceptance,
                name,
                lambda *given, right=right: (right(*given)[0] + 1, *right(*given)[1:]),
            )
            assert check_acceptance(DEVICE).error > 0
