"""`outblas profile` on recordings."""

import functools

from support import commands

invoke = functools.partial(commands.invoke, "profile")
