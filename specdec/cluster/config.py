"""How many engines a cluster runs, and what each of them gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.base.config import EngineConfig, LoadConfig
from specdec.base.validation import require
from specdec.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Engines of a cluster.

    Attributes:
        engines: number of engines; None takes as many as the GPUs of the cluster give, and one per
            machine where there are none.
        gpus_per_engine: GPUs of each engine, all on one machine; None takes 1 where the cluster has
            GPUs.
        cpus_per_engine: CPU cores of each engine.
    """

    engines: int | None = None
    gpus_per_engine: int | None = None
    cpus_per_engine: float = 1.0

    def __post_init__(self) -> None:
        engines, gpus, cpus = self.engines, self.gpus_per_engine, self.cpus_per_engine
        require(engines is None or engines >= 1, f"engines is {engines}; it must be at least 1")
        line = f"gpus_per_engine is {gpus}; it must be 0 (CPUs alone) or more"
        require(gpus is None or gpus >= 0, line)
        require(cpus > 0, f"cpus_per_engine is {cpus:g}; it must be above 0")

    def placed(self, *, gpus: float, cpus: float, machines: int) -> ClusterConfig:
        """This config with every number, for a cluster that has so much.

        Raises:
            InvalidInputError: the cluster does not have what is asked for, so an engine would wait
                for ever.

        >>> ClusterConfig().placed(gpus=8, cpus=64, machines=1).engines
        8
        >>> ClusterConfig(gpus_per_engine=4).placed(gpus=8, cpus=64, machines=1).engines
        2
        >>> ClusterConfig().placed(gpus=0, cpus=64, machines=3).engines
        3
        """
        each = min(1, int(gpus)) if self.gpus_per_engine is None else self.gpus_per_engine
        engines = self.engines or (max(1, int(gpus) // each) if each else machines)
        for name, needed, there in (
            ("GPUs", engines * each, gpus),
            ("CPU cores", engines * self.cpus_per_engine, cpus),
        ):
            what = f"{engines} engines need {needed:g} {name} and the cluster has {there:g}"
            way_out = "lower --engines, --gpus-per-engine or --cpus-per-engine"
            require(needed <= there, f"{what}; {way_out}")
        return ClusterConfig(engines, each, self.cpus_per_engine)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine of a run loads.

    Attributes:
        model, drafter: names as `SpecDecoder.from_pretrained` takes them, which every machine can
            resolve.
        load: how the target is loaded.
        engine: limits and choices.
        warm_up: on an accelerator, launch beforehand all that requests decoded like this may need;
            None launches a little.
    """

    model: str
    drafter: str | None
    load: LoadConfig
    engine: EngineConfig
    warm_up: SamplingParams | None = None

    def plain(self) -> EngineSpec:
        """This config without drafts, see `SpecDecoder.plain`."""
        return replace(self, drafter=None, engine=self.engine.plain())
