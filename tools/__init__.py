"""Programs for people who work on outblas, from a checkout: `python -m tools.NAME`."""
