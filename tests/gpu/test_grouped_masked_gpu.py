"""`outblas.grouped_mm` with `counts` on a GPU, compared with GEMMs of single groups in float64:
sampled counts with epilogues between guards, and graphs that are replayed with other counts.
"""

import random

import pytest
import torch
from support.grouped_calls import GroupedCall, check_equal, draw, empty_aux, guarded

from outblas.core.epilogue import glu_split
from outblas.hopper.gemm import group_host as host
from outblas.kernels import grouped as portable
from outblas.runtime.hooks import GroupedKernels

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

DRAWS = 25
KERNELS: dict[str, GroupedKernels] = {"hopper.grouped": host, "portable": portable}
# An activation, the tensors besides operands, and whether there is an aux. Each is a compile.
WANTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("", (), False),
    ("relu", ("bias",), False),
    ("reglu", ("bias", "residual"), True),
    ("", ("residual",), True),
)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def draw_counts(rng: random.Random, groups: int, room: int) -> tuple[int, ...]:
    """Few rows, as in decoding, all of them, and numbers for which there is no room."""
    some = (0, 1, rng.randint(0, room), rng.randint(0, room), room, -5, 2**31 - 1)
    return tuple(rng.choices(some, k=groups))


def draw_call(
    rng: random.Random,
    activation: str,
    names: tuple[str, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> GroupedCall:
    groups, room = rng.choice((1, 5, 40)), rng.choice((1, 16, 100, 512, 700))
    N, K = rng.choice((64, 136, 256, 1000)), rng.choice((8, 64, 200))
    call = draw(
        "masked",
        *names,
        activation=activation,
        dtype=dtype,
        out_dtype=out_dtype,
        N=N * glu_split(activation),
        K=K,
        ends=draw_counts(rng, groups, room),
        extent=room,
    ).on("cuda")
    return call.replaced(mat_b=call.tensors["mat_b"].mT.contiguous().mT)


def check(got: Tensor, want: Tensor) -> None:
    """Compares the rows that are there; all others are to be NaN still."""
    check_equal(got, want)
    assert torch.equal(got.isnan(), want.isnan())


@kernels
@pytest.mark.parametrize("part", range(len(WANTS)))
def test_sampled_counts(part: int, kernel: str) -> None:
    """The result starts as NaN, between guards, as aux does."""
    rng, (activation, names, aux) = random.Random(part), WANTS[part]
    torch.manual_seed(part)
    dtype = (torch.bfloat16, torch.float16)[part % 2]
    out_dtype = torch.float32 if part == 2 else dtype

    for _ in range(DRAWS):
        call = draw_call(rng, activation, names, dtype, out_dtype)
        written = guarded(call, aux=aux)
        assert KERNELS[kernel].unsupported(written.problem) is None

        written.launch(KERNELS[kernel])

        check(written.out, call.expected())
        if aux:
            check(written.aux, call.x())
        written.check_guards()


@kernels
@pytest.mark.parametrize("part", range(len(WANTS)))
def test_calls(part: int, kernel: str) -> None:
    rng, (activation, names, with_aux) = random.Random(-part), WANTS[part]
    torch.manual_seed(part)

    for _ in range(DRAWS):
        call = draw_call(rng, activation, names, torch.bfloat16, torch.bfloat16)
        aux = empty_aux(call) if with_aux else None

        result = call.run(kernel=kernel, aux=aux)

        check_equal(result, call.expected())
        if aux is not None:
            check(aux, call.x())


@kernels
def test_a_graph_is_replayed_with_other_counts(kernel: str) -> None:
    rng = random.Random(7)
    call = draw("masked", N=128, K=256, ends=(0,) * 40, extent=64).on("cuda")
    call = call.replaced(mat_b=call.tensors["mat_b"].mT.contiguous().mT)
    call.run(kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run(kernel=kernel)

    for _ in range(100):
        call.tensors["counts"].copy_(torch.tensor(draw_counts(rng, 40, 64), dtype=torch.int32))
        graph.replay()
        check_equal(result, call.expected())


def test_rows_that_are_not_there_do_not_matter() -> None:
    """A tile that reaches into them multiplies infinities and NaN, and stores none of them."""
    counts = (0, 1, 5, 63, 64, 7, 0, 2)
    call = draw("masked", N=256, K=192, ends=counts, extent=64).on("cuda")
    call = call.replaced(mat_b=call.tensors["mat_b"].mT.contiguous().mT)
    want = call.expected()
    for group, count in enumerate(counts):
        call.tensors["mat_a"][group, count:] = (torch.nan, torch.inf)[group % 2]

    check_equal(call.run(kernel="hopper.grouped"), want)
