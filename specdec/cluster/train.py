"""Training over machines: a function in several processes of one group, made by Ray Train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.base.errors import SpecDecError
from specdec.cluster.pool import connect, named_line


def run_workers(
    address: str, function: Callable[..., bool], *args: Any, workers: int | None, folder: Path
) -> bool:
    """Runs `function(*args)` in every process of a torch process group, each with a GPU where the
    cluster has GPUs.

    Args:
        address: see `connect`.
        function: may use `torch.distributed`; what it needs to go on after the loss of a machine,
            it keeps in files.
        workers: processes; None takes the GPUs of the cluster, or one process where there are none.
        folder: which all machines see, for Ray's own records.

    Returns:
        What the function returned in the first process.

    Raises:
        SpecDecError: the function's own, or Ray could not run it.
    """
    connect(address)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    gpus = int(ray.cluster_resources().get("GPU", 0))
    trainer = TorchTrainer(
        lambda: function(*args),
        scaling_config=ScalingConfig(num_workers=workers or max(1, gpus), use_gpu=gpus > 0),
        run_config=RunConfig(
            storage_path=str(folder.resolve()),
            name="ray",
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    try:
        return bool(trainer.fit().return_value)
    except TrainingFailedError as error:
        failures = [
            getattr(one, "_base_exc", one) for one in getattr(error, "worker_failures", {}).values()
        ]
        own = next((one for one in failures if isinstance(one, SpecDecError)), None)
        if own is not None:
            raise own from error
        what = f"Ray ended the training: {named_line(error)}"
        raise SpecDecError(f"{what}; the same command goes on from the saved state") from error
