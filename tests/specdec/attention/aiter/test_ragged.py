"""Requests of unequal numbers of rows, which only the device knows, on AITER's backends, on the
emulation: right, nothing waits, and whole models write what they write alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.engine.engine import SpecEngine
from specdec.model.core import Drafter
from tests.helpers import latent_case
from tests.helpers.attention_case import Case, spec
from tests.helpers.bounds import assert_as_exact
from tests.helpers.engines import tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.rocm import Install
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from tests.helpers.trees import Parents
from tests.specdec.attention.aiter.test_generation import CHANGES
from tests.specdec.attention.aiter.test_trees import decoded

E4M3 = torch.float8_e4m3fnuz
WIDTHS, CONTEXTS, MOST = [8, 1, 3, 2, 1], [40, 0, 3, 77, 5], 9
LENGTHS = [context + width for context, width in zip(CONTEXTS, WIDTHS, strict=True)]
TREES: list[Parents] = [[0, 0, 1, 1, 2, 3, 5], [], [0, 0], [0], []]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("shape", "how", "machine"),
    [
        ({}, {}, {}),
        ({"num_heads": 9, "num_kv_heads": 3}, {"sinks": torch.ones(9)}, {"version": "0.1.16"}),
        ({}, {"window": 5}, {"architecture": "gfx950"}),
        ({}, {"softcap": 0.7}, {}),
        ({"head_dim": 32}, {}, {"architecture": "gfx1100"}),
        ({"cache_dtype": E4M3}, {}, {}),
    ],
)
def test_ordinary_heads(
    rocm: Install,
    tree: bool,
    shape: dict[str, Any],
    how: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    """Both tiers and caches; some requests have their anchor alone, and none all rows."""
    rocm(tiny=True, **machine)
    asked = spec(dtype=torch.float32, **shape)
    if tree and {"window", "softcap"} & set(how):
        pytest.skip("trees are refused then")
    for kind in (RocmAiterFaBackend, RocmAiterFaShuffleBackend):
        if kind is RocmAiterFaShuffleBackend and (tree or kind.unsupported_reasons(asked)):
            continue
        assert kind.ragged_reasons(asked) == []
        case = Case(asked, LENGTHS, WIDTHS, uniform=True, trees=TREES if tree else ())
        case.metadata = replace(case.metadata, ragged=True, max_query_len=MOST)
        attention = kind(asked)
        with no_host_sync():
            attention.plan(case.metadata)
        case.check(case.attend(attention, layers=2, scale=0.2, **how), scale=0.2, **how)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("changes", "machine"),
    [({}, {}), ({"num_heads": 24}, {"version": "0.1.15"}), ({"cache_dtype": E4M3}, {})],
)
def test_latent_heads(
    rocm: Install,
    tree: bool,
    changes: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    """Each row is an entry of its own."""
    rocm(tiny=True, num_compute_units=8, **machine)
    asked = latent_case.tiny(**changes)
    assert RocmAiterMlaBackend.ragged_reasons(asked) == []
    case = latent_case.Case(asked, LENGTHS, WIDTHS, uniform=True, trees=TREES if tree else ())
    case.metadata = replace(case.metadata, ragged=True, max_query_len=MOST)
    backend = RocmAiterMlaBackend(asked)
    with no_host_sync():
        got = case.attend(backend, layers=2)
    assert_as_exact(got, case.plain(), case.want())
    assert "equally many rows" in RocmAiterMlaSparseBackend.ragged_reasons(asked)[0]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_whole_models(rocm: Install, name: str, tree: bool) -> None:
    """Under a budget that gives requests unequal numbers of rows."""
    latent = name == "deepseek_v3"
    backend = RocmAiterMlaBackend if latent else RocmAiterFaBackend
    model, prompts = plain_model(name, **CHANGES[name]), random_prompts(3)
    want = decoded(SpecEngine(paged_verifier(model, 16)), prompts)
    rocm("0.1.16", "gfx950", tiny=True, num_compute_units=8)
    outputs = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    drafter: Drafter = ScriptedDrafter(outputs, 6, [{3}, set(), {0, 2}])
    if tree:
        drafter = ScriptedTrees(outputs, [[0, 0, 1, 2, 2, 5]])
    engine = tiny_engine(
        paged_verifier(model, 16, backend=backend),
        drafter,
        num_draft_tokens=None,
        tree_nodes=6 if tree else None,
        verify_budget=2.5,
        cache_bytes=2**23,
    )
    assert engine.planner.shapes[0].budget == 2.5
    assert decoded(engine, prompts) == want
