"""torch_ref against the definition of attention, and the choice of a backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, AttentionSpec, HeadShape
from specdec.attention.selector import refusals, select_backend
from specdec.attention.torch_ref import fa as torch_ref
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.errors import BackendError, InvalidInputError
from specdec.kv_cache import KVLayerSpec
from specdec.kv_cache.cache import Memory
from tests.helpers.attention_case import Case
from tests.helpers.pairs import pairs

BLOCK, HEADS, DIM = 4, 6, 8


def spec(**changes: object) -> AttentionSpec:
    """A small request to a backend."""
    values: dict[str, object] = {
        "device": torch.device("cpu"), "dtype": torch.float32, "num_heads": HEADS,
        "num_kv_heads": 2, "head_dim": DIM, "block_size": BLOCK,
    }  # fmt: skip
    return AttentionSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_kv_heads", "causal", "window", "extra", "kind"),
    pairs(
        [1, 2, 6],
        [True, False],
        [None, 1, 3, 100],
        ["", "sinks", "softcap", "both"],
        ["uniform", "single", "ragged", "grouped"],
    ),
)
def test_every_case_equals_the_definition(
    num_kv_heads: int,
    causal: bool,
    window: int | None,
    extra: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill, extension, causal and bidirectional blocks, windows, sinks, softcap and every group
    size, on scattered blocks; what nobody wrote does not matter.
    """
    if kind == "grouped":
        monkeypatch.setattr(torch_ref, "_size_class", lambda *_: (0,))
    monkeypatch.setattr(Memory, "zeros", lambda memory, shape, dtype: torch.randn(shape))
    widths = {"uniform": [3, 3, 3], "single": [1, 1, 1]}.get(kind, [7, 1, 4])
    asked, uniform = spec(num_kv_heads=num_kv_heads), len({*widths}) == 1
    case = Case(asked, [9, 5, 12], widths, uniform=uniform, causal=causal)
    how: dict[str, Any] = {"scale": 0.3, "window": window}
    how["sinks"] = torch.randn(HEADS) if extra in ("sinks", "both") else None
    how["softcap"] = 0.7 if extra in ("softcap", "both") else None
    case.check(case.attend(TorchRefBackend(asked), **how), **how)


def test_backends_are_chosen_and_refused_by_reason() -> None:
    """An unknown name lists the known ones; a refusal gives every reason at once; auto takes the
    first without one.
    """
    assert select_backend("auto", spec()).name == "torch_ref"
    with pytest.raises(
        InvalidInputError,
        match=r"unknown attention backend 'torch_rf'; did you mean 'torch_ref'\? \(known:"
        r" .*torch_ref",
    ):
        select_backend("torch_rf", spec())
    bad = spec(dtype=torch.int8, num_kv_heads=4)
    assert len(refusals(bad)["torch_ref"]) == 2
    for name in ("torch_ref", "auto"):
        with pytest.raises(BackendError, match=r"int8.*6 query heads do not share 4 key heads"):
            select_backend(name, bad)


def test_a_backend_suits_layers_of_every_shape() -> None:
    """One object for each, by the same choice; what one of them lacks is said once, whether a
    backend is named or not.
    """
    full = HeadShape(8, 1, 32)
    wanted = spec(windows=frozenset({4}), further=((full, frozenset({None})),))
    first, second = select_backend("auto", wanted).each
    assert type(first) is type(second) and second.spec == spec(
        windows=frozenset({None}), **full._asdict()
    )
    assert first.spec.each == (spec(windows=frozenset({4})), second.spec) and len(second.each) == 1
    bad = spec(
        dtype=torch.int8,
        further=(
            (HeadShape(5, 2, 32), frozenset({None})),
            (HeadShape(6, 4, 1024), frozenset({None})),
        ),
    )
    reasons = refusals(bad)
    assert len(reasons["torch_ref"]) == 3  # the type once
    assert any("head size 1024" in reason for reason in reasons["triton_fa"])
    for name in ("torch_ref", "auto"):
        with pytest.raises(
            BackendError, match=r"int8.*5 query heads.*6 query heads do not share 4 key heads"
        ):
            select_backend(name, bad)


@pytest.mark.parametrize("width", [1, 2, 11, 12, 33])
def test_16_bit_tiles_on_a_cpu_are_never_narrow(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next test rests on, whatever the CPU: at least 4 rows in every tile of 32, and
    numbers of keys in steps.
    """
    shapes: list[tuple[int, int]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shapes.append((q.shape[2], k.shape[2]))
        return torch.empty_like(q)

    monkeypatch.setattr(torch_ref.F, "scaled_dot_product_attention", record)
    for dtype in (torch.bfloat16, torch.float32):
        backend = TorchRefBackend(spec(dtype=dtype, num_heads=6, num_kv_heads=2))
        cache = KVLayerSpec(2, DIM).allocate(64, BLOCK, dtype, torch.device("cpu"))
        rows = torch.randn(width, 6, DIM).to(dtype)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, width], dtype=torch.int32),
            seq_lens=torch.tensor([70], dtype=torch.int32),
            block_table=torch.arange(64, dtype=torch.int32)[None],
            slot_mapping=torch.arange(70 - width, 70),
            num_reqs=1,
            num_tokens=width,
            max_query_len=width,
            max_seq_len=70,
        )
        out = backend.run(rows, rows[:, :2], rows[:, :2], cache, backend.plan(metadata), scale=1.0)
        assert out.shape == rows.shape
    (padded, keys), (plain, few_keys) = shapes
    assert plain == 3 * width  # in float32 nothing is added
    assert few_keys == 72
    assert padded >= plain
    assert padded % 32 not in (1, 2, 3)
    assert keys == 128


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="another CPU picks other kernels",
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 2)])
def test_a_row_has_the_same_bits_alone_and_among_drafts(heads: int, kv_heads: int) -> None:
    """In bfloat16 on a CPU: catches tiles of fewer than 4 rows, which round in another order and
    make near-ties flip.
    """
    torch.manual_seed(0)
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, heads, kv_heads, 64, 16)
    backend = TorchRefBackend(spec)
    tokens = 200
    cache = KVLayerSpec(kv_heads, 64).allocate(20, 16, torch.bfloat16, torch.device("cpu"))
    query = torch.randn(tokens, heads, 64, dtype=torch.bfloat16) * 2
    key, value = (torch.randn(tokens, kv_heads, 64, dtype=torch.bfloat16) for _ in "kv")
    slots = torch.arange(tokens) + 16
    backend.write(cache, key, value, slots)

    def attend(start: int, width: int) -> torch.Tensor:
        rows = slice(start, start + width)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, width], dtype=torch.int32),
            seq_lens=torch.tensor([start + width], dtype=torch.int32),
            block_table=torch.arange(1, 20, dtype=torch.int32)[None],
            slot_mapping=slots[rows],
            num_reqs=1,
            num_tokens=width,
            max_query_len=width,
            max_seq_len=start + width,
        )
        return backend.run(
            query[rows], key[rows], value[rows], cache, backend.plan(metadata), scale=0.125
        )

    for width in (2, 4, 11, 16):
        for start in (130, 144, 170):
            together = attend(start, width)
            alone = torch.cat([attend(start + row, 1) for row in range(width)])
            assert torch.equal(together, alone), f"{width} rows from {start}"
