"""What is refused before a cluster is asked for anything."""

import pytest

from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from specdec.cluster.config import ClusterConfig
from specdec.cluster.rows import Row
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hello", "--engines", "2"], "add --ray"),
        (["generate", "hello", "--stream", "--ray"], "--stream looks at one engine"),
        (["generate", "hello", "--stream", "--out", "kept.jsonl"], "--out keeps whole answers"),
        (["bench", "show", "report.json", "--ray"], "--ray says nothing beside bench show"),
        (["generate", "hello", "--engines", "0", "--ray"], "engines is 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_engines_that_a_cluster_has_no_room_for_are_refused() -> None:
    """Ray would wait for them for ever."""
    with pytest.raises(InvalidInputError, match="3 engines need 6 GPUs and the cluster has 4"):
        ClusterConfig(engines=3, gpus_per_engine=2).placed(gpus=4, cpus=64, machines=1)
    with pytest.raises(InvalidInputError, match="1 engines need 1 CPU cores and the cluster has"):
        ClusterConfig().placed(gpus=0, cpus=0.5, machines=1)


def test_a_row_travels_with_its_grammar() -> None:
    for grammar in (None, Grammar.regex("a+"), Grammar.json_schema({"type": "null"})):
        row = Row(
            "k",
            "text",
            SamplingParams(max_tokens=3, stop=("a",), logit_bias=((5, 1.0),), grammar=grammar),
        )
        assert Row.from_json(row.to_json()) == row
