"""Where a figure comes from."""

import pytest

from evals.report.compare import differences
from evals.report.provenance import provenance
from tests.evals.tiny import tiny_decoder


def test_the_types_that_were_computed_in_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of the cache apart from that of prompts, which latent attention may round; a
    comparison names what differs.
    """
    decoder = tiny_decoder()
    found = provenance(decoder, ["none", "ngram"])
    assert (found["dtype"], found["kv_dtype"], found["prefill_dtype"], found["drafters"]) == (
        "float32",
        "float32",
        "float32",
        {},
    )
    rounded = found | {"prefill_dtype": "float8_e4m3fn"}
    one, other = (
        {"provenance": p, "settings": {}, "rows": [], "complete": True} for p in (found, rounded)
    )
    assert differences(one, other) == ["prefill_dtype differs: float32 / float8_e4m3fn"]
    del found["prefill_dtype"]  # as in older reports
    assert differences(one, other) == ["prefill_dtype may differ: not said / float8_e4m3fn"]
    del rounded["prefill_dtype"]
    assert differences(one, other) == []
