"""Problems in normal form: broadcasting, merging and folding of batches, overlap, and errors that
name arguments.
"""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas.call import problem, tensor_memory


def check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """What a kernel does with a Problem, by its definition, is torch's product: every element
    through explicit strides.
    """
    want = torch.matmul(a, b) if c is None else torch.addmm(c, a, b)
    out = torch.full_like(want, torch.nan)
    p = problem.problem(a, b, out, c)

    def element(t: torch.Tensor, strides: tuple[int, ...], *index: int) -> torch.Tensor:
        offset = t.storage_offset() + sum(i * s for i, s in zip(index, strides, strict=True))
        return t.as_strided((), (), offset)

    for *batch, m, n in itertools.product(*map(range, (*p.batch, p.M, p.N))):
        terms = [element(a, p.a, *batch, m, k) * element(b, p.b, *batch, k, n) for k in range(p.K)]
        total = sum(terms, torch.zeros(()))
        if c is not None and p.c is not None:
            total = total + element(c, p.c, m, n)
        element(out, p.out, *batch, m, n).copy_(total)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((4,), (4,)),
        ((4,), (4, 3)),
        ((2, 4), (4,)),
        ((2, 4), (4, 3)),
        ((5, 2, 4), (4, 3)),
        ((5, 1, 4), (4, 3)),
        ((5, 2, 4), (4,)),
        ((4,), (5, 4, 3)),
        ((2, 4), (5, 4, 3)),
        ((5, 2, 4), (5, 4, 3)),
        ((2, 3, 2, 4), (3, 4, 3)),
        ((2, 1, 2, 4), (3, 4, 3)),
        ((2, 1, 3, 2, 4), (2, 1, 4, 3)),
        ((1, 1, 2, 4), (1, 4, 3)),
        ((3, 1, 1, 4), (2, 4, 1)),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_problem_describes_torch_matmul(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], transposed: bool
) -> None:
    a, b = (torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) for shape in (shape_a, shape_b))
    if transposed:
        a, b = (
            t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t for t in (a, b)
        )
    assert problem.check_pair(a, b) == tuple(torch.matmul(a, b).shape)
    check(a, b)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_problem_describes_any_strides(data: st.DataObject) -> None:
    sizes = st.integers(1, 3)
    batch = data.draw(st.lists(sizes, max_size=3))
    M, N, K = (data.draw(sizes) for _ in range(3))

    def operand(rows: int, columns: int) -> torch.Tensor:
        shape = [
            data.draw(st.sampled_from([1, size]))
            for size in batch[data.draw(st.integers(0, len(batch))) :]
        ]
        shape += [rows, columns]
        order = data.draw(st.permutations(range(len(shape))))
        base = torch.randint(-8, 9, [shape[i] for i in order]).float()
        view = base.permute([order.index(i) for i in range(len(shape))])
        return (
            view.expand(*[-1] * view.dim())
            if data.draw(st.booleans())
            else view[..., :1].expand(*shape)
        )

    check(operand(M, K), operand(K, N))


@pytest.mark.parametrize("addend", [(3, 2), (2,), (1, 2), (3, 1), (1,), ()])
def test_addend_broadcasts(addend: tuple[int, ...]) -> None:
    check(*(torch.randint(-8, 9, shape).float() for shape in ((3, 4), (4, 2), addend)))


@pytest.mark.parametrize(
    ("a", "shape_b", "batch", "M"),
    [
        (torch.empty(5, 6, 4), (4, 3), (), 30),
        (torch.empty(7, 5, 6, 4), (4, 3), (), 210),
        (torch.empty(5, 1, 4), (4, 3), (), 5),
        (torch.empty(5, 6, 8)[..., :4], (4, 3), (), 30),
        (torch.empty(5, 7, 4)[:, :6], (4, 3), (5,), 6),
        (torch.empty(6, 4).expand(5, 6, 4), (4, 3), (5,), 6),
        (torch.empty(5, 6, 4), (5, 4, 3), (5,), 6),
        (torch.empty(7, 5, 6, 4), (7, 5, 4, 3), (35,), 6),
        (torch.empty(7, 5, 6, 4), (5, 4, 3), (7, 5), 6),
    ],
)
def test_batches_merge_and_fold(
    a: torch.Tensor, shape_b: tuple[int, ...], batch: tuple[int, ...], M: int
) -> None:
    b = torch.empty(shape_b)
    p = problem.problem(a, b, torch.matmul(a, b))
    assert (p.batch, p.M) == (batch, M)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (8, 4, 1), True),
        ((0, 4), (0, 0), False),
        ((1, 1), (1, 1), False),
    ],
)
def test_out_that_overlaps_itself(
    shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool
) -> None:
    out = torch.empty(100).as_strided(shape, strides)
    with pytest.raises(ValueError, match="out has strides") if overlaps else nullcontext():
        problem.check_out(out, shape, out.dtype, out.device)


def test_interleaved_columns_do_not_overlap() -> None:
    buffer = torch.empty(4, 10)
    problem.check_overlap(buffer[:, :5], a=buffer[:, 5:])
    problem.check_overlap(buffer[::2], a=buffer[1::2])
    with pytest.raises(ValueError, match="out overlaps b in memory"):
        problem.check_overlap(buffer[:, :5], a=buffer[:, 5:], b=buffer[:, 4:9])


def test_alignment_of_each_operand() -> None:
    buffer = torch.empty(256, dtype=torch.float16)
    buffer = buffer[-buffer.data_ptr() % 256 // 2 :]
    a, b, out = buffer[0:4].view(2, 2), buffer[9:13].view(2, 2), buffer[36:40].view(2, 2)
    assert problem.problem(a, b, out).alignment == (tensor_memory.LINE, 2, 8) == (128, 2, 8)


def test_fake_tensors_share_no_memory() -> None:
    """Their addresses are offsets into nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, out = torch.empty(2, 3), torch.empty(4, 2)[1:3]
        problem.check_overlap(out, a=a)
