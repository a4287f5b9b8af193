"""The self-check of every kernel passes it as it is, and notices when it is off by little."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.device.deviation import Deviation
from specdec.layers.experts import experts
from specdec.layers.ops import fused
from specdec.layers.packed import check as packed_check
from specdec.layers.recurrence import check as recurrence_check
from specdec.sampling import argmax, sampler
from specdec.sampling.trees import candidates, trees
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.kernels import triton_argmax, triton_norm, triton_rope  # noqa: E402
from specdec.layers import triton_linear  # noqa: E402
from specdec.layers.experts import triton_experts, triton_router  # noqa: E402
from specdec.layers.ops import (  # noqa: E402
    triton_activation,
    triton_embedding,
    triton_gated_norm,
    triton_grouped_convolution,
)
from specdec.layers.packed import triton_packed  # noqa: E402
from specdec.layers.recurrence import triton_recurrence, triton_short_convolution  # noqa: E402
from specdec.sampling import triton_sampler  # noqa: E402
from specdec.sampling.trees import triton_candidates, triton_trees  # noqa: E402


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose first tensor is a little off."""

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        first = result if isinstance(result, Tensor) else result[0]
        first += 1 if first.dtype == torch.int64 else 0.01
        return result

    return call


def test_checks_notice_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long checks are taken by their parts, up to the first that notices, and prompts by chunks
    from nine rows on, for the interpreter takes its time.
    """
    monkeypatch.setattr(triton_recurrence, "MAX_SERIAL", 8)
    half = DEVICE, torch.float16
    checks: dict[str, tuple[Callable[[], Iterable[Deviation]], list[tuple[Any, str]]]] = {
        "argmax": (lambda: [argmax.check_argmax(DEVICE)], [(triton_argmax, "argmax")]),
        "sampler": (
            lambda: [sampler.check_sampler(DEVICE)],
            [(triton_sampler, "sample"), (triton_sampler, "min_kept")],
        ),
        "candidates": (
            lambda: [candidates.check_candidates(DEVICE)],
            [(triton_candidates, "candidates")],
        ),
        "trees": (
            lambda: [trees.check_trees(DEVICE)],
            [(triton_trees, "best_first"), (triton_trees, "walk")],
        ),
        "embedding": (lambda: [fused.check_embedding(*half)], [(triton_embedding, "embed")]),
        "few_rows": (lambda: [fused.check_few_rows(*half)], [(triton_linear, "few_rows")]),
        "packed products": (
            lambda: (
                one
                for code in ("e4m3", "int4")
                for one in packed_check._product_deviations(
                    packed_check._weight(code, (80, 192), torch.float16),
                    DEVICE,
                )
            ),
            [
                (triton_packed, "product"),
                (triton_packed, "few_rows"),
                (triton_packed, "dequantized"),
            ],
        ),
        "packed blocks": (
            lambda: packed_check._product_deviations(
                packed_check.random_blocks("Q5_K", (80, 512), torch.float16).packed(),
                DEVICE,
            ),
            [
                (triton_packed, "product"),
                (triton_packed, "few_rows"),
                (triton_packed, "dequantized"),
            ],
        ),
        "packed experts": (
            lambda: packed_check._expert_deviations(*half),
            [(triton_experts, "experts")],
        ),
        "experts": (lambda: experts._expert_deviations(*half), [(triton_experts, "experts")]),
        "grouped_convolution": (
            lambda: [fused.check_grouped_convolution(*half)],
            [(triton_grouped_convolution, "mix_rows")],
        ),
        "routers": (lambda: experts._routing_deviations(DEVICE), [(triton_router, "route")]),
        "recurrence": (
            lambda: islice(recurrence_check._recurrence_deviations(*half), 4),
            [(triton_recurrence, "recur")],
        ),
        "short convolutions": (
            lambda: recurrence_check._convolution_deviations(*half),
            [(triton_short_convolution, "convolve")],
        ),
        "gates of recurrences": (
            lambda: recurrence_check._gate_deviations(*half),
            [(triton_gated_norm, "gated_norm"), (triton_gated_norm, "sigmoid_gate")],
        ),
        "fused_layers": (
            lambda: [fused.check_fused_layers(*half)],
            [
                (triton_norm, "rms_norm"),
                (triton_norm, "add_rms_norm"),
                (triton_activation, "gated"),
                (triton_rope, "rope_store"),
                (triton_rope, "rotated_rows"),
            ],
        ),
    }
    for measure, homes in checks.values():
        assert all(right.error <= right.bound for right in measure())
        for module, attribute in homes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, attribute, wrong(getattr(module, attribute)))
                assert any(off.error > off.bound for off in measure()), attribute
