"""The self-check of captured steps: what a recording repeats passes, and what it should not have
baked in does not.
"""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.errors import BackendError
from specdec.device import self_check
from specdec.device.deviation import Deviation
from specdec.engine.capture import capture as capturing
from specdec.engine.capture import graph_check
from specdec.engine.capture.capture import captures_graphs
from specdec.engine.capture.graph_check import LaunchAgain, check_captured_step
from specdec.engine.capture.prefill_graphs import PrefillShape
from specdec.engine.engine import SpecEngine
from tests.helpers.recorder import Recorder
from tests.helpers.tiny_models import paged_verifier, plain_model

CUDA = torch.device("cuda", 0)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Any]], None]:
    """Puts a class in the place of CUDA's graphs."""

    def put(capture: type[Any]) -> None:
        monkeypatch.setattr(capturing, "CudaCapture", lambda device: capture())

    return put


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("capture", [Recorder, LaunchAgain])
def test_what_repeats_a_step_passes(use: Any, name: str, capture: type[Any]) -> None:
    """With any target, latent attention among them: the same bits."""
    use(capture)
    error, bound = check_captured_step(SpecEngine, paged_verifier(plain_model(name)))
    assert error == 0 < bound


def test_prefills_are_captured_too(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an attention backend has them captured."""
    kinds: list[Any] = []

    class Noted(Recorder):
        def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
            kinds.append(kind)
            return super().capture(launch, kind)

    use(Noted)
    monkeypatch.setattr(TorchRefBackend, "captures_prefill", True)
    error, bound = check_captured_step(SpecEngine, paged_verifier(plain_model("llama")))
    assert error == 0 < bound
    assert kinds.count((PrefillShape, True)) == 2
    # steps with drafts, and plain ones
    assert {kind[0] for kind in kinds if kind[0] is not PrefillShape} == {True, False}


class Frozen(LaunchAgain):
    """Repeats nothing."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        launch()
        return lambda: None


class Twice(LaunchAgain):
    """Repeats too much."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        def replay() -> None:
            launch()
            launch()

        return replay


@pytest.mark.parametrize("capture", [Frozen, Twice])
def test_what_does_not_is_told(use: Any, capture: type[Any]) -> None:
    """The tokens are others."""
    use(capture)
    with pytest.raises(BackendError, match="a captured step gives other tokens"):
        check_captured_step(SpecEngine, paged_verifier(plain_model("llama")))


def test_logits_count(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities that differ while the tokens are the same."""
    verifier: Any = paged_verifier(plain_model("llama"))
    forward = verifier.forward

    class Warmer(LaunchAgain):
        """Its logits are a little larger throughout, so that the best token stays the best."""

        def __init__(self) -> None:
            def warm(*args: Any, **options: Any) -> Any:
                output = forward(*args, **options)
                output.logits = output.logits * 1.001
                return output

            monkeypatch.setattr(verifier, "forward", warm)

    class Colder(LaunchAgain):
        def __init__(self) -> None:
            monkeypatch.setattr(verifier, "forward", forward)

    use(Warmer)
    monkeypatch.setattr(graph_check, "LaunchAgain", Colder)
    error, bound = check_captured_step(SpecEngine, verifier)
    assert error > bound


def test_logits_that_are_not_finite_are_told(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's own message."""
    use(LaunchAgain)
    verifier: Any = paged_verifier(plain_model("llama"))
    verifier._head.weight.fill_(float("nan"))
    with pytest.raises(BackendError, match="the target's logits are NaN or infinite"):
        check_captured_step(SpecEngine, verifier)


@pytest.mark.parametrize(
    ("architecture", "wanted", "right", "captured"),
    [
        (None, None, False, True),  # NVIDIA: unchecked
        (None, False, True, False),
        ("gfx942", None, True, True),
        ("gfx942", None, False, False),
        ("gfx950", True, False, True),
        ("gfx950", False, True, False),
        ("gfx1100", None, True, True),
        ("gfx1100", None, False, False),
    ],
)
def test_where_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str | None,
    wanted: bool | None,
    right: bool,
    captured: bool,
) -> None:
    """Where it was asked for; otherwise on NVIDIA, and on AMD by the check."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    monkeypatch.setattr(self_check, "machine", lambda device: {"card": str(device)})
    monkeypatch.setattr(self_check, "_card", str)
    monkeypatch.setattr(specdec.device.device, "describe_device", str)
    check = lambda: Deviation(float(not right), 0.0)  # noqa: E731
    assert captures_graphs(CUDA, wanted, check, "triton_fa") is captured
    assert captures_graphs(torch.device("cpu"), wanted, check, "triton_fa") is False
