"""When `outblas.enable` holds: blocks of several threads, which end in any order, and what they
leave behind.
"""

import gc
import itertools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import outblas
from outblas.runtime import fallback
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Rules

pytestmark = pytest.mark.interpreter

RULES = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None, key="CPU", kernel="portable")


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


OPERATORS = "mm", "addmm.out", "addmm_", "bmm", "baddbmm", "_grouped_mm"
A, B = torch.ones(6, 5), torch.ones(5, 4)


def kernels_now() -> list[str]:
    """Where the CPU's kernels of overridden operators were registered."""
    return [str(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS]


def test_disable_gives_the_operators_back() -> None:
    """And may come first."""
    before = kernels_now()
    outblas.disable()
    assert kernels_now() == before
    aten._enable(RULES)
    while_enabled = kernels_now()

    outblas.disable()

    assert all("aten.py" in name or "native" in name for name in while_enabled)
    assert kernels_now() == before


def test_a_block_ends_with_an_error() -> None:
    before = kernels_now()

    with pytest.raises(KeyError), aten._enable(RULES):
        raise KeyError

    assert kernels_now() == before


def test_decisions_are_those_of_the_block_that_holds() -> None:
    with aten._enable(RULES) as outer:
        with aten._enable(RULES._replace(min_flops=1e9)) as inner:
            A @ B
        assert outer.decisions == {}
        assert "min_flops" in inner.decisions["mm 6x4x5 float32"]

        A @ B

        assert outer.decisions == {"mm 6x4x5 float32": aten.OURS}


@pytest.mark.filterwarnings("ignore:outblas. enable")
def test_it_takes_no_products_of_a_cpu() -> None:
    with outblas.enable() as enabled:
        torch.mm(A.half(), B.half())

    assert enabled.decisions == {}


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_blocks_that_overlap_end_in_any_order(order: tuple[int, ...]) -> None:
    """In threads of their own: the most recent one that has not ended holds."""
    before = kernels_now()
    with ThreadPoolExecutor(1) as pool:
        blocks = [pool.submit(aten._enable, RULES._replace(min_flops=i)).result() for i in range(3)]
    remaining = blocks.copy()

    for i in order:
        assert aten._active is remaining[-1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(blocks[i].__exit__, None, None, None).result()
        remaining.remove(blocks[i])

    assert aten._active is None
    assert kernels_now() == before


def test_a_block_may_be_entered_again_and_left_twice() -> None:
    """It ends with the last of those who entered it."""
    block = aten._enable(RULES)
    with block:
        with block:
            assert aten._active is block
        assert aten._active is block
    for _ in range(2):
        block.__exit__(None, None, None)
        assert aten._active is None
    other = aten._enable(RULES)

    with block:
        assert aten._active is block
    block.__exit__(None, None, None)

    assert aten._active is other


def test_disable_ends_all_blocks_for_good() -> None:
    with aten._enable(RULES), aten._enable(RULES):
        outblas.disable()
        assert aten._active is None
        later = aten._enable(RULES)

    assert aten._active is later


def test_enabling_keeps_nothing() -> None:
    def enable_often() -> int:
        for _ in range(50):
            with aten._enable(RULES):
                pass
        gc.collect()
        return len(gc.get_objects())

    enable_often()
    before = enable_often()

    assert enable_often() - before < 50


@pytest.mark.no_gpu
def test_it_says_that_it_does_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_seen", set())

    with pytest.warns(RuntimeWarning, match=r"enable\(\) does nothing on this machine"):
        outblas.enable()
    with warnings.catch_warnings(action="error"):
        outblas.enable()
