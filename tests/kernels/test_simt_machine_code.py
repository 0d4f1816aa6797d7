"""What the CUDA-core ladder compiles to, without a GPU."""

import threading
from typing import Any

import pytest
import torch
from support.rungs import NAMES, bodies, fitted, own, valid_configs
from support.shared_compiles import Store

import outblas
from outblas.base import registry
from outblas.kernels.simt_config import SimtConfig

STAGED = NAMES[NAMES.index("simt.shared") :]


@pytest.fixture(autouse=True)
def _shared(shared_store: Store) -> None:
    """Tests without the mark `compile` share what was assembled and disassembled, too."""
    shared_store.share()


# ---- every rung
@pytest.mark.parametrize("name", STAGED)
def test_shared_memory_is_what_the_formula_says(name: str) -> None:
    stages = 2 if name == "simt.pipelined" else 1
    whole = stages * own(name).k_block_bytes

    taken = registry.load(name).artifact().smem_bytes

    assert whole - 64 * stages <= taken <= whole + 1024, "the last row needs no padding"


# ---- any config
def builds(configs: list[SimtConfig]) -> list[Any]:
    """Each config as that of a rung of every body that takes it."""
    return [(name, fitted(name, config)) for config in configs for name in bodies(config)]


CONFIGS = valid_configs(4, seed=1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *builds(CONFIGS[:2]),
        *(pytest.param(*build, marks=pytest.mark.slow) for build in builds(CONFIGS[2:])),
    ],
    ids=str,
)
def test_any_valid_config_compiles(name: str, config: SimtConfig) -> None:
    assert registry.load(name).artifact(config).cubin


@pytest.mark.compile
@pytest.mark.oldest_triton
def test_compiling_beside_the_interpreter() -> None:
    """It patches triton.language for every thread."""
    a, stop = torch.randn(96, 96), threading.Event()

    def interpret() -> None:
        while not stop.is_set():
            outblas.matmul(a, a, kernel="portable")

    beside = threading.Thread(target=interpret)
    beside.start()
    try:
        for rows in (3, 5):  # groups that no other test compiles
            assert registry.load("simt.shared").artifact(own("simt.shared", group_m=rows)).cubin
    finally:
        stop.set()
        beside.join()
