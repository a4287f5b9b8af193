"""Two processes decode as one under a verify budget: both verify the rows that rank 0 chooses."""

from pathlib import Path
from typing import Any

from specdec import EngineConfig, SpecDecoder
from specdec.parallel.executor import collective_rpc
from tests.evals.tiny import save_tiny
from tests.helpers import lockstep_parts as parts
from tests.specdec.parallel.test_lockstep import LOAD, PROMPTS, SAMPLED, again, written


def test_rank_0_shares_out(tmp_path: Path) -> None:
    """Though the other rank would verify other rows; else sums would be of different rows."""
    folder = save_tiny(tmp_path)
    one = SpecDecoder.from_pretrained(folder, **LOAD, engine=EngineConfig(max_num_seqs=2))
    two = SpecDecoder.from_pretrained(
        folder, **LOAD, tensor_parallel=2, engine=EngineConfig(max_num_seqs=2)
    )
    try:
        for sampling in ({}, SAMPLED):
            decoder = again(two, num_draft_tokens=7, verify_budget=1.3, seed=3)
            assert decoder.engine.k == "1.3 of 7"
            collective_rpc(two.verifier, parts.share_out_apart, decoder.engine)
            asked: dict[str, Any] = {"max_tokens": 14, **sampling}
            expected = again(one, num_draft_tokens=0, seed=3).generate(PROMPTS, **asked)
            got = decoder.generate(PROMPTS, **asked)
            assert written(got) == written(expected)
            assert len({count for one in got for count in one.stats.num_verified}) > 1
    finally:
        two.close()
