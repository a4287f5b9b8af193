"""What sparse latent attention on AITER refuses, what `auto` chooses, and what its caches take."""

from functools import partial
from typing import Any

import pytest
import torch

from specdec.attention.aiter.latent import latents, mla_indexer
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerSpec
from specdec.attention.selector import select_backend
from specdec.base.errors import BackendError, CapacityError
from specdec.kernels import aiter
from tests.helpers.rocm import FP8, Install
from tests.helpers.sparse_case import REAL, Case, spec


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """In float32, on small latents, unless told otherwise."""
    return partial(rocm, tiny=True)


@pytest.mark.parametrize(
    ("version", "architecture", "changes", "reasons"),
    [
        ("0.1.15", "gfx950", {}, []),
        ("0.1.20", "gfx942", {"cache_dtype": FP8["gfx942"]}, []),
        ("0.1.20", "gfx942", {"num_heads": 3}, []),
        ("0.1.20", "gfx90a", {}, ["architecture gfx90a"]),
        ("0.1.20", "gfx942", {"indexer": None}, ["rocm_aiter_mla serves those"]),
        ("0.1.20", "gfx950", {"cache_dtype": FP8["gfx942"]}, ["computes with torch.float8_e4m3fn"]),
        ("0.1.20", "gfx942", {"non_causal": True, "num_heads": 130}, ["130 heads", "non-causal"]),
        (
            "0.1.20",
            "gfx942",
            {
                "dtype": torch.float16, "block_size": 4, "kv_lora_rank": 256,
                "indexer": IndexerSpec(24, 64, 6),
            },
            [
                "float16", "latents of 256 and 64", "blocks of 4", "index keys of 64",
                "24 index heads",
            ],
        ),
    ],
)  # fmt: skip
def test_refusals(
    rocm: Install, version: str, architecture: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    """Every limit is said before work starts, and all at once."""
    rocm(version=version, architecture=architecture, tiny=False)
    found = RocmAiterMlaSparseBackend.unsupported_reasons(spec(**{**REAL, **changes}))
    assert len(found) == len(reasons), found
    for want, got in zip(reasons, found, strict=True):
        assert want in got


def test_missing_aiter_is_said_once(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both families of functions lack the same; a version that has one of them only is refused for
    the other.
    """
    rocm(tiny=False)
    monkeypatch.setattr(aiter, "installed_version", lambda: "0.1.14")
    assert RocmAiterMlaSparseBackend.unsupported_reasons(spec(**REAL)) == [
        "amd-aiter 0.1.14 is older than 0.1.15: install a newer one"
    ]
    monkeypatch.undo()
    rocm(tiny=False)
    monkeypatch.delattr("aiter.ops.triton.attention.fp8_mqa_logits.fp8_mqa_logits")
    found = RocmAiterMlaSparseBackend.unsupported_reasons(spec(**REAL))
    assert len(found) == 1 and "has no fp8_mqa_logits" in found[0]


def test_selection_of_the_backend(rocm: Install) -> None:
    """`auto` takes it for models with an indexer only;
    its drafters get AITER's ordinary attention.
    """
    with pytest.raises(BackendError, match="cpu is not a ROCm device"):
        select_backend("rocm_aiter_mla_sparse", spec())
    rocm(tiny=False)
    chosen = select_backend("auto", spec(**REAL))
    assert chosen.name == "rocm_aiter_mla_sparse" and chosen.mha_backend.name == "rocm_aiter_fa"
    assert select_backend("auto", spec(**{**REAL, "indexer": None})).name != "rocm_aiter_mla_sparse"


def test_a_cache_beyond_the_kernels_reach_is_refused(
    rocm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots whose offset overflows 32 bits would read other tokens."""
    rocm()
    monkeypatch.setattr(latents, "MAX_ADDRESS", 48 * 16 * 3)
    case = Case(spec(), [40])
    assert RocmAiterMlaSparseBackend(case.spec).cache_spec.max_tokens == 48
    with pytest.raises(
        CapacityError,
        match="has 64 tokens and AITER's latent kernels address 48: give it less memory",
    ):
        case.history(RocmAiterMlaSparseBackend(case.spec), [((40,), True)])


def test_eight_bit_latents_saturate(rocm: Install) -> None:
    """AITER's writer converts without saturating, and the emulation raises when it has to."""
    rocm(tiny=False)
    asked = spec(**REAL, cache_dtype=FP8["gfx942"])
    case = Case(asked, [3])
    for rows in case._made[0][0]:
        rows.compressed.fill_(1e4)
    backend = RocmAiterMlaSparseBackend(asked)
    layers = case.layers(backend)
    _, outputs = case.forward(backend, layers, [0], [3], known=True)
    assert layers[0].cache.latent.float().max() == 240 and outputs[0].isfinite().all()


def test_index_cache_bytes(rocm: Install) -> None:
    """A key in 8 bits and its scale, beside the latent."""
    rocm(tiny=False)
    backend = RocmAiterMlaSparseBackend(spec(**REAL))
    assert backend.cache_spec.index_bytes == 128 + mla_indexer.SCALE_BYTES
    assert backend.cache_spec.bytes_per_token(torch.bfloat16) == 1152 + 132
