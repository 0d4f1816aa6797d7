"""tests/support/faulty_kernel.py in a module whose import takes SLOW_IMPORT seconds, as that of a
large DSL may.
"""

import os
import time

from support import faulty_kernel
from support.faulty_kernel import Config, footprint, plan, space, unsupported

__all__ = ["Config", "footprint", "plan", "precompile", "space", "unsupported"]

precompile = faulty_kernel.precompile

time.sleep(float(os.environ.get("SLOW_IMPORT", "0")))
if os.environ.get("SLOW_IMPORT_CRASHES"):
    os.abort()
