"""Logits of the first draft from every row, against public classes: transformers' `MtpModel`, and
`speculators` if it is there.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from drafters.load import load_drafter
from drafters.mtp.network import PredictionNetwork
from drafters.sequential.drafter import SequentialDrafter
from drafters.sequential.network import Rows
from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache import PagedKVCache
from specdec.model.core import Verifier
from tests.drafters.mtp.test_layers import TOLERANCE, case
from tests.helpers.speculators_reference import speculators
from tests.helpers.tiny_configs import WINDOW
from tests.helpers.tiny_predictions import (
    APPENDED,
    CASES,
    SPECULATORS,
    Reference,
    reference,
    write_target,
)
from verifiers.load import load_verifier

TEXT = [5, 9, 33, 7, 60, 21, 90, 4, 17, 55, 8, 41, 12, 77]
COUNT = len(TEXT) - 1


def ours(drafter: Any, hidden: Tensor) -> Tensor:
    """Logits [T - 1, V] of rows of `TEXT` with hidden states [T - 1, H]."""
    assert isinstance(drafter, SequentialDrafter) and isinstance(drafter.network, PredictionNetwork)
    network = drafter.network
    cache = PagedKVCache(
        network.kv_specs,
        num_blocks=8,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    table = torch.arange(1, 8, dtype=torch.int32)[None]
    metadata = AttentionMetadata.packed([COUNT], [COUNT], table, torch.arange(4, 4 + COUNT))
    rows = Rows(torch.tensor(TEXT[1:]), hidden, torch.arange(COUNT), metadata)
    return network.logits(network.forward(rows, cache.layers, None))


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() < TOLERANCE * expected.abs().max())


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "mellum"])
@torch.inference_mode()
def test_logits_are_those_of_transformers_own_class(name: str, tmp_path: Path) -> None:
    """It reads the same files, and finds the same hidden states in the same order."""
    if not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers has no MtpModel whose layers can be run alone")
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    assert COUNT > WINDOW
    _, _, drafter = case(name, tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    if CASES[name][0] is APPENDED:  # the class names the layer after those of the public models
        target._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{target.config.num_hidden_layers}\."
        ]
    theirs = MtpModel.from_pretrained(target)
    hidden = target.base_model(torch.tensor([TEXT[:-1]]), use_cache=False).last_hidden_state
    out = theirs.forward_layer(
        0,
        hidden,
        torch.arange(1, COUNT + 1)[None],
        MtpCache(config=target.config.get_mtp_config()),
        input_ids=torch.tensor([TEXT[1:]]),
    )
    assert close(ours(drafter, hidden[0]), theirs._project_to_logits(out)[0])


def speculators_config(ref: Reference) -> dict[str, Any]:
    """The config.json of a checkpoint in the layout of speculators."""
    return {
        "speculators_model_type": "mtp",
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": ref.target.config.to_dict(),
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def write_speculators(folder: Path, ref: Reference) -> Path:
    """Saves the layers alone, in that layout."""
    folder.mkdir()
    tensors = {
        SPECULATORS.name(name, 0): tensor.contiguous() for name, tensor in ref.tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(speculators_config(ref), default=str))
    return folder


@pytest.fixture(params=["qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def separate(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Reference, Verifier, Path]:
    """A target without layers of its own, and a checkpoint of them in the layout of speculators."""
    ref = reference(request.param)
    write_target(tmp_path / "target", ref, SPECULATORS, own=False)
    verifier, _ = load_verifier(
        tmp_path / "target", device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    return ref, verifier, write_speculators(tmp_path / "layers", ref)


@torch.inference_mode()
def test_the_layout_of_speculators_is_read(separate: tuple[Reference, Verifier, Path]) -> None:
    """Against transformers' own layers, also of a family without such layers in its files."""
    ref, verifier, folder = separate
    drafter = load_drafter(folder, verifier=verifier)
    hidden = ref.hidden(TEXT[:-1])
    assert close(ours(drafter, hidden)[-1:], ref.logits(TEXT, TEXT[:1]))


@torch.inference_mode()
def test_logits_are_those_of_speculators(separate: tuple[Reference, Verifier, Path]) -> None:
    """What its own class makes of the same tensors."""
    mtp = speculators("models.mtp")
    ref, verifier, folder = separate
    config = mtp.MTPSpeculatorConfig.model_validate(
        speculators_config(ref) | {"transformer_layer_config": ref.target.config}
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = mtp.MTPDraftModel(config).eval()
    own = {SPECULATORS.name(name, 0): tensor for name, tensor in ref.tensors().items()}
    left = model.load_state_dict(own, strict=False)
    assert not left.unexpected_keys and not any(
        name.startswith("mtp_layers") for name in left.missing_keys
    )
    model.embed_tokens.weight.copy_(ref.target.get_input_embeddings().weight)
    model.lm_head.weight.copy_(ref.target.get_output_embeddings().weight)
    hidden = ref.hidden(TEXT[:-1])
    padded = torch.cat([hidden, hidden[-1:]])[None]
    expected = model(torch.tensor([TEXT]), padded)[0][0][0]
    assert close(ours(load_drafter(folder, verifier=verifier), hidden)[: len(expected)], expected)
