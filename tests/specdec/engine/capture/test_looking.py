"""Steps that are looked at for the kernels that they launch: one layer of a kind tells of all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from specdec.attention.triton import fa
from specdec.engine.capture import prefill_graphs
from specdec.engine.capture.capture import LaunchAlone
from specdec.engine.capture.graphs import ShapeGraphs, StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.capture.warmup import ready_shapes
from specdec.engine.engine import SpecEngine
from specdec.kernels.looking import Looking
from specdec.kernels.triton_compile import CompileAhead
from specdec.model.core import Drafter, Verifier
from specdec.parallel.group import Group
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.mtp.test_layers import case
from tests.helpers.engines import tiny_engine
from tests.helpers.recorder import Recorder
from tests.helpers.tiny_configs import LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash
from tests.specdec.engine.capture.test_left_out import all_kernels
from tests.specdec.kernels.test_compile_ahead import hopper

__all__ = ["all_kernels", "hopper"]

FAMILIES = (
    *("llama", "olmo2", "gemma3", "gpt_oss", "qwen2_moe", "llama4", "gemma4_shared"),
    *("qwen3_next", "nemotron_h", "zamba2", "lfm2", "deepseek_v3", "deepseek_v32", "kimi_linear"),
)


class Noting(CompileAhead):
    """Notes every form of every kernel, and compiles none."""

    def __init__(self, *, every_layer: bool) -> None:
        super().__init__(1)
        self.every_layer, self.forms = every_layer, set[tuple[str, str]]()

    def __enter__(self) -> "Noting":
        super().__enter__()
        assert Looking.now is not None
        self.looking = Looking.now
        if self.every_layer:
            Looking.now = None
        return self

    def _note(self, *, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        self.forms.add((f"{fn.module}:{fn.name}", compile["specialization_data"]))
        return super()._note(fn=fn, compile=compile, **rest)


@pytest.fixture(autouse=True)
def small(all_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a machine with many processors, and nothing that compiles them."""
    monkeypatch.setattr("sys.executable", "/bin/true")
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 8)
    monkeypatch.setattr(fa, "num_processors", lambda device: 132)
    none: Any = classmethod(lambda cls, spec: [])
    monkeypatch.setattr(fa.TritonFaBackend, "unsupported_reasons", none)


def noted(launches: Sequence[Callable[[], None]], *, every_layer: bool = False) -> Noting:
    """What these need."""
    ahead = Noting(every_layer=every_layer)
    with ahead:
        for launch in launches:
            launch()
    ahead.close()
    return ahead


def engine_of(verifier: Verifier, drafter: Drafter | None) -> SpecEngine:
    """For three requests of up to 72 tokens."""
    return tiny_engine(
        verifier,
        drafter,
        max_num_seqs=3,
        max_model_len=72,
        max_prefill_tokens=24,
        pipeline_depth=1,
        num_draft_tokens="auto" if drafter else None,
    )


def check_alike(engine: SpecEngine) -> None:
    launches = [shape.look for shape in ready_shapes(engine)]
    few, every = (noted(launches, every_layer=layers) for layers in (False, True))
    assert few.forms == every.forms and len(few.forms) > 10
    assert few.looking.num_left_out > 10 and every.looking.num_left_out == 0
    assert Looking.now is None


@pytest.mark.parametrize("name", FAMILIES)
def test_one_layer_of_a_kind_tells_of_all(name: str) -> None:
    """The same kernels in the same forms, whatever kinds of layers a target has."""
    backend = None if name in LATENT_CONFIGS else fa.TritonFaBackend
    check_alike(engine_of(paged_verifier(plain_model(name), backend=backend), None))


@pytest.mark.parametrize(
    "drafter", [random_dflash, partial(random_dflash, causal=(True, True, True)), random_eagle3]
)
def test_one_layer_of_a_drafter_tells_of_all(drafter: Callable[[Verifier], Drafter]) -> None:
    verifier = paged_verifier(plain_model("llama"), backend=fa.TritonFaBackend)
    check_alike(engine_of(verifier, drafter(verifier)))


def test_one_layer_that_predicts_tells_of_all(tmp_path: Path) -> None:
    _, verifier, drafter = case("deepseek_v3", tmp_path)
    check_alike(engine_of(verifier, drafter))


