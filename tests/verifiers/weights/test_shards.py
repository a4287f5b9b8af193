"""Targets that two ranks compute together: what they put out is what one process does, for every
family.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from tests.helpers.tiny_ranks import SEQUENCE, Made, Way, make
from tests.verifiers.test_hf import check_logits
from verifiers.config.families import describe

RANKS = 2
FAMILIES = [name for name, config in (CONFIGS | LATENT_CONFIGS).items() if describe(config())]
CHANGES = {
    "kimi_linear": {"linear_num_heads": 4},
    # transformers writes convolutions of queries, keys and values to files as if all were equally
    # wide.
    "olmo_hybrid": {"linear_value_head_dim": 8},
}
"""Of configs whose heads two ranks do not divide."""

SEEDS = {"deepseek_v3_halves": 1}
"""Of models in which a row's last expert and the next one score alike, so that rounding would
choose.
"""

WAYS = {
    name: Way((0, 3, 7)[number % 3], (0.0, 0.8)[number // 3 % 2])
    for number, name in enumerate(FAMILIES)
}
WAYS |= {
    "llama_tied": Way(7, 0.0),
    "qwen3": Way(3, 0.8),
    "qwen3_moe": Way(3, 0.0),
    "deepseek_v3": Way(7, 0.0),
}


SHARING = (
    "qwen2",  # with biases
    "phi3",  # queries, keys and values in one tensor
    "olmo2",  # norms over all heads
    "gpt_oss",
    "mimo_v2_flash",  # 4 heads in some layers, 2 in others
    "gemma4",  # 1 in layers of full attention
)
"""Families with fewer key heads than four ranks, two where no comment says more."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [RANKS, 4])
def test_ranks_do_what_one_process_does(tmp_path: Path, size: int) -> None:
    """Every family in one test, since ranks take seconds to start. Each rank reads its share of the
    same files. Where there are fewer key heads than ranks, several ranks have the same one.
    """
    names = FAMILIES if size == RANKS else SHARING
    models = {
        name: plain_model(name, SEEDS.get(name, 0), **CHANGES.get(name, {})) for name in names
    }
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    folders = {name: tmp_path / name for name in names}
    for name, model in models.items():
        with_biases(model)
        model.save_pretrained(folders[name])
        shutil.copytree(tmp_path / "tokenizer", folders[name], dirs_exist_ok=True)
    alone, ranks = make(None, folders, WAYS), run_ranks(size, make, folders, WAYS)
    failures = {}
    for name, model in models.items():
        try:
            check(name, model, alone[name], [made[name] for made in ranks], size)
        except AssertionError as error:
            failures[name] = str(error)
    assert not failures


def with_biases(model: PreTrainedModel) -> None:
    """Random ones in the place of zeros: one that every rank adds, or none, has to show."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(std=0.3, generator=generator)


def check(name: str, model: PreTrainedModel, alone: Made, ranks: list[Made], size: int) -> None:
    """One target, alone and on each rank."""
    check_logits(ranks[0].logits, model, SEQUENCE)
    assert alone.tokens and (WAYS[name].k == 0) == (not any(map(any, alone.drafted)))
    for made in ranks:
        assert torch.equal(made.logits, ranks[0].logits), "ranks have other bits"
        assert made.tokens == alone.tokens
        assert made.accepted == alone.accepted
        assert made.weight_bytes < 0.7 * alone.weight_bytes, (
            "about half, where little is the same on all ranks"
        )
        if name in LATENT_CONFIGS:  # which are of all heads
            assert made.bytes_per_token == alone.bytes_per_token
        elif name.startswith("gemma4") or name == "mimo_v2_flash":
            assert alone.bytes_per_token // size <= made.bytes_per_token < alone.bytes_per_token
        else:
            assert made.bytes_per_token == alone.bytes_per_token // RANKS
