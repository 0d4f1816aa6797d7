"""`outblas.grouped_mm` with `counts` on a GPU, beside the products of single groups in float64:
sampled counts with epilogues between guards, and graphs that are replayed with other counts.
"""

import random
from typing import Any, NamedTuple

import pytest
import torch

import outblas
from outblas.core import grouped
from outblas.core.epilogue import composed, glu_split
from outblas.core.grouped import GroupedTensors
from outblas.hopper.gemm import group_host as host
from outblas.kernels import grouped as portable
from outblas.runtime.hooks import GroupedKernels

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

DRAWS = 25
KERNELS: dict[str, GroupedKernels] = {"hopper.grouped": host, "portable": portable}
# An activation, and the tensors besides operands. Of each, because each is a compile.
WANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    ("relu", ("bias",)),
    ("reglu", ("bias", "residual", "aux")),
    ("", ("residual", "aux")),
)


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small ones, so that sums are exact, and one rounding decides all bits of a result."""
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


def guarded(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of NaN between two others."""
    return torch.full((3, *shape), torch.nan, dtype=dtype, device="cuda")


class Call(NamedTuple):
    """A call of groups that have room for as many rows each. aux is the middle of `guarded`."""

    a: Tensor  # (groups, capacity, K)
    b: Tensor
    activation: str = ""
    tensors: GroupedTensors = grouped.NO_TENSORS

    def run(self, counts: Tensor, **options: Any) -> Tensor:
        given = {n: t for n, t in self.tensors._asdict().items() if t is not None}
        named = given | options | {"activation": self.activation or None}
        return outblas.grouped_mm(self.a, self.b, counts=counts, **named)

    def draw_counts(self, rng: random.Random) -> list[int]:
        """Few rows, as in decoding, all of them, and numbers for which there is no room."""
        room = self.a.shape[1]
        some = (0, 1, rng.randint(0, room), rng.randint(0, room), room, -5, 2**31 - 1)
        return rng.choices(some, k=self.a.shape[0])

    def check(self, result: Tensor, counts: list[int]) -> None:
        """Compares the rows that are there; aux is to be NaN in all others."""
        bias, residual, aux, *_ = self.tensors
        for group, count in enumerate(self.clamped(counts)):
            x = self.a[group, :count].double() @ self.b[group].double()
            if bias is not None:
                x = x + bias[group].double()
            y = composed(x, self.activation, None)
            if residual is not None:
                y = y + residual[group, :count].double()
            assert torch.equal(result[group, :count], y.to(result.dtype)), (group, count)
            if aux is not None:
                assert torch.equal(aux[group, :count], x.to(aux.dtype)), (group, count)
                assert aux[group, count:].isnan().all(), (group, count)

    def clamped(self, counts: list[int]) -> list[int]:
        return [min(max(count, 0), self.a.shape[1]) for count in counts]


def draw(
    rng: random.Random,
    activation: str,
    names: tuple[str, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Call:
    groups, room = rng.choice((1, 5, 40)), rng.choice((1, 16, 100, 512, 700))
    N, K = rng.choice((64, 136, 256, 1000)), rng.choice((8, 64, 200))
    wide = N * glu_split(activation)
    possible = {
        "bias": integers(groups, wide, dtype=out_dtype),
        "residual": integers(groups, room, N, dtype=out_dtype),
        "aux": guarded(groups, room, wide, dtype=out_dtype)[1],
    }
    return Call(
        integers(groups, room, K, dtype=dtype),
        integers(groups, wide, K, dtype=dtype).mT,
        activation,
        GroupedTensors(**{name: possible[name] for name in names}),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", range(len(WANTS)))
def test_sampled_counts(part: int, kernel: str) -> None:
    """The result starts as NaN, between guards, as aux does."""
    rng = random.Random(part)
    torch.manual_seed(part)
    dtype = (torch.bfloat16, torch.float16)[part % 2]
    out_dtype = torch.float32 if part == 2 else dtype

    for _ in range(DRAWS):
        call = draw(rng, *WANTS[part], dtype, out_dtype)
        drawn = call.draw_counts(rng)
        counts = torch.tensor(drawn, dtype=torch.int32, device="cuda")
        columns = call.b.shape[-1] // glu_split(call.activation)
        out = guarded(*call.a.shape[:2], columns, dtype=out_dtype)
        operands = call.a, call.b, out[1]
        tensors = call.tensors._replace(counts=counts)
        problem = grouped.describe(
            "masked", *operands, len(drawn), tensors, activation=call.activation
        )
        a, b, c, moved = grouped.in_planned_form("masked", *operands, tensors)
        assert KERNELS[kernel].unsupported(problem) is None

        KERNELS[kernel].run(problem, a, b, c, counts, moved)

        call.check(out[1], drawn)
        for group, count in enumerate(call.clamped(drawn)):
            assert out[1, group, count:].isnan().all()
        aux = call.tensors.aux
        for whole in (out, out if aux is None else aux._base):
            assert whole[0].isnan().all()
            assert whole[2].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", range(len(WANTS)))
def test_calls(part: int, kernel: str) -> None:
    rng = random.Random(-part)
    torch.manual_seed(part)

    for _ in range(DRAWS):
        call = draw(rng, *WANTS[part], torch.bfloat16, torch.bfloat16)
        drawn = call.draw_counts(rng)
        counts = torch.tensor(drawn, dtype=torch.int32, device="cuda")

        result = call.run(counts, kernel=kernel)

        call.check(result, drawn)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_is_replayed_with_other_counts(kernel: str) -> None:
    rng = random.Random(7)
    call = Call(
        integers(40, 64, 256, dtype=torch.bfloat16),
        integers(40, 128, 256, dtype=torch.bfloat16).mT,
    )
    counts = torch.zeros(40, dtype=torch.int32, device="cuda")
    call.run(counts, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run(counts, kernel=kernel)

    for _ in range(100):
        drawn = call.draw_counts(rng)
        counts.copy_(torch.tensor(drawn, dtype=torch.int32))
        graph.replay()
        call.check(result, drawn)


def test_rows_that_are_not_there_do_not_matter() -> None:
    """A tile that reaches into them multiplies infinities and NaN, and stores none of them."""
    a = integers(8, 64, 192, dtype=torch.bfloat16)
    b = integers(8, 256, 192, dtype=torch.bfloat16).mT
    drawn = [0, 1, 5, 63, 64, 7, 0, 2]
    for group, count in enumerate(drawn):
        a[group, count:] = (torch.nan, torch.inf)[group % 2]
    call = Call(a, b)

    result = call.run(
        torch.tensor(drawn, dtype=torch.int32, device="cuda"), kernel="hopper.grouped"
    )

    call.check(result, drawn)
    for group, count in enumerate(drawn):
        assert result[group, :count].isfinite().all()
