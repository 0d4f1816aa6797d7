"""Where figures were measured; every result file contains this."""

import datetime
import platform
from typing import Any

import torch

from outblas.base import requirements
from outblas.bench.power import EnergyMeter


def driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def power_limit() -> float | None:
    """Returns the power limit of the current GPU, in watts; None without an energy counter."""
    try:
        return EnergyMeter().power_limit()
    except RuntimeError:
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
