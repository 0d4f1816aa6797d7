"""Starts the command `outblas`.

Importing `outblas` imports torch, which takes seconds, and many commands need no torch: help, the
version, completion, `list`, `cache`. Where this module was imported first, the package imports
what its API consists of when a name of it is first used (see `outblas/__init__.py`). It is a
module beside the package because nothing inside a package runs before its `__init__`.
"""


def main() -> None:
    """Runs the command that `sys.argv` names."""
    from outblas.cli import app

    app()