@pytest.mark.parametrize(
    ("name", "drafts", "recurs"),
    [
        ("llama", True, False),
        ("gemma3", False, False),
        ("lfm2", False, True),
        ("qwen3_next", True, True),
    ],
)
def test_what_is_captured_was_looked_at(name: str, drafts: bool, recurs: bool) -> None:
    """A captured prefill is padded and knows no lengths, so it launches others than an eager one;
    a captured step launches no others.
    """
    verifier = paged_verifier(plain_model(name), backend=fa.TritonFaBackend)
    engine = engine_of(verifier, random_dflash(verifier) if drafts else None)
    runner, slots = engine.runner, engine.slots
    runner.host_may_look = False
    steps = runner.graphs = StepGraphs(Recorder(), slots, runner.step_table)
    about: Any = {"dtype": verifier.dtype, "max_rows": 64}
    prefills = PrefillGraphs(Recorder(), slots, runner.prefill_step, **about)
    runner.prefill_graphs = prefills
    shapes = ready_shapes(engine)
    looked_at = noted([shape.look for shape in shapes]).forms
    assert not steps.graphs and not prefills.graphs
    captured = [shape.captured for shape in shapes if shape.captured]
    with steps.only_launched(), prefills.only_launched():
        launched = noted(captured).forms
    assert len(captured) > 10 and launched <= looked_at
    eager = noted([shape.eager for shape in shapes]).forms
    assert bool(launched - eager) == recurs


def test_a_rank_launches_alone_what_all_capture() -> None:
    """The others are not asked, and what was captured before is there again."""
    graphs: ShapeGraphs[int, str] = ShapeGraphs(LaunchAlone(), required=True)
    graphs.obtain(1, lambda shape: "of before")
    graphs._group = Group(0, 2, None, None)  # which could not be asked
    with graphs.only_launched():
        assert graphs.obtain(1, lambda shape: "another") == "another"
    assert graphs.graphs == {1: "of before"} and graphs._group is not None


@dataclass
class Thing:
    """An object as a layer consists of some."""

    width: int
    weight: torch.Tensor
    named: dict[str, object] = field(default_factory=dict)
    itself: object = None


def thing(width: int = 3, shape: tuple[int, ...] = (4, 6), start: int = 0) -> Thing:
    weight = torch.randn(40)[start : start + math.prod(shape)].view(shape)
    return Thing(width, weight, {"scale": 1.0, "kinds": frozenset({1, None})})


def turned(one: Thing) -> Thing:
    return Thing(one.width, one.weight.mT, one.named)


def around(one: Thing) -> Thing:
    one.itself = one
    return one


WEIGHT = torch.randn(8, 4)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (thing(), thing(), True),
        ([thing(), 1], [thing(), 1], True),
        (partial(thing, 1), partial(thing, 1), True),
        (thing().__repr__, thing().__repr__, True),
        (thing(), thing(width=4), False),
        (thing(), thing(shape=(6, 4)), False),
        (thing(), turned(thing(shape=(6, 4))), False),
        (thing(), thing(start=1), False),
        (thing(start=4), thing(), True),
        (thing(), Thing(3, torch.randn(4, 6).half(), thing().named), False),
        (thing(), Thing(3, torch.randn(4, 6), {"scale": 2.0}), False),
        (1, True, False),
        (partial(thing, 1), partial(thing, 2), False),
        (lambda x: x, lambda x: x, False),
        (around(thing()), around(thing()), False),
        (Lock(), Lock(), False),
    ],
)
@pytest.mark.parametrize("lasting", [False, True])
def test_what_kernels_may_tell_apart(
    first: object, second: object, alike: bool, lasting: bool
) -> None:
    looking, calls = Looking(), list[object]()

    def work(*given: object) -> torch.Tensor:
        calls.append(given)
        return torch.ones(2)

    for one in (first, second):
        looking.forward(work)(*((one, None) if lasting else (None, one)))
    assert len(calls) == 2 - alike and looking.num_left_out == alike


def test_what_comes_out_has_the_same_form() -> None:
    """Zeros, one tensor for one; a place in memory that no new tensor has is looked at again."""
    stream = torch.ones(3, 4)

    def work(place: int, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return stream.mT, {"same": stream, "stream": stream, "kept": True, "odd": hidden[place:]}

    with CompileAhead(1) as ahead:
        assert Looking.now is not None
        for place in (4, 1):
            for _ in range(3):
                Looking.now.forward(work)(place, torch.ones(9))
        assert Looking.now.num_left_out == 2
        out, named = Looking.now.forward(work)(4, torch.ones(9))
    ahead.close()
    assert out.stride() == (1, 4) and not out.any() and named["same"] is named["stream"]
    assert named["kept"] is True and named["odd"].shape == (5,)


def test_what_is_given_twice_is_not_what_is_given_apart() -> None:
    looking, calls = Looking(), list[bool]()

    def work(lasting: None, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        calls.append(first is second)
        return torch.zeros(1)

    one, other = torch.ones(3), torch.ones(3)
    for second in (one, other, one):
        looking.forward(work)(None, one, second)
    assert calls == [True, False]
