"""Has the steps of an engine captured."""

from specdec.engine.capture.capture import Capture
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.guided import GuidedGraphs
from specdec.engine.slots import SlotState
from specdec.engine.step import StepRunner
from specdec.parallel.group import group_of


def capture_steps(
    runner: StepRunner, slots: SlotState, capture: Capture, prefill_rows: int, *, required: bool
) -> None:
    """Has the steps of `runner` captured from now on, and prefills of up to so many rows."""
    steady_len, group = runner.verifier.attention.steady_len, group_of(runner.verifier)
    runner.graphs = StepGraphs(
        capture, slots, runner.step_table, steady_len=steady_len, required=required, group=group
    )
    runner.guided_graphs = GuidedGraphs(
        capture, slots, runner, steady_len=steady_len, required=required, group=group
    )
    if prefill_rows:
        runner.prefill_graphs = PrefillGraphs(
            capture,
            slots,
            runner.prefill_step,
            dtype=runner.verifier.dtype,
            max_rows=prefill_rows,
            required=required,
            group=group,
        )
