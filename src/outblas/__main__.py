"""`python -m outblas`: the command line."""

from .cli import app

app(prog_name="outblas")
