"""What outblas takes from the inside of the CuTe DSL. Only the Hopper ladder imports this module:
it imports the DSL.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import cutlass  # noqa: F401  (registers the DSL whose settings are changed)

from . import take

_dsl: Any = take(
    "cutlass.base_dsl.dsl:BaseDSL._get_dsl",
    None,
    "compiling for sm_90a whatever GPU is present",
    "the compiler's public option --gpu-arch says it",
)
ENVIRONMENT = "CUTE_DSL_ARCH"


def arch_option(arch: str) -> str:
    """What the compiler's options say of the architecture: nothing where `target_arch` does."""
    return "" if _dsl is not None else f" --gpu-arch {arch}"


@contextlib.contextmanager
def target_arch(arch: str) -> Iterator[None]:
    """Compiles for an architecture whatever GPU is present: the DSL's own choice without one is
    sm_100a. Its settings were read when it was imported, so that they are changed in place.
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
