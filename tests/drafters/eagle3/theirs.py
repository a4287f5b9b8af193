"""Logits that the public `speculators` package has for the drafts of an EAGLE-3 or P-EAGLE head."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.speculators_reference import speculators

Logits = Callable[[list[int], Tensor, list[int]], Tensor]
"""Logits [k, V'] of a text up to the anchor, the features of all before it, and k drafts."""

_CLASSES = {"eagle3": "Eagle3", "peagle": "PEagle"}


class _Enough(Exception):
    pass


def their_head(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Any, list[Tensor]]:
    """The package's class with these weights, and the list of its head's logits."""
    kind = raw["speculators_model_type"]
    core = speculators(f"models.{kind}.core")
    left_out = ("architectures", "speculators_config")
    given = {key: value for key, value in raw.items() if key not in left_out}
    config = getattr(core, f"{_CLASSES[kind]}SpeculatorConfig")(**given)
    config.transformer_layer_config._attn_implementation = "eager"
    model = getattr(core, f"{_CLASSES[kind]}DraftModel")(config).eval()
    found = model.load_state_dict(tensors, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {
        "t2d",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
        "d2t",
    }
    calls: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, logits: calls.append(logits))
    return model, calls


def unrolled(model: Any, calls: list[Tensor]) -> Logits:
    """Those of the steps that training unrolls, of an EAGLE-3 head."""

    def logits(text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """Of all positions it unrolls; rows behind the anchor's are for drafts' tokens."""
        calls.clear()
        padded = F.pad(features, (0, 0, 0, len(drafts) - 1))[None]
        tokens = torch.tensor([[*text[1:], *drafts[:-1]]])
        model(padded, tokens, torch.zeros_like(tokens), ttt_steps=len(drafts))
        return torch.stack([rows[0, len(text) - 2] for rows in calls])

    return logits


def masked(model: Any, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Those of the masks, in one forward, of a P-EAGLE head."""

    def enough(*args: Any) -> None:
        raise _Enough

    model.lm_head.register_forward_hook(enough)

    def logits(text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """A rollout from the anchor's pair, beside all pairs."""
        calls.clear()
        pairs, count = len(text) - 1, len(drafts) - 1
        anchors = torch.tensor([*range(pairs), *[pairs - 1] * count])
        depths = torch.tensor([*[0] * pairs, *range(1, count + 1)])
        core = speculators("models.peagle.core")
        monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **kinds: (anchors, depths))
        tokens = torch.tensor([[*text[1:], *[0] * count]])
        padded = F.pad(features, (0, 0, 0, count))[None]
        with pytest.raises(_Enough):
            model(padded, tokens, torch.zeros_like(tokens), verifier_last_hidden_states=padded)
        return calls[0][0, pairs - 1 :]

    return logits
