"""Fixtures of these tests."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks._index import TaskIndex

from tests.evals.tiny import save_tiny


@pytest.fixture(scope="session", autouse=True)
def quick_harness() -> Iterator[None]:
    """lm-eval reads the 14,000 files of its tasks for each manager, half a minute. Here it has
    GSM8K alone.
    """
    build, everything = TaskIndex.build, Path(lm_eval.tasks.__path__[0])

    def of_gsm8k(paths: Iterable[Path], **options: Any) -> Any:
        few = [path / "gsm8k" if path == everything else path for path in paths]
        return build(few, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(of_gsm8k))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")
