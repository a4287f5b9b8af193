"""Choosing experts: our formulas and AITER's kernels choose what transformers' routers choose."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.configuration_glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

import specdec.device.device
from specdec.base.errors import InvalidInputError
from specdec.layers.experts import router as ops_router
from specdec.layers.experts.router import Router, aiter_reasons, route
from specdec.layers.experts.routing import Routing
from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.bounds import Float64, assert_as_exact, in_float64
from tests.helpers.guards import no_host_sync
from verifiers.building import mixture
from verifiers.config.families import describe
from verifiers.description import Description
from verifiers.weights.weights import Weights

HIDDEN, EXPERTS = 12, 32
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
}
_SIGMOID: dict[str, Any] = {**_COMMON, "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}

ROUTER_KINDS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "v2_greedy": (DeepseekV2TopkRouter, lambda: _v2(topk_method="greedy")),
    "v2_groups": (
        DeepseekV2TopkRouter,
        lambda: _v2(topk_method="group_limited_greedy", n_group=8, topk_group=3),
    ),
    "v3": (DeepseekV3TopkRouter, lambda: DeepseekV3Config(**_SIGMOID)),
    "v3_ungrouped": (
        DeepseekV3TopkRouter,
        lambda: DeepseekV3Config(**{**_SIGMOID, "n_group": 1, "topk_group": 1}),
    ),
    "v32": (DeepseekV32TopkRouter, lambda: DeepseekV32Config(**_SIGMOID)),
    "glm4": (Glm4MoeTopkRouter, lambda: Glm4MoeConfig(**_SIGMOID)),
    "glm4_lite": (Glm4MoeLiteTopkRouter, lambda: Glm4MoeLiteConfig(**_SIGMOID)),
    "glm_dsa": (GlmMoeDsaTopkRouter, lambda: GlmMoeDsaConfig(**_SIGMOID)),
    "v3_not_normalized": (
        DeepseekV3TopkRouter,
        lambda: DeepseekV3Config(**_SIGMOID, norm_topk_prob=False),
    ),
    "v3_16_groups": (
        DeepseekV3TopkRouter,
        lambda: DeepseekV3Config(**{**_SIGMOID, "n_group": 16, "topk_group": 5}),
    ),
}
PLAIN = ("v3_not_normalized", "v3_16_groups")
"""What AITER's kernels do not have."""


def _v2(**changes: Any) -> DeepseekV2Config:
    return DeepseekV2Config(
        **{
            **_COMMON,
            "n_routed_experts": EXPERTS,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            **changes,
        }
    )


def hf_router(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A router of transformers with random weights and a bias that matters."""
    torch.manual_seed(0)
    make, config = ROUTER_KINDS[kind]
    router = make(config())
    router.weight.data = torch.randn(EXPERTS, HIDDEN).to(dtype)
    if hasattr(router, "e_score_correction_bias"):
        # all choices negative: masking with 0 would show
        router.e_score_correction_bias = torch.randn(EXPERTS) * 0.2 - 1.5
    return router


def description_of(kind: str) -> Description:
    """Our description of the family that a router is of."""
    description = describe(ROUTER_KINDS[kind][1]())
    assert description is not None
    return description


def our_router(kind: str, source: Any) -> Router:
    """What the decoder stack makes of a router of transformers."""
    names = ("weight", "e_score_correction_bias")
    tensors = {
        f"gate.{name}": getattr(source, name).detach().clone()
        for name in names
        if hasattr(source, name)
    }
    return mixture.router(Weights(tensors), description_of(kind))


def in_order(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Experts of every token in ascending order, and their weights."""
    order = ids.argsort(dim=-1)
    return ids.gather(-1, order), weights.gather(-1, order)


def check_equal(router: Any, hidden: Tensor, got: tuple[Tensor, Tensor]) -> None:
    """The same sets of experts as transformers, with weights as exact."""
    runs = got, router(hidden)[1:], in_float64(router, hidden.double())[1:]
    (ids, weights), (plain_ids, plain), (_, exact) = (
        in_order(ids, weights) for weights, ids in runs
    )
    assert ids.dtype == torch.int64 and ids.equal(plain_ids)
    assert_as_exact(weights, plain, exact)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    """Pretends a ROCm machine with AITER."""

    def setup(**options: Any) -> Machine:
        monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
        return install(monkeypatch, tmp_path, Machine(**options))

    return setup


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_formulas_equal_transformers(kind: str) -> None:
    """Group strength, masking, bias in the choice but not in the weights, normalization,
    scaling.
    """
    router, hidden = hf_router(kind), torch.randn(200, HIDDEN)
    logits = hidden @ router.weight.t()
    routing = description_of(kind).routing
    assert routing is not None
    check_equal(
        router, hidden, route(logits, routing, getattr(router, "e_score_correction_bias", None))
    )


_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 6}
_LOCAL: dict[str, Any] = {**_SIZES, "num_local_experts": EXPERTS}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "qwen3_moe": (
        "Qwen3MoeTopKRouter",
        "Qwen3MoeConfig",
        {**_SIZES, "num_experts": EXPERTS, "norm_topk_prob": True},
        Routing(EXPERTS, 6),
    ),
    "qwen2_moe": (
        "Qwen2MoeTopKRouter",
        "Qwen2MoeConfig",
        {**_SIZES, "num_experts": EXPERTS, "norm_topk_prob": False},
        Routing(EXPERTS, 6, renormalized=False),
    ),
    "mixtral": ("MixtralTopKRouter", "MixtralConfig", _LOCAL, Routing(EXPERTS, 6)),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig", _LOCAL, Routing(EXPERTS, 6)),
    "granitemoe": ("GraniteMoeTopKRouter", "GraniteMoeConfig", _LOCAL, Routing(EXPERTS, 6)),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Gate",
        "HunYuanMoEV1Config",
        {"hidden_size": HIDDEN, "moe_topk": 6, "num_experts": EXPERTS},
        Routing(EXPERTS, 6),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeTopKRouter",
        "Ernie4_5_MoeConfig",
        {"hidden_size": HIDDEN, "moe_k": 6, "moe_num_experts": EXPERTS},
        Routing(EXPERTS, 6, biased=True),
    ),
    "minimax_m2": (
        "MiniMaxM2TopKRouter",
        "MiniMaxM2Config",
        _LOCAL,
        Routing(EXPERTS, 6, scores="sigmoid", biased=True),
    ),
    "dots1": (
        "Dots1TopkRouter",
        "Dots1Config",
        {**_SIGMOID, "norm_topk_prob": True},
        Routing(
            EXPERTS, 6, scores="sigmoid", biased=True, num_groups=4, topk_groups=2, scaling=2.5
        ),
    ),
}
"""Folder, router and config of transformers, numbers of the config, and our description."""


