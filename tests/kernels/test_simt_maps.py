"""The CUDA-core ladder: which thread holds what of a tile, and what its accesses to memory cost."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from support.rungs import own, problem, valid_configs

from outblas.core import registry
from outblas.device import access
from outblas.device.mapping import Mapping, by_rows, copies, outputs
from outblas.kernels import simt_access
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


@anywhere
def test_maps_by_rows_hold_every_output_once(config: SimtConfig) -> None:
    held = holders(by_rows(maps_of(config).outputs))

    assert held == Counter(elements(config.block_m, config.block_n)), config


@anywhere
def test_maps_are_of_32_lanes_and_the_warps_of_a_config(config: SimtConfig) -> None:
    mapping = maps_of(config).outputs

    assert len(mapping.lanes) == 5, config
    assert 2 ** len(mapping.warps) == config.num_warps, config


@pytest.mark.parametrize(
    "config",
    [config for config in CONFIGS if config.block_k > 1],
    ids=[str(i) for i, config in enumerate(CONFIGS) if config.block_k > 1],
)
def test_maps_of_copies_hold_every_element_of_a_k_block(config: SimtConfig) -> None:
    held = maps_of(config)

    assert set(holders(held.a)) == elements(config.block_m, config.block_k), config
    assert set(holders(held.b)) == elements(config.block_k, config.block_n), config


# ---- outputs
WARP_TILES = outputs((128, 128), (64, 64), (8, 16), (8, 4), False)


def test_a_warp_owns_its_tile() -> None:
    warp = {WARP_TILES.element(register, lane, 3) for register in range(128) for lane in range(32)}

    assert warp == set(itertools.product(range(64, 128), range(64, 128)))


def test_a_thread_owns_its_pieces() -> None:
    thread = {WARP_TILES.element(register, 1) for register in range(128)}

    columns = [16 * piece + 4 + column for piece in range(4) for column in range(4)]
    assert thread == set(itertools.product(range(8), columns))


def test_a_thread_owns_its_registers_down_a_piece_s_columns() -> None:
    first = [WARP_TILES.element(register, 0) for register in (0, 1, 7, 8)]

    assert first == [(0, 0), (1, 0), (7, 0), (0, 1)]


def test_neighbouring_lanes_alternate_where_they_interleave() -> None:
    mapping = outputs((128, 128), (64, 64), (8, 16), (4, 4), True)

    assert [mapping.element(0, lane) for lane in (1, 2, 4)] == [(0, 4), (4, 0), (0, 8)]


# ---- copies
def test_copies_go_along_rows() -> None:
    mapping = copies((128, 8), 4, 4)

    assert [mapping.element(0, lane) for lane in (1, 2, 31)] == [(0, 4), (1, 0), (15, 4)]


def test_copies_are_narrower_where_threads_are_many() -> None:
    """256 threads share 512 elements."""
    assert copies((64, 8), 4, 8).registers == ((0, 1),)


def test_copies_repeat_where_threads_are_left() -> None:
    held = holders(copies((2, 8), 4, 1))

    assert held == Counter(dict.fromkeys(elements(2, 8), 2))


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


def test_operands_that_are_not_aligned_are_not_copied_by_vectors() -> None:
    mapping = maps(own("simt.vectorized"), problem(shape=(128, 128, 126))).a

    assert mapping.registers[:2] != ALONG_ROWS


# ---- accesses
def by_access(kernel: str, **changes: Any) -> dict[str, access.Shared]:
    """What the accesses of a kernel to shared memory cost, by their names."""
    return simt_access.in_shared(own(kernel, **changes), problem())


@pytest.mark.parametrize(("interleave", "passes"), [(False, 4), (True, 2)])
def test_interleaved_lanes_read_b_in_half_the_passes(interleave: bool, passes: int) -> None:
    read = by_access("simt.pipelined", interleave=interleave)["B load"]

    assert read.wavefronts == passes * read.instructions


@pytest.mark.parametrize("interleave", [False, True])
def test_lanes_read_a_in_two_passes(interleave: bool) -> None:
    read = by_access("simt.pipelined", interleave=interleave)["A load"]

    assert read.wavefronts == 2 * read.instructions


def test_rows_of_an_odd_number_of_words_are_read_word_by_word_in_one_pass_each() -> None:
    read = by_access("simt.strip")["A load"]

    assert read.instructions == read.wavefronts


@pytest.mark.parametrize(
    ("kernel", "changes", "dtype", "name", "size"),
    [
        pytest.param(
            "simt.register", {}, torch.float16, "out store", 8, id="16-bit outputs leave 4 at once"
        ),
        pytest.param(
            "simt.naive",
            {"thread_n": 4, "piece_n": 4, "warp_n": 4},
            torch.float32,
            "B load",
            4,
            id="plain loads are of single elements",
        ),
    ],
)
def test_bytes_of_an_access_to_global_memory(
    kernel: str, changes: dict[str, int], dtype: torch.dtype, name: str, size: int
) -> None:
    requests = simt_access.in_global(own(kernel, **changes), problem(dtype=dtype))

    assert requests[name].bytes == size


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
