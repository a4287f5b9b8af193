"""Rows of draft trees on AITER's backends, on the emulation: right, nothing waits, and what is not
served is refused by name.
"""

from typing import Any

import pytest
import torch

from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerSpec
from specdec.base.blocks import MAX_NODES
from specdec.engine.engine import SpecEngine
from tests.helpers import latent_case
from tests.helpers.attention_case import Case, spec
from tests.helpers.bounds import assert_as_exact
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.rocm import Install
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from tests.helpers.trees import random_trees
from tests.specdec.attention.aiter.test_generation import CHANGES

E4M3 = torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("drafts", "shape", "sinks", "machine"),
    [
        (7, {}, False, {}),
        (16, {"num_heads": 9, "num_kv_heads": 3}, True, {"version": "0.1.16"}),
        (
            MAX_NODES,
            {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32},
            False,
            {"architecture": "gfx1100"},
        ),
        (7, {}, True, {"architecture": "gfx950"}),
        (12, {"cache_dtype": E4M3}, True, {}),
        (5, {"cache_dtype": E4M3, "num_kv_heads": 4}, False, {}),
    ],
)
def test_ordinary_heads(
    rocm: Install, drafts: int, shape: dict[str, Any], sinks: bool, machine: dict[str, Any]
) -> None:
    """Both tiers and caches; contexts of all lengths, none and less than the rows too; the host
    never waits.
    """
    calls = rocm(tiny=True, **machine).calls
    asked = spec(dtype=torch.float32, **shape)
    assert RocmAiterFaBackend.tree_reasons(asked) == []
    lengths = [drafts + 1 + context for context in (40, 0, 3, 77)]
    case = Case(asked, lengths, [drafts + 1] * 4, uniform=True, trees=random_trees(4, drafts))
    how: dict[str, Any] = {"scale": 0.2, "sinks": torch.randn(asked.num_heads) if sinks else None}
    attention, cache = RocmAiterFaBackend(asked), case.cache()
    attention.write(cache, case.old["key"], case.old["value"], case.old_slots)
    with no_host_sync():
        plan = attention.plan(case.metadata)
        for _ in range(2):  # a plan serves every layer
            got = attention.run(case.query, cache=cache, plan=plan, **case.new, **how)
    case.check(got, **how)
    assert [call.name for call in calls].count("flash_attn_with_kvcache") == 2


def test_what_the_cache_rounds_is_rounded_among_rows_too(rocm: Install) -> None:
    """As rows of a chain read each other, so that both decode alike;
    the largest numbers saturate.
    """
    rocm(tiny=True)
    asked = spec(dtype=torch.float32, cache_dtype=E4M3)
    for trees in (random_trees(2, 4), []):
        case = Case(asked, [40, 9], [5, 5], uniform=True, trees=trees)
        case.new = {name: torch.randn_like(rows) for name, rows in case.new.items()}
        case.new["value"][0, 0] *= 400
        got = case.attend(RocmAiterFaBackend(asked), scale=0.2)
        case.new = {name: rows.clamp(-240, 240).to(E4M3).float() for name, rows in case.new.items()}
        case.check(got, scale=0.2)


@pytest.mark.parametrize(
    ("drafts", "changes", "machine"),
    [
        (5, {}, {}),
        (16, {"num_heads": 24}, {"version": "0.1.15"}),
        (MAX_NODES, {"num_heads": 2}, {"architecture": "gfx950"}),
        (7, {"cache_dtype": E4M3}, {}),
    ],
)
def test_latent_heads(
    rocm: Install,
    drafts: int,
    changes: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    """Each row lists the context and what is above it; plans of one size share their memory."""
    rocm(tiny=True, num_compute_units=8, **machine)
    asked = latent_case.tiny(**changes)
    assert RocmAiterMlaBackend.tree_reasons(asked) == []
    lengths = [drafts + 1 + context for context in (40, 0, 3, 33)]
    case = latent_case.Case(
        asked, lengths, [drafts + 1] * 4, uniform=True, trees=random_trees(4, drafts)
    )
    backend = RocmAiterMlaBackend(asked)
    with no_host_sync():
        got = case.attend(backend, layers=2)
    assert_as_exact(got, case.plain(), case.want())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_tokens_behind_accepted_paths(rocm: Install, name: str) -> None:
    """Whole models on trees of which every path is accepted in turn: what they leave in the cache
    is read by the steps after.
    """
    model, backend = (
        plain_model(name, **CHANGES[name]),
        RocmAiterMlaBackend if name == "deepseek_v3" else RocmAiterFaBackend,
    )
    prompts = random_prompts(3)
    want = decoded(SpecEngine(paged_verifier(model, 16)), prompts)
    rocm("0.1.16", "gfx950", tiny=True, num_compute_units=8)
    drafter = ScriptedTrees(
        {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)},
        [[0, 0, 1, 2, 2, 5]],
    )
    assert (
        decoded(
            tiny_engine(
                paged_verifier(model, 16, backend=backend), drafter, tree_nodes=6, cache_bytes=2**23
            ),
            prompts,
        )
        == want
    )


def decoded(engine: SpecEngine, prompts: list[list[int]]) -> list[list[int]]:
    return run_all(engine, prompts, max_tokens=16, ignore_eos=True)


def test_refusals(rocm: Install) -> None:
    """Every reason at once; none of them stands against chains."""
    rocm("0.1.15")
    asked = spec(windows=frozenset({None, 9}), softcap=3.0)
    reasons = RocmAiterFaBackend.tree_reasons(asked)
    assert [reason.split(" (")[0] for reason in reasons] == [
        "they need amd-aiter 0.1.16",
        "windows",
        "a softcap",
    ]
    assert RocmAiterFaBackend.unsupported_reasons(asked) == []
    assert RocmAiterFaShuffleBackend.tree_reasons(asked)[3].startswith("the shuffled layout")
    sparse = latent_case.spec(indexer=IndexerSpec(64, 128, 2048))
    assert "indexer" in RocmAiterMlaSparseBackend.tree_reasons(sparse)[0]
