"""`python -m outblas`: the command line."""

from _outblas_command import main

main()
