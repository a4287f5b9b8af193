"""What an engine says of itself, so that a run never mixes two kinds of machines."""

from __future__ import annotations

from typing import Any

from specdec.base.errors import SpecDecError
from specdec.session.decoder import SpecDecoder
from specdec.session.provenance import origin_of_run

_OF_ONE_RUN = ("command", "commit")
"""Entries that may differ from machine to machine and from run to run."""


def origin(decoder: SpecDecoder) -> dict[str, Any]:
    """Device, types, versions and sizes that outputs may depend on."""
    engine = decoder.engine
    every = origin_of_run(decoder.verifier, decoder.reader)
    found = {name: value for name, value in every.items() if name not in _OF_ONE_RUN}
    found["versions"].pop("lm_eval", None)  # scores on the driver alone
    return found | {
        "k": engine.k,
        "max_num_seqs": engine.config.max_num_seqs,
        "max_model_len": engine.max_model_len,
    }


SIZES = ("k", "max_num_seqs", "max_model_len")
"""Entries of an origin that the run itself decides; the rest is the machine's."""


def machine_of(origin: dict[str, Any]) -> dict[str, Any]:
    """An origin without what the run decides."""
    return {name: value for name, value in origin.items() if name not in SIZES}


def check_same(first: dict[str, Any], other: dict[str, Any], node: str) -> None:
    """Refuses an engine that is not in all of `first` like it.

    Raises:
        SpecDecError: it differs; the message names the first difference.

    >>> check_same({"dtype": "float32"}, {"dtype": "bfloat16"}, "10.0.0.7")
    Traceback (most recent call last):
    specdec.base.errors.SpecDecError: the engine on 10.0.0.7 has dtype 'bfloat16', and the run has \
'float32'; answers of both are not mixed, so use machines that are alike
    """
    for name, value in first.items():
        if other.get(name) != value:
            raise SpecDecError(
                f"the engine on {node} has {name} {other.get(name)!r}, and the run has {value!r};"
                " answers of both are not mixed, so use machines that are alike"
            )
