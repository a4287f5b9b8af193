"""Torch's graphs: what a capture launches, keeps and says; and on an accelerator, real ones against
eager steps.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec.base.errors import BackendError
from specdec.engine.capture.capture import CudaCapture
from tests.helpers.tiny_models import plain_model, random_prompts
from tests.specdec.engine.capture.test_graphs import DRAFTERS, MAX_TOKENS, Case, run


class Nothing:
    """A stream, or work on one."""

    def __init__(self, *args: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class NoDeviceGraph:
    """A graph whose capture ends in an error after one, as a device's does."""

    num_replays = 0
    failed = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "relaxed"

    def capture_end(self) -> None:
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> NoDeviceGraph:
    """What torch captures, without a device."""
    made = NoDeviceGraph()
    for name, value in {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": Nothing,
        "current_stream": Nothing,
        "stream": Nothing,
        "CUDAGraph": lambda: made,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_what_cannot_be_captured_is_said(graph: NoDeviceGraph) -> None:
    """A step that makes the device wait cannot be captured; the error names the reason and the way
    out, on one line.

    The capture that follows such an error to its end fails as well, and what it says then is of no
    use to anyone.
    """
    calls = []

    def launch() -> None:
        calls.append(1)
        if len(calls) == 2:
            graph.failed = True
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")

    with pytest.raises(
        BackendError,
        match=r"cuda:0 cannot capture .* not permitted when stream is capturing; turn graphs off$",
    ):
        CudaCapture(torch.device("cuda:0")).capture(launch, "kind")


def test_a_capture_keeps_what_its_graph_refers_to(graph: NoDeviceGraph) -> None:
    """A graph holds addresses: the memory of a tensor that nobody holds any more would be another's
    at its replay.
    """
    tensor = torch.zeros(2)
    alive = weakref.ref(tensor)

    def launch(tensor: torch.Tensor = tensor) -> None:
        tensor.add_(1)

    replay = CudaCapture(torch.device("cuda:0")).capture(launch, "kind")
    del launch, tensor
    gc.collect()
    assert alive() is not None
    replay()
    assert graph.num_replays == 1
    del replay
    gc.collect()
    assert alive() is None


def test_work_of_a_known_kind_is_launched_once_to_be_captured(graph: NoDeviceGraph) -> None:
    """The first of a kind is launched before,
    for what happens at a first use cannot be captured.
    """
    capture, launched = CudaCapture(torch.device("cuda:0")), []
    for kind in ("plain", "plain", "drafts", "plain", "drafts"):
        capture.capture(lambda kind=kind: launched.append(kind), kind)  # type: ignore[misc]
    assert launched == ["plain"] * 3 + ["drafts"] * 2 + ["plain", "drafts"]


def test_on_rocm_every_capture_comes_second(
    graph: NoDeviceGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether HIP lets a kernel be loaded in the midst of a capture is not known."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    capture, launched = CudaCapture(torch.device("cuda:0")), []
    for kind in ("plain", "plain", "drafts"):
        capture.capture(lambda kind=kind: launched.append(kind), kind)  # type: ignore[misc]
    assert launched == ["plain"] * 4 + ["drafts"] * 2


def test_both_launches_are_on_the_stream_of_the_capture(
    graph: NoDeviceGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hipBLASLt makes a handle per stream, which cannot be done within a capture."""
    current: list[object] = ["the caller's"]

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    capture, launched = CudaCapture(torch.device("cuda:0")), []
    capture.capture(lambda: launched.append(current[-1]), "kind")
    assert launched == [capture._stream] * 2 and current == ["the caller's"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_on_an_accelerator(drafter: str) -> None:
    """Real graphs: the tokens of eager steps on the same device."""
    from specdec.attention.selector import select_backend
    from tests.helpers.tiny_configs import VOCAB
    from verifiers.config.shape import attention_spec
    from verifiers.hf import verifier_for
    from verifiers.hf_attention import ATTENTION_NAME

    case = Case.__new__(Case)
    case.outputs = {
        tuple(p): [token % VOCAB for token in range(MAX_TOKENS)] for p in random_prompts(7, seed=2)
    }
    for attention in ("torch_ref", "triton_fa"):
        model = plain_model("llama").to("cuda")
        model.set_attn_implementation(ATTENTION_NAME)
        spec = attention_spec(model.config, device=model.device, dtype=torch.float32, block_size=4)
        case.verifier = verifier_for(model, name="llama", backend=select_backend(attention, spec))
        outputs = []
        for on in (False, True):
            engine = case.engine(drafter, 5, capture=False, graphs=on)
            outputs.append(
                [request.output_token_ids for request in run(engine, list(case.outputs), "mixed")]
            )
            assert bool(engine.runner.graphs and engine.runner.graphs.graphs) == on
            assert bool(engine.runner.prefill_graphs and engine.runner.prefill_graphs.graphs) == (
                on and attention == "triton_fa"
            )
        assert outputs[0] == outputs[1]
