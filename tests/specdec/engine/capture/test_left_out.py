"""Steps whose kernels are left out, as while they are compiled ahead: nothing is read outside a
tensor, whatever a kernel should have written.
"""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from specdec.engine.capture.warmup import _rare, ready_shapes
from specdec.kernels.kernel import Kernel
from specdec.kernels.triton_compile import CompileAhead
from tests.specdec.engine.capture.test_graphs import Case
from tests.specdec.engine.capture.test_warmup import new_engine
from tests.specdec.kernels.test_compile_ahead import hopper

__all__ = ["hopper"]


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: a process of the compiler takes seconds to start."""
    monkeypatch.setattr("sys.executable", "/bin/true")


@pytest.fixture
def all_kernels(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is taken, on a CPU, too: it raises where a GPU would be lost."""
    monkeypatch.setattr(Kernel, "runs_on", lambda self, *about: True)


@pytest.mark.parametrize("drafter", ["ngram", "suffix+dflash", "dflash"])
def test_nothing_is_read_outside(case: Case, drafter: str, all_kernels: None) -> None:
    """In chains and trees, greedy and sampled, with what is rare."""
    engine = new_engine(case, drafter, capture=False, max_num_seqs=2, num_draft_tokens="auto")
    with CompileAhead(1) as ahead:
        for shape in (*ready_shapes(engine), *_rare(engine)):
            shape.eager()
    ahead.close()
    assert len(ahead.kernels) > 5


@pytest.mark.parametrize(
    "read",
    [
        lambda table, places: table.gather(0, places),
        lambda table, places: table.index_select(0, places),
        lambda table, places: table[places],
        lambda table, places: table[None][:, places],
        lambda table, places: torch.take(table, places),
        lambda table, places: functional.embedding(places, table[:, None]),
        lambda table, places: table.clone().scatter_(0, places, 1),
        lambda table, places: table.clone().scatter_add_(0, places, table),
        lambda table, places: table.clone().index_copy_(0, places, table),
        lambda table, places: table.clone().index_add_(0, places, table),
        lambda table, places: table.clone().index_fill_(0, places, 1),
        lambda table, places: table.clone().index_put_((places,), table),
    ],
)
@pytest.mark.parametrize("place", [-1, 3, -(2**40), 2**40])
def test_any_place_is_harmless(read: Callable[[Tensor, Tensor], Tensor], place: int) -> None:
    table, places = torch.arange(3.0), torch.tensor([place, 1, place])
    with CompileAhead(1):
        assert read(table, places).numel() == 3
