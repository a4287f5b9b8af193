"""The bundled problems as a task of lm-eval."""

from pathlib import Path
from typing import Any

from evals.prompt_sets import BUNDLED, BUNDLED_FILE, read_bundled


def bundled_task(folder: Path) -> dict[str, Any]:
    """The bundled problems as a task: examples before the question, and GSM8K's filters."""
    return {
        "task": BUNDLED,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(BUNDLED_FILE)},
            "field": "problems",
            "cache_dir": str(folder / "datasets"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{solution if solution is defined else answer}}",
        "fewshot_config": {"sampler": "first_n", "samples": read_bundled()["examples"]},
        "num_fewshot": 4,
        "generation_kwargs": {"until": ["Question:"], "do_sample": False},
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [",", "\\$", "\\.$"],
            }
        ],
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (-?[0-9.,]+)"},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": "(-?[0-9][0-9.,]*)"},
                    {"function": "take_first"},
                ],
            },
        ],
        "metadata": {"version": 1},
    }
