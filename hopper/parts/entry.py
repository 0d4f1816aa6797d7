"""Makes the functions that every rung's module exports from its kernel class and its config."""

import functools
from collections.abc import Callable

from outblas.base.registry import Kernel
from outblas.base.space import Space
from outblas.core.artifact import Artifact
from outblas.core.problem import Launch
from outblas.hopper.parts import phase_profile
from outblas.hopper.parts.base import HopperGemm
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.host import HopperRung, artifact, plan, precompile, unsupported
from outblas.hopper.parts.phase_profile import Role
from outblas.hopper.parts.search_space import space

Entry = tuple[
    Callable[..., str | None],
    Callable[..., Launch],
    Callable[..., Artifact],
    Callable[..., tuple[Role, ...]],
    Callable[..., None],
    Callable[..., Space[HopperConfig]],
]


def entry(kernel: Kernel, gemm: type[HopperGemm], kind: type[HopperConfig]) -> Entry:
    """Returns what a rung's module exports: `unsupported`, `plan`, `artifact`, `phases`,
    `precompile` and `space`. `kind()` is the rung's default config.
    """
    rung = HopperRung(kernel.name, gemm, kind())
    return (
        functools.partial(unsupported, gemm),
        functools.partial(plan, rung),
        functools.partial(artifact, rung),
        functools.partial(phase_profile.measure, rung),
        functools.partial(precompile, rung),
        functools.partial(space, gemm, rung.config, functools.partial(unsupported, gemm)),
    )
