"""Winners of an H100, and knowledge made of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.autotune.lookup import TuningIndex
from outblas.autotune.search import gpu
from outblas.autotune.store.records import BestConfig, Gpu
from outblas.autotune.store.store import Store
from outblas.base.configs import to_text
from outblas.kernels.portable_config import PortableConfig
from support import stored
from tools.ship import ship

H100 = replace(gpu.imagined("h100"), driver="580", torch="2.11")
OLDER = replace(H100, driver="570")
H200 = gpu.imagined("h200")
PCIE = Gpu("NVIDIA H100 PCIe", 90, 114)
A100 = gpu.imagined("a100")
SQUARE = stored.WORKLOAD
Know = Callable[..., TuningIndex]
CONFIGS = [to_text(PortableConfig(group_m=i)) for i in range(1, 12)]


def winner(i: int = 0, ratio: float = 1.0, **changes: Any) -> BestConfig:
    fields = {
        "gpu": H100,
        "kernel": "portable",
        "config": CONFIGS[i],
        "us": 100.0,
        "cublas_us": 100.0 * ratio,
        "ratio": ratio,
        "ratio_low": ratio,
        "ratio_high": ratio,
        "when": f"2026-01-{i + 1:02}T00:00:00+00:00",
    }
    return stored.winner(**fields | changes)


def knowing(tmp_path: Path) -> Know:
    """A maker of knowledge of an H100 from winners in its store, and from those that were
    shipped.
    """

    def made(
        *here: BestConfig, shipped: tuple[BestConfig, ...] = (), of: Gpu = H100
    ) -> TuningIndex:
        folder = tmp_path / f"tables{len(list(tmp_path.iterdir()))}"
        with Store(folder.with_suffix(".sqlite")) as store:
            for each in here:
                store.record_best(each)
        ship(shipped, folder)
        return TuningIndex(of, folder.with_suffix(".sqlite"), folder)

    return made
