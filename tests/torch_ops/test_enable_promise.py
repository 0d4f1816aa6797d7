"""`outblas.enable(batch_invariant=True)`: products that only torch computes raise, and those that
torch makes of others keep the promise. When it holds, and what it leaves behind. The operators are
overridden on the CPU.
"""

import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import outblas
from outblas.call import fallback
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Rules

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor
RULES = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None, key="CPU", kernel="portable")
INVARIANT = RULES._replace(batch_invariant=True)

A, B, C = torch.randn(6, 5), torch.randn(5, 4), torch.randn(6, 4)
BATCH_A, BATCH_B, BATCH_C = torch.randn(3, 6, 5), torch.randn(3, 5, 4), torch.randn(3, 6, 4)
ENCODER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)


NO_KERNEL: dict[str, Callable[[], object]] = {
    "addmm and relu": lambda: torch._addmm_activation(B[0], A, B),
    "addmm and gelu": lambda: torch._addmm_activation(B[0], A, B, use_gelu=True),
    "addmm and relu out": lambda: torch._addmm_activation(B[0], A, B, out=torch.empty(6, 4)),
    "addmv": lambda: torch.addmv(A[:, 0], A, B[:, 0]),
    "addmv out": lambda: torch.addmv(A[:, 0], A, B[:, 0], out=torch.empty(6)),
    "addmv in place": lambda: A[:, 0].clone().addmv_(A, B[:, 0]),
    "mv": lambda: torch.mv(A, B[:, 0]),
    "a matrix by a vector": lambda: A @ B[:, 0],
    "a layer of a transformer in inference": lambda: ENCODER(torch.randn(2, 3, 8)),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_products_without_a_kernel_break_no_promise_unnoticed(name: str) -> None:
    """And they stay torch's where nothing is promised."""
    with (
        aten._enable(INVARIANT),
        pytest.raises(ValueError, match="torch alone has a kernel of aten's"),
    ):
        NO_KERNEL[name]()

    with aten._enable(RULES):
        NO_KERNEL[name]()


def test_nothing_that_is_multiplied_keeps_the_promise() -> None:
    with aten._enable(INVARIANT):
        assert torch.equal(torch.mv(A[:, :0], B[:0, 0]), torch.zeros(6))
        assert (A[:0] @ B).shape == (0, 4)
        assert torch.equal(A[:, :0] @ B[:0], torch.zeros(6, 4))
        none = torch.zeros(2, dtype=torch.int32)
        rows, experts = torch.zeros(0, 4), torch.zeros(2, 4, 4)
        assert torch.nn.functional.grouped_mm(rows, experts, offs=none).shape == (0, 4)


REFUSED: dict[str, Callable[[], Tensor]] = {
    "another dtype": lambda: A.double() @ B.double(),
    "a scaled batch": lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, alpha=2),
    "a scalar": lambda: torch.addmm(C, A, B, alpha=1e39),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_product_that_would_break_the_promise_is_refused(name: str) -> None:
    """That of a context, and that of `enable`."""
    match = "batch_invariant is True"
    with aten._enable(RULES), outblas.batch_invariant(), pytest.raises(ValueError, match=match):
        REFUSED[name]()
    with aten._enable(INVARIANT), pytest.raises(ValueError, match=match):
        REFUSED[name]()


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b, c: torch.mm(a, b),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5),
    "addmm of a row": lambda a, b, c: torch.addmm(b[0], a, b),
    "linear of a batch": lambda a, b, c: torch.nn.functional.linear(a[None], b.t())[0],
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None])[0],
    "in place": lambda a, b, c: c[: len(a)].clone().addmm_(a, b),
    "groups of batches": lambda a, b, c: torch.nn.functional.grouped_mm(a[None], b[None])[0],
    "compiled": torch.compile(lambda a, b, c: (a @ b).relu(), dynamic=True),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_thread_has_the_same_bits_in_every_batch(name: str) -> None:
    """Of 17 rows, alone and in parts, and in another thread, which has entered no context."""
    a, b, c = torch.randn(17, 40), torch.randn(40, 20), torch.randn(17, 20)
    product = ROWS[name]
    with aten._enable(INVARIANT) as enabled:
        whole = product(a, b, c)
        parts = [
            torch.cat([product(a[i : i + rows], b, c[i : i + rows]) for i in range(0, 17, rows)])
            for rows in (1, 8)
        ]
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(product, a[:5], b, c[:5]).result()

    assert all(torch.equal(part, whole) for part in parts)
    assert torch.equal(elsewhere, whole[:5])
    assert set(enabled.decisions.values()) == {aten.OURS}


# ---- when it holds: blocks of several threads, which end in any order
OPERATORS = "mm", "addmm.out", "addmm_", "bmm", "baddbmm", "_grouped_mm"


def kernels_now() -> list[str]:
    """Where the CPU's kernels of overridden operators were registered."""
    return [str(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS]


def test_disable_and_errors_give_the_operators_back() -> None:
    """`disable` may come first, and ends all blocks for good."""
    before = kernels_now()
    outblas.disable()
    assert kernels_now() == before
    with aten._enable(RULES), aten._enable(RULES):
        while_enabled = kernels_now()
        outblas.disable()
        assert aten._active is None
        assert kernels_now() == before
        later = aten._enable(RULES)

    assert all("aten.py" in name or "native" in name for name in while_enabled)
    remaining = aten._active
    with pytest.raises(KeyError), later:
        raise KeyError
    assert remaining is later
    assert kernels_now() == before


def test_blocks_that_overlap_end_in_any_order() -> None:
    """In threads of their own: the most recent one that has not ended holds."""
    before = kernels_now()
    for order in itertools.permutations(range(3)):
        with ThreadPoolExecutor(1) as pool:
            rules = [RULES._replace(min_flops=i) for i in range(3)]
            blocks = [pool.submit(aten._enable, each).result() for each in rules]
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


@pytest.mark.no_gpu
def test_it_says_that_it_does_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_seen", set())

    with pytest.warns(RuntimeWarning, match=r"enable\(\) does nothing on this machine"):
        outblas.enable()
    with warnings.catch_warnings(action="error"), outblas.enable() as enabled:
        torch.mm(A.half(), B.half())
    assert enabled.decisions == {}
