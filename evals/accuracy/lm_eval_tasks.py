"""Tasks of lm-eval for `specdec eval`: found by name, fed from local files, checked beforehand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval import evaluator, simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from evals.accuracy.bundled_task import bundled_task
from evals.accuracy.humaneval_task import HUMANEVAL, humaneval_task
from evals.prompt_sets import BUNDLED
from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.base.files import read_jsonl
from specdec.base.writing import write_text

# What lm-eval adds of the machine is in no report of ours. Its git complains to the user outside of
# a checkout, and its `pip list` takes seconds for each side.
evaluator.get_git_commit_hash = lambda: None
evaluator.add_env_info = lambda results: None


class Tasks:
    """Tasks of lm-eval, or the bundled problems, loaded anew for every evaluation.

    Args:
        names: tasks, groups or tags that generate, or "bundled".
        data: by task, a folder with one `<split>.jsonl` per split, or a JSONL file that is split
            `test`. Prompt, choice of few-shot examples and filters stay lm-eval's.
        num_fewshot: examples in the prompts of all tasks; None takes each task's own number.

    Raises:
        InvalidInputError: an unknown name (the message has near ones), missing or malformed data, a
            task that does not generate or takes no such examples, or a limit larger than a task.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        data: Mapping[str, str],
        limit: int | None,
        folder: Path,
        num_fewshot: int | None = None,
    ) -> None:
        if num_fewshot is not None and num_fewshot < 0:
            raise InvalidInputError(f"num_fewshot is {num_fewshot}; it must be at least 0")
        if BUNDLED in data:
            what = f"task {BUNDLED!r} asks the package's own problems"
            raise InvalidInputError(f"{what}; give --data to a task such as gsm8k")
        # The index of lm-eval's own tasks takes seconds, which our own do not need.
        theirs = set(names) - {BUNDLED, *HUMANEVAL}
        self._manager = _all_tasks() if theirs else TaskManager(include_defaults=False)
        self._limit, self._num_fewshot = limit, num_fewshot
        known = [BUNDLED, *HUMANEVAL, *self._manager.all_tasks]
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=5)
                hint = f"near: {', '.join(near)}" if near else "lm-eval ls tasks lists all"
                raise InvalidInputError(f"unknown task {name!r} ({hint})")
        self._specs = [self._spec(name, data.get(name), folder) for name in names]
        for name, task in self._load().items():
            if task.OUTPUT_TYPE != "generate_until":
                what = f"task {name!r} scores given texts, where drafts play no part"
                raise InvalidInputError(f"{what}; use lm-eval's own command with --model specdec")
            if num_fewshot and task.get_config("num_fewshot") == 0:  # lm-eval keeps to none
                what = f"num_fewshot is {num_fewshot} and task {name!r} takes no examples"
                raise InvalidInputError(f"{what}; leave it out, or the task")
            size = len(task.eval_docs)
            if limit is not None and not 1 <= limit <= size:
                what = f"limit is {limit} and task {name!r} has {size} samples"
                raise InvalidInputError(f"{what}; choose 1 to {size}")

    def evaluate(self, lm: LM, **options: Any) -> dict[str, Any]:
        """Results of `lm_eval.simple_evaluate`."""
        try:
            results: dict[str, Any] = simple_evaluate(
                lm,
                tasks=list(self._load().values()),
                limit=self._limit,
                num_fewshot=self._num_fewshot,
                task_manager=self._manager,
                **options,
            )
        except ImportError as error:
            raise _needs(error) from error
        except (AssertionError, ValueError) as error:  # of lm-eval where there are too few
            if self._num_fewshot is None or isinstance(error, SpecDecError):
                raise
            why = one_line(error).removeprefix("Error: ").rstrip(".")
            what = f"num_fewshot is {self._num_fewshot}, which lm-eval does not take ({why})"
            raise InvalidInputError(f"{what}; give fewer") from error
        return results

    def _load(self) -> dict[str, Any]:
        try:
            tasks: dict[str, Any] = self._manager.load(list(self._specs))["tasks"]
        except KeyError as error:
            what = f"a task needs split {error}, which its data lacks"
            way_out = "give a folder with one JSONL file per split"
            raise InvalidInputError(f"{what}; {way_out}") from error
        except ImportError as error:
            raise _needs(error) from error
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            what = f"cannot load the data of the tasks: {one_line(error)}"
            raise InvalidInputError(f"{what}; name local files with --data TASK=PATH") from error
        return tasks

    def _spec(self, name: str, data: str | None, folder: Path) -> str | dict[str, Any]:
        if name == BUNDLED:
            return bundled_task(folder)
        if data is None and name not in HUMANEVAL:
            return name
        own = {} if data is None else _data(data, folder)
        if name in HUMANEVAL:
            return humaneval_task(name, folder) | own
        path = self._manager.task_index[name].yaml_path
        if path is None:
            what = f"task {name!r} has no single configuration file"
            raise InvalidInputError(f"{what}; --data serves single tasks only")
        override = folder / f"{name}.yaml"
        content = {"include": str(path), "dataset_name": None, **own}
        write_text(override, json.dumps(content))  # JSON is YAML, too
        return str(override)


def _needs(error: ImportError) -> InvalidInputError:
    """What to say where lm-eval's own code of a task cannot be imported."""
    if error.name is None:
        return InvalidInputError(f"a task cannot be imported: {one_line(error)}")
    package = error.name.partition(".")[0]
    what = f"a task needs the module {package}, which is not installed"
    return InvalidInputError(f"{what}; the task's page in lm-eval names its package")


_all_tasks = cache(TaskManager)


def _data(data: str, folder: Path) -> dict[str, Any]:
    """What has lm-eval read a user's files."""
    kwargs = {"data_files": _splits(Path(data)), "cache_dir": str(folder / "datasets")}
    return {"dataset_path": "json", "dataset_kwargs": kwargs}


def _splits(path: Path) -> dict[str, str]:
    """JSONL file by split, every line checked: lm-eval's own loader does not name a wrong one."""
    files = {"test": path}
    if path.is_dir():
        files = {file.stem: file for file in sorted(path.glob("*.jsonl"))}
    if not files:
        what = f"{str(path)!r} holds no .jsonl file"
        way_out = "put one there per split, such as train.jsonl and test.jsonl"
        raise InvalidInputError(f"{what}; {way_out}")
    for file in files.values():
        read_jsonl(file)
    return {split: str(file.resolve()) for split, file in files.items()}
