"""What a search chooses from: one config of one kernel, with what is known of it before it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.machines import Machine
from ...core.space import Footprint
from ..store.records import Workload
from . import cost_model
from .target import TuneTarget

# A ranker predicts the time of a footprint at a workload on a machine, in µs. Only the order of
# its predictions counts: lower is better.
Ranker = Callable[[Footprint, Workload, Machine], float]


def by_model(footprint: Footprint, workload: Workload, machine: Machine) -> float:
    """The ranker that asks the analytic model."""
    return cost_model.predict(footprint, workload, machine).us


@dataclass(frozen=True)
class Candidate:
    """A config that is worth measuring.

    Attributes:
        target: the kernel.
        config: the kernel's `Config`.
        text: the config as text, as stores have it.
        compile_key: the text of the config whose compile it shares.
        footprint: what the config asks of an SM, and how it cuts the problem.
        predicted_us: the ranker's prediction in µs; 0 in the interpreter, of which nothing is
            known.
        own: whether the kernel takes this config where none is given.
    """

    target: TuneTarget
    config: Any
    text: str
    compile_key: str
    footprint: Footprint
    predicted_us: float
    own: bool = False

    @property
    def subject(self) -> TuneTarget:
        """The older name of `target`."""
        return self.target

    @property
    def label(self) -> str:
        return f"{self.target.name}[{self.text}]"
