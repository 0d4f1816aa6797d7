"""The energy of the current GPU by NVML, from joules that the board counts instead of sampled
power.
"""

import time
from typing import Any

import torch


class EnergyMeter:
    """Samples the board's energy counter (mJ, updated about ten times a second) while work runs.

    Power is computed between the first and the last update seen, so a counter that stands still
    between updates costs no accuracy. On an H100 at constant load, updates still differ by ±15%:
    one second gives watts to about 2%. Raises RuntimeError where NVML has no counter.
    """

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = handle(pynvml)
            self._read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"no energy counter: {error}") from None
        self._renewals: list[tuple[float, int]] = []
        self._last: int | None = None

    def reset(self) -> None:
        self._renewals, self._last = [], None

    def sample(self) -> None:
        """Reads the counter (3 ms on an H100). Call it more often than the counter is updated."""
        value = self._read()
        if self._last is not None and value != self._last:
            self._renewals.append((time.perf_counter(), value))
        self._last = value

    def watts(self) -> float | None:
        """Returns the mean power since the reset; None if fewer than two updates were seen."""
        if len(self._renewals) < 2:
            return None
        (start, first), *_, (end, last) = self._renewals
        return (last - first) / 1000 / (end - start)

    def _read(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


def handle(nvml: Any) -> Any:
    """Returns the NVML handle of the current GPU, matched by UUID, because NVML numbers GPUs in its
    own order and sees those that CUDA_VISIBLE_DEVICES hides.
    """
    uuid = str(torch.cuda.get_device_properties().uuid)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
