"""ERNIE 4.5, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import Description
from verifiers.family import Family, Prediction, plain

_PREDICTION_NAMES = (
    (r"^model\.mtp_emb_norm\.0\.", "embedding_norm."),
    (r"^model\.mtp_hidden_norm\.0\.", "hidden_norm."),
    (r"^model\.mtp_linear_proj\.0\.", "projection."),
    (r"^model\.mtp_block\.0\.", "model.layers.0."),
)
"""As FastDeploy's `ernie4_5_mtp.py` reads them."""


def _moe(config: Any, common: Mapping[str, Any]) -> Description:
    routing = Routing(config.num_experts, config.num_experts_per_tok, biased=True)
    return Description(
        **common,
        names=((r"\.moe_statics\.", "."),),
        interleaved=True,
        routing=routing,
        wide_router=True,
    )


FAMILIES = {
    "ernie4_5": Family(describe=plain(interleaved=True)),
    "ernie4_5_moe": Family(
        describe=_moe,
        renamed=((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
        prediction=Prediction(_PREDICTION_NAMES, feed_forward="dense"),
    ),
}
