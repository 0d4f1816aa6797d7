"""Folders of this tree, and files that tests read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

# Where the sources of each package lie; links below src/outblas lead there.
PACKAGES = {
    "outblas": "src/outblas",
    "outblas.autotune": "autotune",
    "outblas.hopper": "hopper",
    "outblas.kernels": "kernels",
    "outblas.turing": "turing",
}
