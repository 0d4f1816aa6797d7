"""Where figures were measured: every result file carries this."""

from __future__ import annotations

import platform
from typing import Any

import torch

from .. import requirements


def driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def environment() -> dict[str, Any]:
    """GPU, driver and versions, as JSON-able values."""
    versions = {status.name: status.installed for status in requirements.statuses()}
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: versions.get(name) for name in ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")},
    }
