"""hopper.hilbert, its space, and three configs that a sweep must survive: a hang, an illegal
access, wrong sums.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from outblas.base.machines import Machine
from outblas.base.space import Space
from outblas.bench.clock import Clock
from outblas.call.problem import Problem
from outblas.hopper import hilbert

FAULTS = ("hang", "illegal", "wrong")


if TYPE_CHECKING:  # mypy does not see a class that is made while its module is loaded
    from outblas.hopper.config import HopperConfig as Base
else:
    Base = hilbert.Config


@dataclass(frozen=True)
class Config(Base):
    fault: str = ""


def _plain(config: Config) -> Any:
    fields = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(hilbert.Config)
    }
    return hilbert.Config(**fields)


def unsupported(problem: Problem, config: Config | None = None) -> str | None:
    return hilbert.unsupported(problem, _plain(config or Config()))


def precompile(problem: Problem, config: Config, arch: int) -> None:
    hilbert.precompile(problem, _plain(config), arch)


def plan(problem: Problem, config: Config | None = None) -> Callable[..., None]:
    config = config or Config()
    launch = hilbert.plan(problem, _plain(config))

    def faulty(a, b, c: Any, out, alpha: float, beta: float) -> None:
        match config.fault:
            case "hang":
                Clock().start(1e12)
            case "illegal":
                _stray[(1,)](out)
            case "wrong":
                launch(a, b, c, out, alpha, beta)
                out[-1, -1] = 12345.0

    return faulty if config.fault else launch


def space(problem: Problem, machine: Machine) -> Space[Config]:
    inner = hilbert.space(problem, machine)
    return Space(
        own=Config(),
        axes=inner.axes,
        invalid_reason=lambda config: inner.invalid_reason(_plain(config)),
        footprint=lambda config: inner.footprint(_plain(config)),
        also=tuple(Config(fault=fault) for fault in FAULTS),
        compile_key=lambda config: dataclasses.replace(config, sms=0),
    )


@triton.jit
def _stray(out):
    tl.store(out + tl.full((), 1 << 43, tl.int64), 1.0)
