"""Where figures were measured; every result file contains this."""

import contextlib
import datetime
import platform
from typing import Any

import torch

from outblas.base import requirements
from outblas.bench.power import handle


def driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def power_limit() -> float | None:
    """Returns the enforced power limit of the current GPU in watts; None where NVML has none."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle(pynvml))) / 1000
    return None


def environment() -> dict[str, Any]:
    """Returns the GPU with its power limit, driver, versions and date, as JSON values."""
    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "outblas": requirements.installed("outblas"),
        "gpu": gpu.name if gpu else None,
        "sms": gpu.multi_processor_count if gpu else None,
        "power_limit_w": power_limit() if gpu else None,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{
            name: requirements.installed(name)
            for name in ("torch", "nvidia-cublas", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")
        },
    }
