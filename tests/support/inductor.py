"""How tests let Inductor compile on the CPU."""

import contextlib
from typing import Any


def inductor_settings(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Inductor's settings, until the context ends.

    It compiles in this process and writes scalar code: starting compilers, and asking the C++
    compiler what vectors the machine has, takes seconds each where nothing is compiled yet.
    """
    from torch._inductor import config  # takes a second

    settings: contextlib.AbstractContextManager[None] = config.patch(
        {"compile_threads": 1, "cpp.vec_isa_ok": False, **changes}
    )
    return settings
