"""The CUDA-core ladder: which thread holds what of a tile, and what its accesses to memory cost."""

import itertools
from collections import Counter

import pytest
from support.rungs import own, problem, valid_configs

from outblas.base import registry
from outblas.device.mapping import Mapping
from outblas.kernels.simt_config import SimtConfig
from outblas.kernels.simt_maps import Maps, maps

CONFIGS = valid_configs(25)
anywhere = pytest.mark.parametrize("config", CONFIGS, ids=[str(i) for i in range(len(CONFIGS))])


def holders(mapping: Mapping) -> Counter[tuple[int, int]]:
    """How often each element is held."""
    bits = len(mapping.registers), len(mapping.lanes), len(mapping.warps)
    return Counter(
        mapping.element(*numbers) for numbers in itertools.product(*(range(2**n) for n in bits))
    )


def elements(rows: int, columns: int) -> set[tuple[int, int]]:
    """All elements of a tile."""
    return set(itertools.product(range(rows), range(columns)))


# ---- maps of any config
def maps_of(config: SimtConfig) -> Maps:
    return maps(config, problem("nt", (256, 256, 256)))


@anywhere
def test_maps_hold_every_output_once(config: SimtConfig) -> None:
    held = holders(maps_of(config).outputs)

    assert held == Counter(elements(config.block_m, config.block_n)), config


@pytest.mark.parametrize(
    "config",
    [config for config in CONFIGS if config.block_k > 1],
    ids=[str(i) for i, config in enumerate(CONFIGS) if config.block_k > 1],
)
def test_maps_of_copies_hold_every_element_of_a_k_block(config: SimtConfig) -> None:
    held = maps_of(config)

    assert set(holders(held.a)) == elements(config.block_m, config.block_k), config
    assert set(holders(held.b)) == elements(config.block_k, config.block_n), config


# ---- vectors
ALONG_ROWS, ALONG_COLUMNS = ((0, 1), (0, 2)), ((1, 0), (2, 0))


@pytest.mark.parametrize(
    ("layout", "operand", "bases"),
    [
        pytest.param("nn", "a", ALONG_ROWS, id="A by rows"),
        pytest.param("tt", "a", ALONG_COLUMNS, id="A by columns"),
        pytest.param("tt", "b", ALONG_COLUMNS, id="B by columns"),
    ],
)
def test_aligned_operands_are_copied_by_vectors(
    layout: str, operand: str, bases: tuple[tuple[int, int], ...]
) -> None:
    mapping = getattr(maps(own("simt.vectorized"), problem(layout)), operand)

    assert mapping.registers[:2] == bases


# ---- what an artifact says of them
@pytest.mark.compile
def test_an_artifact_says_what_conflicts_cost() -> None:
    found = registry.load("simt.vectorized").artifact(own("simt.vectorized", pad=0, piece_n=8))

    assert found.bank_conflicts == {"A store": 1, "B store": 0, "A load": 0, "B load": 4}
    assert found.passes == {"l1": 8 * (16 + 4), "shared": 8 * (4 * 2 + 4 + 16 * (2 + 8))}


@pytest.mark.compile
def test_an_artifact_without_shared_memory_has_passes_of_l1_alone() -> None:
    found = registry.load("simt.naive").artifact()

    assert (found.bank_conflicts, found.passes) == (None, {"l1": 32 * (32 + 1)})