def router_of(family: str) -> Any:
    """A router of transformers; skips where this version has none of that name."""
    name, config_name, numbers, _ = FAMILIES[family]
    home = f"transformers.models.{family}"
    config = getattr(import_module(f"{home}.configuration_{family}"), config_name)(**numbers)
    router = getattr(import_module(f"{home}.modeling_{family}"), name, None)
    if router is None:
        pytest.skip(f"this transformers has no {name}")
    return router(config, 0) if family == "hunyuan_v1_moe" else router(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_description_covers_every_family(family: str) -> None:
    """The same experts as transformers' module, with weights as exact; a bias of the gate joins the
    logits.
    """
    torch.manual_seed(0)
    router, routing, hidden = router_of(family), FAMILIES[family][-1], torch.randn(200, HIDDEN)
    for parameter in router.parameters():
        parameter.data = torch.randn_like(parameter)
    shift = (
        torch.randn(EXPERTS) * (0.02 if family == "ernie4_5_moe" else 0.2)
        if routing.biased
        else None
    )
    others: tuple[Tensor, ...] = ()
    if family == "minimax_m2":
        others = (shift,)  # type: ignore[assignment]
    elif family == "ernie4_5_moe":
        router.moe_statics.e_score_correction_bias.data = shift[None]  # type: ignore[index]
    elif shift is not None:
        router.e_score_correction_bias = shift
    logits = F.linear(
        hidden,
        (router.wg if family == "hunyuan_v1_moe" else router).weight,
        getattr(router, "bias", None),
    )
    theirs: Any = (
        router(hidden, *others),
        in_float64(router, hidden.double(), *(x.double() for x in others)),
    )
    # older Transformers name experts first
    if family == "granitemoe" and not theirs[0][0].is_floating_point():
        theirs = tuple((logits, weights, ids) for ids, weights, logits in theirs)
    runs = route(logits, routing, shift), theirs[0][1:], theirs[1][1:]
    (ids, weights), (plain_ids, plain), (exact_ids, right) = (
        in_order(ids, weights) for weights, ids in runs
    )
    assert ids.equal(plain_ids) and ids.equal(exact_ids)
    assert_as_exact(weights, plain, right)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(EXPERTS, 6),
        Routing(EXPERTS, 6, scores="sigmoid", biased=True),
        Routing(EXPERTS, 6, num_groups=4, topk_groups=2),
        Routing(EXPERTS, 6, scores="sigmoid", biased=True, num_groups=4, topk_groups=2),
    ],
)
def test_the_lower_of_equal_experts(routing: Routing) -> None:
    """Few different logits, so most choices and groups tie; highest first."""
    torch.manual_seed(0)
    logits = torch.randint(3, (300, EXPERTS)).float()
    weights, ids = route(logits, routing, torch.zeros(EXPERTS) if routing.biased else None)
    chosen = logits.gather(-1, ids)
    assert (chosen.diff(dim=-1) <= 0).all() and (weights.diff(dim=-1) <= 0).all()
    assert (ids.diff(dim=-1)[chosen.diff(dim=-1) == 0] > 0).all(), "equal ones in their order"
    for row, few in zip(logits, ids, strict=True):
        if routing.grouped:
            best = (
                row.unflatten(0, (4, -1)).topk(2 if routing.biased else 1).values.sum(-1).tolist()
            )
            groups = sorted(range(4), key=lambda group: (-best[group], group))[:2]
        else:
            groups = list(range(4))
        allowed = [expert for expert in range(EXPERTS) if expert // 8 in groups]
        assert few.tolist() == sorted(allowed, key=lambda expert: (-row[expert].item(), expert))[:6]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_groups": 5}, "32 experts do not divide into 5 groups"),
        (
            {"num_groups": 4, "topk_groups": 5},
            "5 of 4 groups of experts cannot be chosen; take 1 to 4",
        ),
        (
            {"num_groups": 8, "topk_groups": 1},
            "6 experts per token, of 4 that may be chosen; take 1 to 4",
        ),
        ({"num_groups": 32, "topk_groups": 8, "scores": "sigmoid"}, "take at most 16 groups"),
    ],
)
def test_numbers_that_do_not_go_together(numbers: dict[str, Any], message: str) -> None:
    """One line, with the way out."""
    with pytest.raises(InvalidInputError, match=message):
        Routing(EXPERTS, 6, **numbers)


