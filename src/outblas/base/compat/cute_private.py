"""The private parts of the CuTe DSL that outblas uses. Only the Hopper ladder imports this module,
because it imports the DSL.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import cutlass  # noqa: F401  (registers the DSL whose settings are changed)

from outblas.base.compat import take

_dsl: Any = take(
    "cutlass.base_dsl.dsl:BaseDSL._get_dsl",
    None,
    "compiling for sm_90a whatever GPU is present",
    "the compiler's public option --gpu-arch sets it",
)
ENVIRONMENT = "CUTE_DSL_ARCH"


def arch_option(arch: str) -> str:
    """Returns the compiler option that names the architecture; empty where `target_arch` sets it
    instead.
    """
    return "" if _dsl is not None else f" --gpu-arch {arch}"


@contextlib.contextmanager
def target_arch(arch: str) -> Iterator[None]:
    """Compiles for an architecture whatever GPU is present; without a GPU the DSL would choose
    sm_100a. The DSL read its settings when it was imported, so they are changed in place.
    """
    if _dsl is None:
        yield
        return
    settings: Any = _dsl().envar
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = settings.arch = arch
    try:
        yield
    finally:
        del settings.arch
        del os.environ[ENVIRONMENT]
        if before is not None:
            os.environ[ENVIRONMENT] = before
