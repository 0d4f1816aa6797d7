"""The idea of each rung of the Hopper ladder, in its machine code. How many of each instruction
there are is in tests/data/machine_code.json.
"""

import pytest
from support.hopper_problems import FIRST_AND_LAST

from outblas.inspect import inspect

PHASES = {
    "tma_wgmma": "phases=True,jitter=True",
    "hilbert": "phases=True,jitter=True,in_flight=1,stages=4,epilogue_stages=2,sms=0",
}


@pytest.mark.compile
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
class TestThePhaseClock:
    """Only kernels with phases read the clock."""

    def test_is_not_in_a_kernel_without_phases(self, rung: str) -> None:
        code = inspect(f"hopper.{rung}")

        code.require(lacks=("CS2R.32", "S2UR.64"))
        assert "clock64" not in code.ptx_text

    def test_is_in_a_kernel_with_phases(self, rung: str) -> None:
        code = inspect(f"hopper.{rung}", config=PHASES[rung])

        code.require(has=("CS2R", "NANOSLEEP"))
        assert "clock64" in code.ptx_text
