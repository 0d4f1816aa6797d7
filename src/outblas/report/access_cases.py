"""What was profiled of the CUDA-core ladder with --instructions, and what is predicted beside it:
kernels, configs, shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..core import configs, registry
from ..core.shapes import Shape, to_text
from .profiles import Profile, Profiles, Total
from .text import NONE

if TYPE_CHECKING:
    from ..core.problem import Problem
    from ..kernels.simt_config import SimtConfig

N, DTYPE, LAYOUT = 4096, "float32", "nn"  # of a prediction that no profile stands beside


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration at one shape, and its profile with --instructions (None:
    prediction alone).
    """

    kernel: str
    config: SimtConfig
    shape: Shape
    dtype: str
    layout: str
    profile: Profile | None = None

    @property
    def memory(self) -> Sequence[Total] | None:
        return self.profile.memory if self.profile else None

    @property
    def problem(self) -> Problem:
        return problem_of(self.dtype, self.layout, self.shape)

    def cells(self) -> tuple[str, ...]:
        """Kernel, configuration, and at what: only what is not usual."""
        other = [
            each for each, usual in ((self.dtype, DTYPE), (self.layout, LAYOUT)) if each != usual
        ]
        gpu = [self.profile.gpu] if self.profile else []
        return (
            self.kernel,
            configs.brief(self.config) or NONE,
            ", ".join([to_text(self.shape), *other, *gpu]),
        )

    def record(self) -> dict[str, Any]:
        """For JSON."""
        found = {
            "kernel": self.kernel,
            "config": configs.brief(self.config),
            "shape": list(self.shape),
        }
        return found | {
            "dtype": self.dtype,
            "layout": self.layout,
            "gpu": self.profile and self.profile.gpu,
        }


def profiled(profiles: Iterable[Profile]) -> Profiles:
    """Those of CUDA-core kernels that were made with --instructions."""
    return tuple(
        p for p in profiles if p.memory is not None and p.provider in registry.LADDERS["simt"]
    )


def cases(profiles: Iterable[Profile], usual: Iterable[tuple[str, str]]) -> list[Case]:
    """The usual ones, predicted at N where no profile has them, then the others; the last profile
    of a case counts.
    """
    known = {
        (replace(case, profile=None), p.gpu): case
        for p in profiled(profiles)
        for case in [_case(p)]
    }
    found: list[Case] = []
    for kernel, text in usual:
        config = configs.from_text(registry.load(kernel).Config, text)
        same = [
            case
            for case in known.values()
            if (case.kernel, where(case.config)) == (kernel, where(config))
        ]
        found += same or [Case(kernel, config, (N, N, N), DTYPE, LAYOUT)]
    return list(dict.fromkeys([*found, *known.values()]))


def where(config: SimtConfig) -> SimtConfig:
    """The config as far as it says where something is accessed, and not when."""
    return replace(config, prefetch=False, store_at=0, group_m=1, ctas=1)


def _case(profile: Profile) -> Case:
    try:
        config = configs.from_text(
            registry.load(profile.provider).Config, profile.resolved or profile.config
        )
    except ValueError as error:
        raise ValueError(
            f"a profile of {profile.provider} is of a configuration that is gone: {error}"
        ) from None
    return Case(profile.provider, config, profile.shape, profile.dtype, profile.layout, profile)


@cache
def problem_of(dtype: str, layout: str, shape: Shape) -> Problem:
    """The product of a case, without data."""
    import torch

    from ..core.artifact import example

    return example(getattr(torch, dtype), None, layout, shape)
