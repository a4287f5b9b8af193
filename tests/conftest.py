"""What pytest is told about all tests."""

import gc
import itertools
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.device import self_check
from verifiers.config import recalled

_folders = itertools.count()
gc.disable()  # until all tests are collected: what is imported stays
# A shell that runs tests in the background has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of kernels that are asked for by name run in Triton's interpreter where there is no
    GPU. What processes keep that tests start is none of the user's.
    """
    from specdec.device.device import resolve_device

    if cache := getattr(config, "cache", None):  # none with -p no:cacheprovider
        os.environ.setdefault("SPECDEC_CACHE", str(cache.mkdir("specdec")))
    files = [Path(str(argument).partition("::")[0]) for argument in config.args]
    kernels = all(file.is_file() and "require_triton()" in file.read_text() for file in files)
    if files and kernels and resolve_device().type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header() -> str:
    """Where the tests run, and why not on the GPU that is there."""
    from specdec.device.device import describe_device, resolve_device, unseen_gpu

    reason = unseen_gpu()
    return f"device: {describe_device(resolve_device())}" + (
        f"; no GPU is used: {reason}" if reason else ""
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the slow ones, the longest before all, so that no worker is left alone with them
    in the end.
    """
    # all kernels of a target, a cluster, all families in several processes
    longest = ("test_triton_compile", "test_ray", "test_shards")
    items.sort(
        key=lambda item: (
            item.get_closest_marker("slow") is None,
            not any(name in item.nodeid for name in longest),
        )
    )


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what tests make, a tenth as often: going through
    all that was imported takes it half a second, and what tests share not much less.
    """
    gc.freeze()
    gc.set_threshold(7_000, 10, 40)
    gc.enable()
    # pytest hangs its handlers on every logger that keeps its records to itself, for each phase of
    # each test. Torch has forty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests that its worker ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes down a trace for each GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads another's verdicts of self-checks, nor what another has found out of a target,
    and none writes to the user's cache.
    """
    folder = tmp_path_factory.getbasetemp() / f"verdicts{next(_folders)}"
    monkeypatch.setattr(self_check, "cache_folder", lambda: folder)
    monkeypatch.setattr(recalled, "cache_folder", lambda: folder)
    monkeypatch.setattr(self_check, "_known", {})
    monkeypatch.delenv(self_check.VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def as_quiet_as_before() -> Iterator[None]:
    """What a command that a test runs sets to be logged ends with the test."""
    yield
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        if name.startswith("specdec") and isinstance(logger, logging.Logger):
            if logger.level:  # setting one visits all loggers
                logger.setLevel(logging.NOTSET)
            logger.filters.clear()
