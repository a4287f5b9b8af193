"""The driver's side of a cluster: rows out, answers in, as they are done."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from typing import Any, TypeVar

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.packages import install_command
from specdec.cluster.config import ClusterConfig, EngineSpec
from specdec.cluster.origin import check_same
from specdec.cluster.rows import Answer, Row

Found = TypeVar("Found")

MAX_BLOCKS = 1000
"""Calls that a run is cut into; beyond it a call has several rows, up to `MAX_ROWS`."""
MAX_ROWS = 8
"""Rows of a call, whose answers leave an engine together."""


def connect(address: str) -> None:
    """Joins a Ray cluster, once.

    Args:
        address: of its head, as `ray.init` takes it; "" takes the one of this machine or of
            RAY_ADDRESS, and starts one where there is none.

    Raises:
        InvalidInputError: Ray is not installed.
        SpecDecError: there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise InvalidInputError(
            f"--ray needs Ray, which is not installed; run: {install_command('ray')}"
        )
    import ray
    import ray.data

    if not ray.is_initialized():
        try:
            ray.init(
                address=address or None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise SpecDecError(
                f"no Ray cluster answers at {address or 'this machine'!r}: {named_line(error)}"
            ) from error
    # what goes wrong is told in one line below
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.enable_operator_progress_bars = (
        context.print_on_execution_start
    ) = False
    context.execution_no_progress_timeout_s = -1  # an answer may take as long as it takes
    context.max_errored_blocks = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines of a cluster that is connected.

    Attributes:
        config: how many, see `ClusterConfig.placed`.
        spec: what each loads.
    """

    config: ClusterConfig
    spec: EngineSpec

    @classmethod
    def of(cls, address: str, config: ClusterConfig, spec: EngineSpec) -> Pool:
        """Connects, and fits the config to the cluster."""
        connect(address)
        import ray

        there, machines = ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes())
        gpus, cpus = there.get("GPU", 0), there.get("CPU", 0)
        return cls(config.placed(gpus=gpus, cpus=cpus, machines=machines), spec)

    @property
    def _resources(self) -> dict[str, Any]:
        gpus = {"num_gpus": self.config.gpus_per_engine} if self.config.gpus_per_engine else {}
        return {"num_cpus": self.config.cpus_per_engine, **gpus}

    def call(self, function: Callable[..., Found], *args: Any) -> Found:
        """What `function(decoder, *args)` gives on one of the machines, with a decoder of its own.

        Raises:
            SpecDecError: the function's own, or Ray could not run it.
        """
        import ray

        task = ray.remote(max_calls=1, max_retries=0, **self._resources)(_with_decoder)
        with _ray_errors():
            found: Found = ray.get(task.remote(self.spec, function, *args))
        return found

    def answers(
        self, rows: Sequence[Row], expected: dict[str, Any] | None = None
    ) -> Iterator[Answer]:
        """Answers of rows in any order, each once.

        Args:
            rows: with keys of their own.
            expected: what every engine has to say of itself, or a part of that; the first one's
                answer says the rest.

        Raises:
            SpecDecError: an engine cannot be made, or is unlike the others.
        """
        if not rows:
            return
        import ray.data
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from specdec.cluster.engine import Engine
        from specdec.cluster.ledger import Ledger

        assert self.config.engines is not None, "a pool is made by `of`"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        ledger = ray.remote(Ledger).options(num_cpus=0, scheduling_strategy=here).remote()
        per_call = min(MAX_ROWS, ceil(len(rows) / MAX_BLOCKS))
        # enough that no engine waits for rows
        calls = ceil(2 * self.spec.engine.max_num_seqs / per_call)
        waiting = {row.key for row in rows}
        assert len(waiting) == len(rows), "keys are unique"
        with _ray_errors():
            data = ray.data.from_items(
                [{"row": row.to_json()} for row in rows],
                override_num_blocks=ceil(len(rows) / per_call),
            ).map_batches(
                Engine,
                fn_constructor_args=(self.spec, ledger),
                batch_size=per_call,
                compute=ray.data.ActorPoolStrategy(
                    size=min(self.config.engines, len(rows)),
                    max_tasks_in_flight_per_actor=calls,
                    max_concurrent_calls_per_actor=calls,
                ),
                **self._resources,
            )
            # else its threads outlive an error, which holds this frame
            with closing(iter(data.iter_rows())) as texts:
                for text in texts:
                    answer = Answer.from_json(text["answer"])
                    check_same(expected or {}, answer.origin, answer.node)
                    expected = answer.origin
                    waiting.remove(answer.key)
                    yield answer
        if waiting:
            what = f"Ray ended the run and {len(waiting)} of {len(rows)} prompts have no answer"
            raise SpecDecError(f"{what}; run again")


def _with_decoder(spec: EngineSpec, function: Callable[..., Found], *args: Any) -> Found:
    """The task of `Pool.call`."""
    from specdec.cluster.engine import load

    return function(load(spec), *args)


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Errors of ours as they are, and Ray's as one line."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None:
            # Ray makes an error that is both
            if isinstance(cause, SpecDecError) and not isinstance(cause, RayError):
                raise cause from error
            cause = getattr(cause, "cause", None) or cause.__cause__
        what = f"Ray ended the run: {named_line(error)}; what is finished is kept"
        raise SpecDecError(f"{what}, and the same command goes on") from error


def named_line(error: BaseException) -> str:
    """The line of an error that names it, without the traceback and the advice that Ray puts around
    it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return (named or lines or [type(error).__name__])[-1][:300]
