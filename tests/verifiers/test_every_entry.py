"""Every entry of a config counts as in Transformers, or the model is refused: none is passed over.

Sizes are left out, which shapes of tensors tell, and so is what says nothing of a forward.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.verifiers.test_hf import PackedRun, check_logits
from verifiers.support import unsupported_reasons

IDS = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()

LEFT_OUT = re.compile(
    r"dropout|loss|coef|jitter|_token_id$|^output_|^use_cache$|^initializer|^tie_word_embeddings$"
)
"""Of training and outputs, and what the tests' models have a value of their own for."""

QUICK = ("gemma3", "qwen3_5", "deepseek_v2_yarn", "granite_hybrid_moe")
ALL = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in (*CONFIGS, *LATENT_CONFIGS)
]


def others(entry: str, value: Any) -> list[Any]:
    """Values that an entry does not have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [1.7 * value + 0.01]
    if isinstance(value, str):
        return ["gelu"] if "act" in entry else []
    return [0.5] if value is None else []


def changed(name: str) -> Iterator[tuple[str, Any, PreTrainedModel]]:
    """Models that Transformers runs, each with another value at one entry."""
    entries = (CONFIGS | LATENT_CONFIGS)[name]().to_dict()
    for entry, value in entries.items():
        if LEFT_OUT.search(entry):
            continue
        for other in others(entry, value):
            try:
                model = plain_model(name, **{entry: other})
                with torch.inference_mode():
                    model(input_ids=torch.tensor([IDS]))
            except Exception:  # of whatever kind
                continue
            yield entry, other, model


@pytest.mark.parametrize("name", ALL)
def test_every_entry_counts_or_is_refused(name: str) -> None:
    tried = 0
    for entry, value, model in changed(name):
        if unsupported_reasons(model.config):
            continue
        run = PackedRun(paged_verifier(model), [IDS])
        try:
            check_logits(run.forward([(0, 0, len(IDS))])[0], model, IDS)
        except AssertionError as error:
            raise AssertionError(f"{entry} of {value!r}: {error}") from error
        tried += 1
    assert tried > 3
