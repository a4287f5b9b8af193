"""For how many public drafters the target would run on one GPU of 192 GB; every refusal says why.
And the page of types.
"""

from collections import Counter

import pytest
import transformers

from tests.checks import public_targets
from tests.checks.public_targets import Row, data, missing_types, rows
from tests.checks.targets_table import PAGE, page

GB = 10**9

ACCEPTED = {
    "Llama-3.1-8B-Instruct", "Mellum2-12B-A2.5B-Thinking", "Mistral-Small-4-119B",
    "Muse-Glimmer-30B", "Qwen3-14B", "Qwen3-30B-A3B", "Qwen3-4B", "Qwen3-8B", "Qwen3-Coder-30B-A3B",
    "Qwen3-Coder-Next", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.6-27B",
    "Qwen3.6-35B-A3B", "Qwen3.8-27B", "gpt-oss-120b", "gpt-oss-20b",
}  # fmt: skip
"""Targets of the DFlash family's drafters that fit a GPU of 192 GB and are run."""

REFUSED = {
    "DeepSeek-V4-Flash": "compressed_sparse_attention",
    "Kimi-K3": "no model of type 'kimi_k3'",
    "LFM2.5-8B-A1B": "layers of type conv",
    "Nemotron-3.5-Lightning-30B-A3B": "recurrent state",
    "Qwen3.5-122B-A10B": "its weights need 2 GPUs of 192 GB",
    "Qwen3.5-397B-A17B": "its weights need 5 GPUs of 192 GB",
}


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows(192 * GB)


def test_rows() -> None:
    """All of the list: 90 of the DFlash family, 55 of EAGLE's, 46 of multi-token prediction; each
    names a target that is there.
    """
    assert (len(data()["drafters"]), len(data()["others"])) == (90, 55 + 46)
    assert {row["target"] for row in data()["drafters"] + data()["others"]} == set(
        data()["targets"]
    )


def test_accepted(found: list[Row]) -> None:
    """51 of 90."""
    accepted = [row for row in found if row.needs.would_run]
    assert {row.target for row in accepted} >= ACCEPTED
    assert len(accepted) >= 51
    assert all(
        row.needs.gpus == 1 and row.needs.attention and row.needs.token_bytes for row in accepted
    )


def test_every_refusal_has_a_reason(found: list[Row]) -> None:
    refused = {row.target: "; ".join(row.needs.missing) for row in found if not row.needs.would_run}
    assert all(refused.values())
    for target, phrase in REFUSED.items():
        if target in refused:  # a family that is new here
            assert phrase in refused[target]


def test_the_size_counts() -> None:
    """On smaller GPUs fewer fit: not the 141 GB of Llama 3.3 70B, nor 160 GB."""
    smaller = {row.target for row in rows(141 * GB) if row.needs.would_run}
    assert "Qwen3.5-27B" in smaller and "Qwen3-Coder-Next" not in smaller
    assert len(rows(192 * GB, everything=True)) == 191


def test_what_a_family_would_add(found: list[Row]) -> None:
    """Rows whose targets fit one GPU and are refused for what they are, by type."""
    counts = missing_types(found)
    assert (
        counts["nemotron_h"] in (0, 2)
        and "qwen3_moe" not in counts
        and "qwen3_5_moe_text" not in counts
    )
    assert sum(counts.values()) <= 90 - len(ACCEPTED)


def test_command(capsys: pytest.CaptureFixture[str], found: list[Row]) -> None:
    """The count, every target once, and nothing that is in neither half."""
    assert public_targets.main([]) == 0
    out = capsys.readouterr().out
    accepted = sum(row.needs.would_run for row in found)
    assert out.startswith(
        f"{accepted} of 90 drafters have a target that would run on one GPU of 192 GB\n"
    )
    head, _, tail = out.partition("\nwhat each model type")
    counts = Counter(row.target for row in found)
    for target, count in counts.items():
        assert head.count(f"  {count:>2}  {target} ") == 1
    assert "deepseek_v4" in tail


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.checks.targets_table --write` writes it; another transformers has other
    types.
    """
    text = PAGE.read_text()
    if f"Transformers {transformers.__version__}." not in text:
        pytest.skip("the page was made with another version of transformers")
    assert page() == text
