"""Kernels compiled ahead by other processes, for a machine that need not be here: a later launch
finds them on disk.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

import specdec
from specdec.attention.triton import triton_splits
from specdec.kernels.triton_compile import CompileAhead, is_known, remember
from specdec.kernels.triton_launch import alike_keys

KERNEL = "specdec.attention.triton.triton_splits:_merge_kernel"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A driver of a machine that is not here, and a cache on disk that is empty."""
    if not hasattr(triton_splits._merge_kernel, "preload"):
        pytest.skip("Triton interprets its kernels in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    answers = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
    here = SimpleNamespace(**{name: partial(_told, answer) for name, answer in answers.items()})
    driver = import_module("triton.runtime").driver
    before = driver._active
    driver.set_active(here)
    triton_splits._merge_kernel.device_caches.clear()
    yield
    triton_splits._merge_kernel.device_caches.clear()
    driver._active = before


def _told(answer: Any, *_: object) -> Any:
    return answer


def merge(splits: int) -> torch.Tensor:
    """Launches the kernel as a step does; gives what it should have written."""
    output = torch.empty(4, 9, 64, dtype=torch.bfloat16)
    triton_splits.merge_splits(torch.empty(4, 9, splits, 64), torch.empty(4, 9, splits), output, 64)
    return output


def test_what_a_launch_needs_is_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of its forms, whatever the number of launches; this process then only reads."""
    told: list[tuple[int, int]] = []
    with CompileAhead(2) as ahead:
        for splits in (2, 4, 2, 4):
            assert not merge(splits).any(), "it computed nothing, and what it left is no garbage"
    assert list(ahead.kernels) == [KERNEL] and not triton_splits._merge_kernel.device_caches[0][0]
    ahead.wait(lambda *progress: told.append(progress))
    ahead.close()
    assert told == [(0, 2), (1, 2), (2, 2)]
    # Triton before 3.7 links what launches a kernel.
    assert all("libcuda" in failure for failure in ahead.failures)

    hits: list[bool] = []
    monkeypatch.setattr(
        import_module("triton").knobs.compilation,
        "listener",
        lambda **about: hits.append(about["cache_hit"]),
    )
    with pytest.raises(AttributeError):  # nothing can be launched here
        merge(4)
    assert hits == [True]


def test_what_is_compiled_is_left_out_as_well() -> None:
    """It would read what others have not written; afterwards it is there again."""
    with CompileAhead(1) as ahead:
        merge(2)
        ((table, key),) = ahead._left_out
    ahead.close()
    compiled = table[key] = object()  # which no launch can use
    with CompileAhead(1) as ahead:
        merge(2)
    ahead.close()
    assert list(ahead.kernels) == [KERNEL] and table == {key: compiled}


def test_what_is_known_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a kernel's source changes, or the cache is gone."""
    kernel = triton_splits._merge_kernel
    remember("a model", {KERNEL: kernel.cache_key})
    assert is_known("a model") and not is_known("another")
    remember("a model", {KERNEL: "of before"})
    assert not is_known("a model")
    remember("a model", {KERNEL: kernel.cache_key, "specdec.gone:_kernel": ""})
    assert not is_known("a model")


def test_processes_that_end_early_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they leave is compiled when it is launched."""
    monkeypatch.setattr("sys.executable", "/bin/true")
    told: list[Any] = []
    with CompileAhead(1) as ahead:
        merge(2)
    ahead.wait(lambda *progress: told.append(progress))
    assert ahead.failures == ["the compiling processes have ended early"] and told[-1] == (1, 1)


def test_only_what_was_asked_for_is_waited_for() -> None:
    """The first jobs, whatever the others are at."""
    told: list[Any] = []
    with CompileAhead(1) as ahead:
        merge(2)
        first = ahead.num_jobs
        for splits in (4, 8, 16):
            merge(splits)
    assert (first, ahead.num_jobs) == (1, 4)
    ahead.wait(jobs=first)
    assert 0 in ahead._done and len(ahead._done) < 4
    ahead.wait(lambda *progress: told.append(progress))
    assert told[0][0] < 4 and told[-1] == (4, 4)
    ahead.wait(jobs=4)
    ahead.close()
    ahead.wait(jobs=4)


def test_a_kernel_that_does_not_compile_is_told_of() -> None:
    with CompileAhead(1) as ahead:
        sizes = dict(HEAD_DIM=1, SPLITS=3, ROWS=1, BLOCK_D=1, OVERLAP=False)  # noqa: C408
        triton_splits._merge_kernel[(1,)](*[torch.empty(1)] * 3, 1, **sizes)
    ahead.wait()
    ahead.close()
    assert len(ahead.failures) == 1 and ahead.failures[0].startswith("_merge_kernel: ")


def test_keys_do_not_depend_on_what_was_launched_before() -> None:
    """Other processes compile in another order than this one launches in."""
    alike_keys()
    kernels = {id(one): one for one in all_functions()}
    assert len(kernels) > 100

    def forget(some: Iterable[Any]) -> None:
        for one in some:
            one.hash, one.used_global_vals = None, {}

    depend = []
    for kernel in kernels.values():
        forget(kernels.values())
        first = kernel.cache_key  # those that it calls come within it
        forget([kernel])
        depend += [kernel._fn_name] if kernel.cache_key != first else []
    assert not depend


def all_functions() -> Iterator[Any]:
    """Of this project that Triton compiles."""
    for path in Path(specdec.__file__).parent.rglob("triton_*.py"):
        name = ".".join(path.relative_to(Path(specdec.__file__).parents[1]).with_suffix("").parts)
        for one in list(vars(import_module(name)).values()):
            if issubclass(type(one), triton.JITFunction):
                yield one
