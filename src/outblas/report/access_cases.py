"""The kernels, configs and shapes of the CUDA-core ladder that the access report predicts, with
their profiles.
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

N, DTYPE, LAYOUT = 4096, "float32", "nn"  # for a prediction without a profile


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration at one shape, and its profile made with --instructions (None:
    only predicted).
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
        """Returns the kernel, its configuration, and the shape; dtype and layout only where they
        are not the usual ones.
        """
        usual = ((self.dtype, DTYPE), (self.layout, LAYOUT))
        other = [value for value, default in usual if value != default]
        gpu = [self.profile.gpu] if self.profile else []
        return (
            self.kernel,
            configs.brief(self.config) or NONE,
            ", ".join([to_text(self.shape), *other, *gpu]),
        )

    def record(self) -> dict[str, Any]:
        """The case as a JSON object."""
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
    """The profiles of CUDA-core kernels that were made with --instructions."""
    return tuple(
        p for p in profiles if p.memory is not None and p.provider in registry.LADDERS["simt"]
    )


def cases(profiles: Iterable[Profile], usual: Iterable[tuple[str, str]]) -> list[Case]:
    """Returns the cases of the usual kernels and configs, then all others that were profiled.

    A usual case that was not profiled is predicted at N. Of several profiles of a case the last one
    counts.
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
            if (case.kernel, same_addresses(case.config)) == (kernel, same_addresses(config))
        ]
        found += same or [Case(kernel, config, (N, N, N), DTYPE, LAYOUT)]
    return list(dict.fromkeys([*found, *known.values()]))


def same_addresses(config: SimtConfig) -> SimtConfig:
    """Returns the config with defaults in the fields that only decide when memory is accessed: two
    configs with the same result access the same addresses.
    """
    return replace(config, prefetch=False, store_at=0, group_m=1, ctas=1)


def _case(profile: Profile) -> Case:
    try:
        config = configs.from_text(
            registry.load(profile.provider).Config, profile.resolved or profile.config
        )
    except ValueError as error:
        raise ValueError(
            f"a profile of {profile.provider} has a config that this version does not have: {error}"
        ) from None
    return Case(profile.provider, config, profile.shape, profile.dtype, profile.layout, profile)


@cache
def problem_of(dtype: str, layout: str, shape: Shape) -> Problem:
    """Returns the product of a case, on tensors without data."""
    import torch

    from ..core.artifact import example

    return example(getattr(torch, dtype), None, layout, shape)