@pytest.mark.parametrize("version", ["0.1.15", "0.1.20"])
@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_aiter_equals_transformers(rocm: Callable[..., Machine], kind: str, version: str) -> None:
    """AITER's kernels, where they have the case; otherwise plain torch;
    nothing waits either way.
    """
    machine = rocm(version=version, allow_float32=True)
    router, hidden = hf_router(kind), torch.randn(180, HIDDEN)
    ours = our_router(kind, router)
    machine.calls.clear()  # those of the self-check
    with no_host_sync():
        got = ours(hidden)
    check_equal(router, hidden, got)
    used = {"v2_greedy": "topk_softmax", "v2_groups": "grouped_topk"}.get(
        kind, "biased_grouped_topk"
    )
    assert machine.names() == (set() if kind in PLAIN else {used})


@pytest.mark.parametrize("kind", ["v2_groups", "v32"])
def test_d1_logits_and_bias_have_the_type_of_the_gate(
    rocm: Callable[..., Machine], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 all the way into the kernel, the bias cast once and not per call: a second cast
    would make a new tensor.
    """
    machine = rocm()
    ours = our_router(kind, hf_router(kind, torch.bfloat16))
    seen: list[tuple[Tensor, Tensor | None]] = []
    inner = ops_router.route_with_aiter

    def spied(
        ops: Any, logits: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        seen.append((logits, bias))
        return inner(ops, logits, routing, bias)

    monkeypatch.setattr(ops_router, "route_with_aiter", spied)
    for _ in range(2):
        weights, _ = ours(torch.randn(5, HIDDEN, dtype=torch.bfloat16))
        assert weights.dtype == torch.float32
    assert all(logits.dtype == torch.bfloat16 for logits, _ in seen)
    assert seen[0][1] is seen[1][1]
    if kind == "v32":
        assert seen[0][1] is not None and seen[0][1].dtype == torch.bfloat16
    assert machine.calls


@pytest.mark.parametrize("kind", ["v2_greedy", "v2_groups", "v3"])
def test_whatever_a_kernel_says_of_nan_is_an_expert(
    rocm: Callable[..., Machine], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is no number names none out of range: the look-up would end all requests."""
    rocm()
    ours = our_router(kind, hf_router(kind, torch.float32))
    assert ours.aiter is not None
    name = {"v2_greedy": "topk_softmax", "v2_groups": "grouped_topk"}.get(
        kind, "biased_grouped_topk"
    )
    kernel = getattr(ours.aiter, name)

    def lost(**arguments: Any) -> None:
        kernel(**arguments)
        ids = arguments["topk_ids" if "topk_ids" in arguments else "topk_indices"]
        ids[1], ids[2] = -1, 2**30

    object.__setattr__(ours.aiter, name, lost)
    hidden = torch.randn(3, HIDDEN)
    ids = ours(hidden)[1]
    assert ids.dtype == torch.int64 and ((ids >= 0) & (ids < EXPERTS)).all()
    object.__setattr__(ours.aiter, name, kernel)
    assert torch.equal(ours(hidden)[1][0], ids[0])


@pytest.mark.parametrize("kind", ["v2_greedy", "v2_groups", "v3"])
def test_bfloat16_kernels_equal_the_formulas(rocm: Callable[..., Machine], kind: str) -> None:
    """On the same bfloat16 logits and bias both choose the same, so only the type of the logits
    tells them apart.
    """
    rocm()
    ours = our_router(kind, hf_router(kind, torch.bfloat16))
    hidden = torch.randn(200, HIDDEN, dtype=torch.bfloat16)
    logits, (weights, ids) = ours.gate(hidden), ours(hidden)
    plain, plain_ids = route(logits, ours.routing, ours.bias)
    with Float64():
        exact, exact_ids = route(logits, ours.routing, ours.bias)
    choice = logits.float().sigmoid() + (0 if ours.bias is None else ours.bias.float())
    # equal choices may fall either way
    distinct = torch.tensor([len(row.unique()) == EXPERTS for row in choice])
    assert distinct.sum() > 20
    (ids, weights), (plain_ids, plain), (_, exact) = (
        in_order(ids, weights),
        in_order(plain_ids, plain),
        in_order(exact_ids, exact),
    )
    assert ids[distinct].equal(plain_ids[distinct])
    assert_as_exact(weights[distinct], plain[distinct], exact[distinct])


def test_what_aiter_lacks_is_said_once(
    rocm: Callable[..., Machine], caplog: pytest.LogCaptureFixture
) -> None:
    """On AMD GPUs only, and not for every layer."""
    mixture._say_once.cache_clear()
    caplog.set_level("INFO")
    assert our_router("v3", hf_router("v3")).aiter is None
    rocm()
    assert our_router("v3", hf_router("v3")).aiter is not None
    caplog.clear()  # of what the self-check says
    assert all(
        our_router("v3_16_groups", hf_router("v3_16_groups")).aiter is None for _ in range(2)
    )
    assert (
        len(caplog.records) == 1
        and "16 groups of experts (the kernels take 1, 2, 4, 8)" in caplog.text
    )


def test_reasons(rocm: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Device, architecture, AITER itself, groups and missing normalization."""
    device = torch.device("cpu")
    assert aiter_reasons(Routing(32, 4), device) == ["cpu is not a ROCm device"]
    rocm()
    biased = Routing(32, 4, scores="sigmoid", biased=True)
    assert aiter_reasons(Routing(32, 4), device) == aiter_reasons(biased, device) == []
    assert "not normalized" in aiter_reasons(replace(biased, renormalized=False), device)[0]
    assert aiter_reasons(Routing(32, 4, renormalized=False), device) == []
    assert aiter_reasons(Routing(32, 4, biased=True), device) == ["softmax scores with a bias"]
    assert aiter_reasons(Routing(32, 4, scores="sigmoid"), device) == [
        "sigmoid scores without a bias"
    ]
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx1100")
    monkeypatch.setattr(ops_router.aiter, "unavailable_reasons", lambda family: ["missing"])
    assert aiter_reasons(Routing(32, 4), device)[0].startswith(
        "architecture gfx1100"
    ) and "missing" in aiter_reasons(Routing(32, 4), device)


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_aiters_kernels_are_checked_first(
    rocm: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: torch.dtype,
) -> None:
    """Right ones pass; other experts, and other weights of the right ones, do not."""
    rocm(architecture=architecture)
    cpu = torch.device("cpu")
    error, bound = ops_router.check_router(cpu, dtype)
    assert error <= bound
    chosen = ops_router.route_with_aiter
    wrong = {
        "next": lambda weights, ids: (weights, (ids + 1) % 64),
        "scaled": lambda weights, ids: (weights * 1.01, ids),
        "swapped": lambda weights, ids: (weights.flip(-1), ids),
    }
    for change in wrong.values():
        monkeypatch.setattr(
            ops_router, "route_with_aiter", lambda *args, _c=change: _c(*chosen(*args))
        )
        error, bound = ops_router.check_router(cpu, dtype)
        assert error > bound
    for broken in ops_router.CHECKED:  # one kernel, or one way of calling it

        def one(*args: Any, _broken: Routing = broken) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = chosen(*args)
            return weights, (ids + 1) % 64 if args[2] == _broken else ids

        monkeypatch.setattr(ops_router, "route_with_aiter", one)
        error, bound = ops_router.check_router(cpu, dtype)
        assert error > bound


def test_a_failed_check_keeps_aiter_out(
    rocm: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer is routed in plain torch then, and by AITER where the check passes."""
    rocm()
    assert our_router("v3", hf_router("v3")).aiter is not None
    monkeypatch.setattr(ops_router.KERNEL, "runs_on", lambda device, dtype: False)
    assert our_router("v3", hf_router("v3")).aiter is None
