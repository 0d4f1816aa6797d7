"""Whether kernels may be compiled in this process: the environment variable OUTBLAS_COMPILE."""

import os

ENVIRONMENT = "OUTBLAS_COMPILE"
NEVER = "never"


class CompileForbidden(RuntimeError):
    """A kernel is neither in a pack nor in the cache, and OUTBLAS_COMPILE forbids to compile it."""

    def __init__(self, kernel: object) -> None:
        super().__init__(f"{ENVIRONMENT} is {NEVER}, and neither a pack nor the cache has {kernel}")


def forbidden() -> bool:
    """Returns whether nothing may be compiled. Raises ValueError for a value of OUTBLAS_COMPILE
    that does not exist.
    """
    value = os.environ.get(ENVIRONMENT, "")
    if value not in ("", NEVER):
        raise ValueError(f"{ENVIRONMENT} is {value!r}, expected {NEVER!r} or nothing")
    return value == NEVER


def check_allowed(kernel: object) -> None:
    """Raises CompileForbidden where nothing may be compiled."""
    if forbidden():
        raise CompileForbidden(kernel)
