"""Configs of hopper.gemm, one for each of its levers, and calls by them: for tests on a GPU."""

from typing import Any

import pytest
import torch

import outblas
from outblas.base import configs
from outblas.hopper import gemm
from outblas.hopper.gemm import host
from outblas.hopper.parts.config import HopperConfig
from outblas.verify.call import Run
from outblas.verify.cases import Case
from outblas.verify.kernels import caller

from .precompiled import KERNEL, SMS, by_default, of_case

ONE = (
    "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,epilogue_stages=1,cluster_m=1"
)
LEVERS = {
    "own": "",
    "split_k": "split_k=3,k_serpentine=False",
    "small_split_k": f"{ONE},tile_n=64,stages=8,split_k=7,k_serpentine=False",
    "stream_k": "stream_k=True,k_serpentine=False",
    "small_stream_k": f"{ONE},tile_n=64,stages=8,stream_k=True,k_serpentine=False",
    "variable_tile_n": "tile_n=192,variable_tile_n=True",
    "elastic_by_columns": "tile_m=256,tile_n=200,stages=3,variable_tile_n=True,cluster_m=1,"
    "cluster_n=2",
    "elastic_stream_k": f"{ONE},tile_n=40,stages=8,variable_tile_n=True,stream_k=True,"
    "k_serpentine=False",
    "elastic_swapped": "tile_n=104,stages=6,cluster_m=1,swap_ab=True,variable_tile_n=True",
    "as_they_come": f"{ONE},tile_n=64,stages=8,gpc_local=False",
    "pingpong": "tile_m=64,pingpong=True,order=hilbert",
    "swap": f"{ONE},tile_n=32,stages=16,swap_ab=True",
    "swap_split_k": f"{ONE},tile_n=16,stages=16,swap_ab=True,split_k=4,k_serpentine=False",
    "cluster_k": "tile_n=128,stages=5,cluster_m=1,epilogue_stages=1,cluster_k=2,sms=8",
    "small_cluster_k": f"{ONE},tile_n=64,stages=8,cluster_m=2,cluster_k=4,jitter=True",
    "split_k_of_three": (
        "tile_m=192,tile_n=128,consumers=3,producer_registers=32,"
        "consumer_registers=160,"
        "cluster_m=1,split_k=3,k_serpentine=False,jitter=True"
    ),
    "three_consumers": (
        "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,cluster_m=1"
    ),
    "staggered": "cluster_m=1,stagger=always",
    "staggered_of_three": (
        "tile_m=192,tile_n=192,consumers=3,producer_registers=32,consumer_registers=160,cluster_m=1,"
        "in_flight=0,epilogue_stages=1,stagger=always"
    ),
    "staggered_swapped": (
        "tile_n=144,stages=5,cluster_m=1,swap_ab=True,variable_tile_n=True,stagger=always"
    ),
    "from_registers": "epilogue_stages=0,sms=23",
}


def config_of(way: str, case: Case) -> HopperConfig | None:
    """The config of a way of calling: a lever's, with "default" that of a call which names no
    kernel, with "rule" None, for the kernel chooses it.
    """
    if way in LEVERS:
        return configs.from_text(gemm.Config, LEVERS[way])
    return by_default(of_case(case)) if way == "default" else None


def runner(way: str, case: Case) -> Run:
    """Makes the call of a case in one of the ways."""

    def unnamed(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        if c is None:
            outblas.matmul(a, b, out=out, out_dtype=None if out.dtype == a.dtype else out.dtype)
        else:
            outblas.addmm(c, a, b, alpha=alpha, beta=beta, out=out)

    return unnamed if way == "default" else caller(KERNEL, config_of(way, case))


class LateCompiles:
    """Names of kernels that a test compiled itself, for want of a compile ahead of it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def check(self, compiles: int) -> None:
        """There are none, where the GPU has 132 SMs, which compiles ahead are for."""
        assert not self.names or SMS != 132, f"beside {compiles} compiles made ahead: {self.names}"


def note_late_compiles(monkeypatch: pytest.MonkeyPatch) -> LateCompiles:
    """Notes each compile that this process makes from now on."""
    found = LateCompiles()
    compile_variant = host.compile_variant

    def noted(variant: Any, *options: str) -> Any:
        found.names.append(variant.name)
        return compile_variant(variant, *options)

    monkeypatch.setattr(host, "compile_variant", noted)
    return found
