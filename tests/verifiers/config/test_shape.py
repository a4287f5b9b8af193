"""What layers are, as their config says it: heads of their own, caches of their own or of another
layer.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specdec.attention.backend import AttentionMetadata, HeadShape
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.kv_cache import KVLayerSpec, PagedKVCache, SharedLayerSpec
from specdec.model.core import Verifier
from tests.helpers.tiny_configs import CONFIGS, WINDOW
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.verifiers.test_hf import BLOCK, PackedRun
from verifiers.config.shape import attention_spec, cache_layers, head_shape, layer_kinds
from verifiers.needs import needs_of

CPU = torch.device("cpu")
SLIDING, FULL = HeadShape(4, 2, 16), HeadShape(4, 1, 24)


def spec_of(config: Any) -> Any:
    return attention_spec(config, device=CPU, dtype=torch.float32, block_size=BLOCK)


def test_layers_differ_in_their_heads() -> None:
    """The first layer's shape leads; every shape has its own windows."""
    config = CONFIGS["gemma4"]()
    assert [head_shape(config, layer) for layer in range(4)] == [SLIDING, FULL] * 2
    spec = spec_of(config)
    assert (
        spec.shape == SLIDING
        and spec.windows == {WINDOW}
        and spec.further == ((FULL, frozenset({None})),)
    )
    assert layer_kinds(config, TorchRefBackend(spec)) == [0, 1, 0, 1] and not spec.reads_others
    laguna = CONFIGS["laguna"]()
    assert [head_shape(laguna, layer).num_heads for layer in range(4)] == [6, 4, 6, 4]


def test_key_heads_of_types_that_know_none_are_as_many_as_heads() -> None:
    """Whatever a file says."""
    for model_type in ("gpt2", "gpt_neox", "opt"):
        shape = head_shape(AutoConfig.for_model(model_type, num_key_value_heads=2), 0)
        assert shape.num_kv_heads == shape.num_heads > 2


def test_layers_of_one_shape_have_one_backend() -> None:
    """And nothing beside it, with whatever windows."""
    spec = spec_of(CONFIGS["gemma3"]())
    assert (
        spec.further == ()
        and spec.windows == {WINDOW, None}
        and len(TorchRefBackend(spec).each) == 1
    )


@pytest.mark.parametrize(("same", "kv_heads"), [(True, 1), (False, 2)])
def test_entries_of_older_releases_are_read(same: bool, kv_heads: int) -> None:
    """Releases of transformers without a config per layer; key heads of their own go with keys that
    are values, too.
    """
    config: Any = SimpleNamespace(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=24,
        num_global_key_value_heads=1,
        attention_k_eq_v=same,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert [head_shape(config, layer) for layer in (0, 1)] == [SLIDING, HeadShape(4, kv_heads, 24)]


def test_the_last_layers_read_what_others_have_stored() -> None:
    """The last of their kind before them; nothing is allocated for them."""
    config = CONFIGS["gemma4_shared"]()
    assert cache_layers(config) == [0, 1, 2, 1, 2, 1] and spec_of(config).reads_others
    verifier = paged_verifier(plain_model("gemma4_shared"), BLOCK)
    sliding, full = KVLayerSpec(2, 16), KVLayerSpec(2, 24)
    assert list(verifier.kv_specs) == [
        sliding, full, sliding, SharedLayerSpec(1), SharedLayerSpec(2), SharedLayerSpec(1),
    ]  # fmt: skip
    cache = PagedKVCache(
        verifier.kv_specs, num_blocks=3, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    assert (
        cache.layers[3] is cache.layers[5] is cache.layers[1]
        and cache.layers[4] is cache.layers[2] is not cache.layers[0]
    )


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("name", "plans"), [("gemma4", 2), ("gemma3", 1)])
def test_a_forward_is_planned_once_for_each_shape(
    name: str, plans: int, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each layer."""
    verifier: Verifier = paged_verifier(plain_model(name), BLOCK, fuse=fuse)
    planned = []
    plan = TorchRefBackend.plan

    def counted(self: TorchRefBackend, metadata: AttentionMetadata) -> Any:
        planned.append(self.spec.shape)
        return plan(self, metadata)

    monkeypatch.setattr(TorchRefBackend, "plan", counted)
    PackedRun(verifier, [[3, 5, 7]]).forward([(0, 0, 3)])
    assert len(planned) == len(set(planned)) == plans


def test_what_a_user_is_told() -> None:
    """Bytes of what is stored, in words how much of it others read."""
    config = CONFIGS["gemma4_shared"]().to_dict()
    needs = needs_of(config, name="tiny", device=CPU, dtype=torch.float32, gpu_bytes=10**9)
    assert needs.would_run and needs.runs_on == "our own layers"
    assert needs.caches == (
        f"keys and values of 3 layers, 2 of them with a window of {WINDOW}, which 3 more read",
    )
    assert needs.token_bytes == 2 * 2 * (16 + 24 + 16) * 4
