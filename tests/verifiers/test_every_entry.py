"""Every entry of a config counts as in Transformers, or the model is refused: none is passed over.

Sizes are left out, which shapes of tensors tell, and so is what says nothing of a forward.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.bounds import in_float64
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.verifiers.test_hf import PackedRun, check_rows
from verifiers.support import unsupported_reasons

IDS = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TEXT = torch.tensor([IDS])

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


def changed(name: str) -> Iterator[tuple[str, Any, PreTrainedModel, Tensor]]:
    """Models that Transformers runs, each with another value at one entry, and their logits."""
    entries = (CONFIGS | LATENT_CONFIGS)[name]().to_dict()
    for entry, value in entries.items():
        if LEFT_OUT.search(entry):
            continue
        for other in others(entry, value):
            try:
                model = plain_model(name, **{entry: other})
                with torch.inference_mode():
                    logits = model(TEXT).logits[0]
            except Exception:  # of whatever kind
                continue
            yield entry, other, model, logits


@pytest.mark.parametrize("name", ALL)
def test_every_entry_counts_or_is_refused(name: str) -> None:
    tried, known = 0, dict[bytes, Tensor]()
    for entry, value, model, logits in changed(name):
        if unsupported_reasons(model.config):
            continue
        if (bits := logits.numpy().tobytes()) not in known:  # most entries change none
            known[bits] = in_float64(model, TEXT).logits[0]
        run = PackedRun(paged_verifier(model), [IDS])
        try:
            check_rows(run.forward([(0, 0, len(IDS))])[0], model, logits, known[bits])
        except AssertionError as error:
            raise AssertionError(f"{entry} of {value!r}: {error}") from error
        tried += 1
    assert tried > 3
