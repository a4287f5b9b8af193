"""How a verify budget was spent, by request and slot, as a server tells it: by its answers, its
metrics and the picture of a step.
"""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi comes with the extra serve")

from drafters.ngram import NGramDrafter
from specdec.base.config import EngineConfig
from specdec.serve.state.status import PAGE
from specdec.session.decoder import SpecDecoder
from specdec.session.link import hub
from tests.evals.tiny import tiny_decoder
from tests.helpers.live_server import live_server
from tests.specdec.serve.state.test_status import complete, get

BUDGET = 1.5


def decoder() -> SpecDecoder:
    plain = tiny_decoder()
    config = EngineConfig(
        num_draft_tokens=4, verify_budget=BUDGET, max_num_seqs=2, max_model_len=512
    )
    return SpecDecoder(plain.verifier, plain.tokenizer, NGramDrafter(max_draft_tokens=4), config)


def test_all_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs of one prompt are decoded together; each answer says what it was given."""
    monkeypatch.setattr(hub, "ROWS_SECONDS", 0.0)
    with live_server(decoder(), drafter="ngram") as server:
        answer = complete(server, "one two one two one two", n=2, seed=3, max_tokens=60)
        picture = json.loads(get(server, "/status"))["rows"]
        metrics = get(server, "/metrics").decode()
        last = server.decoder.engine.last_step
    assert last is not None and picture["shape"] == str(last.shape)
    assert picture["spent"] == [list(one) for one in last.spent()]
    told: Counter[int] = Counter()
    for choice in answer["choices"]:
        info = choice["meta_info"]
        told.update(dict(enumerate(info["spec_draft_histogram"])))
        assert sum(info["spec_draft_histogram"]) == info["spec_verify_ct"]
    assert sum(number * steps for number, steps in told.items()) > 0 < told[0]

    def metric(name: str) -> float:
        found = re.search(rf"^specdec:spec_decode_{name} ([\d.]+)$", metrics, re.MULTILINE)
        assert found, name
        return float(found[1])

    labels = 'engine="0",model_name="tiny"'
    for slot in range(max(told)):
        name = rf'num_draft_tokens_per_slot_total\{{{labels},slot="{slot}"\}}'
        assert metric(name) == sum(steps for number, steps in told.items() if number > slot)
    for bound in (0, 1, 3):
        name = rf'request_draft_tokens_bucket\{{{labels[:11]}le="{bound}",{labels[11:]}\}}'
        assert metric(name) == sum(steps for number, steps in told.items() if number <= bound)
    assert metric(rf"request_draft_tokens_sum\{{{labels}\}}") == sum(
        number * steps for number, steps in told.items()
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_the_picture(tmp_path: Path) -> None:
    """A line for each request: its anchor and what was accepted, then the rest."""
    (source,) = re.findall(r"^function showRows.*?^}", PAGE, re.MULTILINE | re.DOTALL)
    rows: dict[str, Any] = {"shape": "2 of 7", "spent": [[4, 3], [0, 0], [2, 0]]}
    program = f"""
    const made = {{}}, svg = {{ setAttribute: (name, value) => made[name] = value }};
    const at = () => svg, count = String, put = (id, text) => made.note = text;
    {source}
    showRows({json.dumps(rows)});
    console.log(JSON.stringify({{ ...made, drawn: svg.innerHTML }}));
    """
    (tmp_path / "page.js").write_text(program, encoding="utf-8")
    done = subprocess.run(
        ["node", str(tmp_path / "page.js")], capture_output=True, text=True, check=True
    )
    made = json.loads(done.stdout)
    found = re.findall(r'x="(\d+)" y="([\d.]+)" width="(\d+)" .*?var\(--(\w+)\)', made["drawn"])
    assert [(int(x), int(float(y)), int(width), color) for x, y, width, color in found] == [
        (0, 0, 4, "mark"),
        (4, 0, 1, "rule"),
        (0, 1, 1, "mark"),
        (0, 2, 1, "mark"),
        (1, 2, 2, "rule"),
    ]
    assert made["viewBox"] == "0 0 8 8"
    assert "blocks of 2 of 7: 6 drafts verified, 3 accepted" in made["note"]
