"""Partial sums are added in the order of K, to the bit, whoever comes last.

The kernel's own source adds numbers in fp32 here; `test_protocol` runs it with all that happens at
the same time.
"""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from protocol.launch import modules
from protocol.tensors import GlobalPointer, GlobalWords

LANE, UNIT, UNITS, FIRST = 5, 1, 2, 3  # a thread, its warpgroup of so many, the tile's first place
WIDEST = 208  # accumulators that a thread may have
SCALES = np.array([3e-8, -1.0, 1.0, 16777216.0, -0.0, 1e-38], np.float32)


def copy(atom: object, source: GlobalWords, target: np.ndarray) -> None:
    first = source.pointer.index
    target[:] = source.pointer.memory[first : first + source.count]


CUTE = SimpleNamespace(
    copy=copy,
    size=len,
    make_copy_atom=lambda *_, **__: None,
    make_ptr=lambda dtype, pointer, space, assumed_align: pointer,
    make_rmem_tensor=lambda shape, dtype: np.full(shape, np.nan, np.float32),
    make_tensor=GlobalWords,
)


@pytest.fixture
def splitk_reduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, whose registers and memory are arrays of fp32."""
    module = modules().find("gemm.splitk_reduce")
    monkeypatch.setattr(module, "cute", CUTE)
    return module


def partitions(registers: int, total: int) -> np.ndarray:
    """A thread's sums of each partition: numbers whose sum depends on the order of additions, and
    zeros of either sign.
    """
    draw = np.random.default_rng(registers + 1000 * total)
    sums = draw.standard_normal((total, registers)).astype(np.float32)
    sums[:, : registers // 2] *= draw.choice(SCALES, (total, registers // 2))
    sums[:, 0] = -0.0
    return sums


def in_order(sums: np.ndarray) -> np.ndarray:
    """0 + the first + the second, and so on."""
    total = np.zeros(sums.shape[1], np.float32)
    for each in sums:
        total = total + each
    return total


def added(
    splitk_reduce: ModuleType, sums: np.ndarray, index: int, *, in_registers: bool
) -> np.ndarray:
    """What the thread of partition `index` has when it comes last. Its own sums lie in the
    workspace only where they are not kept in registers.
    """
    total, registers = sums.shape
    stride, vectors = registers * 128, registers // 4
    memory = np.full((FIRST + total) * UNITS * stride, np.nan, np.float32)
    for p in range(total):
        if p == index and in_registers:
            continue
        place = ((FIRST + p) * UNITS + UNIT) * stride
        for j in range(vectors):
            at = place + (j * 128 + LANE) * 4
            memory[at : at + 4] = sums[p, 4 * j : 4 * j + 4]
    workspace = SimpleNamespace(sums=SimpleNamespace(iterator=GlobalPointer(memory, 0)))
    reduction = SimpleNamespace(workspace=workspace, unit=UNIT, units=UNITS, lane=LANE)
    partition = SimpleNamespace(index=index, total=total, workspace_index=FIRST)
    acc = sums[index].copy()
    add = splitk_reduce.add_other_partials if in_registers else splitk_reduce.add_partials
    add(reduction, acc, partition, stride)
    return acc


def test_the_order_of_additions_shows_in_these_numbers() -> None:
    sums = partitions(64, 4)

    assert not np.array_equal(in_order(sums), in_order(sums[::-1]))
    assert not np.array_equal(in_order(sums), sums[0] + in_order(sums[1:]))


KEPT = [(n, total, True) for n in (36, 64, 96, 128, 192, WIDEST) for total in (2, 3, 5)]
WRITTEN = [(n, total, False) for n in (8, 32) for total in (2, 9)]


@pytest.mark.parametrize(("registers", "total", "in_registers"), KEPT + WRITTEN)
def test_own_sums_are_added_at_their_place_in_the_order_of_k(
    splitk_reduce: ModuleType, registers: int, total: int, in_registers: bool
) -> None:
    """Those of large tiles from registers."""
    sums = partitions(registers, total)
    expected = in_order(sums).view(np.uint32)

    assert splitk_reduce.keeps_own(registers) is in_registers
    for index in range(total):
        result = added(splitk_reduce, sums, index, in_registers=in_registers).view(np.uint32)

        assert np.array_equal(result, expected), f"partition {index} of {total} comes last"
