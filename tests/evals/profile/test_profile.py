"""The profile of decoding steps: a table of operators, honest step times and a trace that other
tools open.
"""

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from evals.profile.profile import (
    _busy_us,
    _idle_share,
    _kernels,
    covered,
    format_profile,
    profile_steps,
)
from specdec.base.config import EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.cli.main import main
from specdec.engine.capture import buckets
from specdec.engine.capture.graphs import StepGraphs
from specdec.session.decoder import SpecDecoder
from specdec.session.drafter_choice import find_drafter
from tests.evals.tiny import tiny_decoder
from tests.helpers.recorder import Recorder

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 10, 9, 10]]


def drafting_decoder(max_num_seqs: int = 2) -> SpecDecoder:
    base = tiny_decoder()
    drafter = find_drafter("ngram")(base.verifier)
    return SpecDecoder(
        base.verifier,
        base.tokenizer,
        drafter,
        EngineConfig(num_draft_tokens=None, max_num_seqs=max_num_seqs, max_model_len=512),
    )


def test_steps_are_decode_steps_of_the_whole_batch(tmp_path: Path) -> None:
    """Catches a prefill or a finished request among the measured steps, and figures that are not
    per step.
    """
    decoder = drafting_decoder()
    trace = tmp_path / "trace.json"
    result = profile_steps(decoder, PROMPTS, steps=3, warmup=2, trace=trace)
    assert (result.num_reqs, len(result.step_ms), result.busy_ms) == (2, 3, None)
    assert result.context >= len(PROMPTS[0]) + 2
    assert min(result.step_ms) > 0
    calls = {kernel.name: kernel.calls for kernel in result.kernels}
    layers = decoder.verifier.num_layers
    assert calls["aten::scaled_dot_product_attention"] == layers
    times = [kernel.microseconds for kernel in result.kernels]
    assert times == sorted(times, reverse=True)
    assert any(
        "scaled_dot_product_attention" in event.get("name", "")
        for event in json.loads(trace.read_text())["traceEvents"]
    )
    assert not decoder.engine.has_work
    text = format_profile(result, most=2)
    assert "2 at once" in text
    assert f"and {len(result.kernels) - 2} shorter ones" in text


@pytest.mark.parametrize("length", [247, 249])
@pytest.mark.slow
def test_no_step_is_captured_while_measuring(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences outgrow their graph's bound among the timed or the profiled steps; a capture runs
    the step several times more.
    """
    base = tiny_decoder()
    decoder = SpecDecoder(
        base.verifier,
        base.tokenizer,
        None,
        EngineConfig(num_draft_tokens=None, max_num_seqs=2, max_model_len=512),
    )
    monkeypatch.setattr(buckets, "_SHORTEST", 256)
    engine = decoder.engine
    captured_at = []

    class Capture(Recorder):
        def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
            captured_at.append(engine.timer.num_steps)
            return super().capture(launch, kind)

    engine.runner.graphs = StepGraphs(Capture(), engine.slots, engine.runner.step_table)
    result = profile_steps(decoder, [[5] * length, [6] * length], steps=4, warmup=2)
    assert {shape.max_seq_len for shape in engine.runner.graphs.graphs} == {256, 512}
    assert max(captured_at) < engine.timer.num_steps - 2 * 4
    calls = {kernel.name: kernel.calls for kernel in result.kernels}
    assert calls["aten::scaled_dot_product_attention"] == decoder.verifier.num_layers
    assert len(result.step_ms) == 4


def test_an_accelerator_counts_its_kernels_and_its_idle_time() -> None:
    """Made-up events: catches operators counted as kernels,
    and overlapping kernels counted twice.
    """

    def event(device: DeviceType, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event(DeviceType.CUDA, 0, 4),
        event(DeviceType.CPU, 0, 100),
        event(DeviceType.CUDA, 2, 5),
        event(DeviceType.CUDA, 8, 10),
    ]
    assert _busy_us(events) == 7 and covered([]) == 0.0
    assert _idle_share(0.7, [0.9, 1.0, 4.0]) == pytest.approx(0.3), "of the median step"
    assert _idle_share(1.1, [1.0]) == 0.0
    averages = [
        SimpleNamespace(
            key="launch",
            count=8,
            device_type=DeviceType.CPU,
            self_device_time_total=50.0,
            self_cpu_time_total=9.0,
        ),
        SimpleNamespace(
            key="kernel",
            count=8,
            device_type=DeviceType.CUDA,
            self_device_time_total=40.0,
            self_cpu_time_total=0.0,
        ),
    ]
    (kernel,) = _kernels(averages, 4, on_device=True)
    assert (kernel.name, kernel.calls, kernel.microseconds) == ("kernel", 2.0, 10.0)


def test_a_long_prefill_leaves_enough_to_measure() -> None:
    """The first conversation decodes while the others are prefilled; one that ended meanwhile was
    waited for without end.
    """
    base = tiny_decoder()
    engine = EngineConfig(
        num_draft_tokens=None, max_num_seqs=3, max_model_len=200, max_prefill_tokens=4
    )
    decoder = SpecDecoder(base.verifier, base.tokenizer, None, engine)
    prompts = [[5] * 8, [6] * 60, [7] * 60]
    result = profile_steps(decoder, prompts, steps=2, warmup=0)
    assert (result.num_reqs, len(result.step_ms)) == (3, 2)
    with pytest.raises(
        CapacityError,
        match=r"a conversation of 190 tokens came to its end \(length\) after 10 more",
    ):
        profile_steps(decoder, [[5] * 190, [8] * 60, [9] * 60], steps=2, warmup=0)


def test_mistakes_are_named() -> None:
    decoder = drafting_decoder(max_num_seqs=1)
    with pytest.raises(
        InvalidInputError, match="2 prompts are to run at once and max_num_seqs is 1"
    ):
        profile_steps(decoder, PROMPTS)
    with pytest.raises(InvalidInputError, match="steps is 0"):
        profile_steps(decoder, PROMPTS[:1], steps=0)
    with pytest.raises(InvalidInputError, match="it is a folder"):
        profile_steps(decoder, PROMPTS[:1], trace=Path())
    with pytest.raises(CapacityError, match="the limit is 512"):
        profile_steps(decoder, [[5] * 600])


def test_the_command_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *args, **options: drafting_decoder())
    assert main(["profile", "--model", "m", "--context", "8", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("drafter ngram, k = 8\n")
    assert "ms per step (median of 2" in out
    assert "aten::" in out
