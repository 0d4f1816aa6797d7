"""`outblas.scaled_grouped_mm` on a GPU, beside the products of single groups in float64: sampled
groups with epilogues between guards, scales of any strides, graphs that are replayed with other
groups, and what lies outside of groups.
"""

import random
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.grouped_calls import GroupedCall, check_equal, guarded
from support.scaled_groups import FORMS, draw

from outblas.core import quantization
from outblas.core.epilogue import glu_split
from outblas.core.grouped import Form, GroupedProblem
from outblas.hopper.gemm import group_host as host
from outblas.hopper.parts.config import HopperConfig
from outblas.kernels import grouped as portable
from outblas.runtime.hooks import GroupedKernels

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

DRAWS = 20
KERNELS: dict[str, GroupedKernels] = {"hopper.grouped": host, "portable": portable}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# An activation, and the tensors besides operands, scales and groups. Each is a compile.
WANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    ("relu", ("bias",)),
    ("reglu", ("bias", "residual")),
    ("", ("residual",)),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw_ends(rng: random.Random, form: Form, groups: int, extent: int) -> tuple[int, ...]:
    """Draws the ends of groups, or their counts, some of which are empty or extreme."""
    if form == "masked":
        some = (0, 1, rng.randint(0, extent), rng.randint(0, extent), extent, -5, 2**31 - 1)
        return tuple(rng.choices(some, k=groups))
    step = 128 if form == "ragged_k" else 1
    return tuple(sorted(rng.choices(range(0, extent + 1, step), k=groups)))


def sample(
    rng: random.Random, form: Form, activation: str, names: tuple[str, ...], out_dtype: torch.dtype
) -> GroupedCall:
    groups = rng.choice((1, 5, 32, 33, 130))
    gated = glu_split(activation) == 2
    sizes = {
        "ragged_m": (1, 16, 1000, 3000),
        "masked": (1, 16, 100, 600),
        "ragged_k": (128, 512) if gated else (128, 512, 2048),
    }
    extent = rng.choice(sizes[form])
    columns = (128, 256, 1024) if gated else (8, 64, 136, 256, 1000)
    call = draw(
        form,
        *names,
        a=rng.choice((E4M3, E4M3, E5M2)),
        b=rng.choice((E4M3, E4M3, E5M2)),
        out_dtype=out_dtype,
        activation=activation,
        M=rng.choice((8, 64, 200, 384)),
        N=rng.choice(columns) * glu_split(activation),
        K=rng.choice((16, 128, 144, 400) if gated else (16, 128, 144, 400, 1024)),
        ends=draw_ends(rng, form, groups, extent),
        extent=extent,
    ).on("cuda")
    scale = call.tensors["scale_a"]
    if gated:  # the product of two sums has twice their bits, and float32 is to hold it exactly
        scale = torch.ones_like(scale)
    return call.replaced(scale_a=as_quantized(scale) if rng.random() < 0.5 else scale)


def as_quantized(scale: Tensor) -> Tensor:
    """Scales that lie as those of `quantize` do, by columns, which TMA loads in granules."""
    *rows, blocks = scale.shape
    return quantization.empty_scales((*rows, 128 * blocks), "1x128", scale.device).copy_(scale)


def launch_between_guards(call: GroupedCall, kernels: GroupedKernels) -> Tensor:
    """Returns the result of a kernel, which starts as NaN, and checks that what lies around it
    stays.
    """
    written = guarded(call)
    assert kernels.unsupported(written.problem) is None
    written.launch(kernels)
    written.check_guards()
    return written.out


def check_exactly(call: GroupedCall, result: Tensor) -> None:
    """Compares all that is defined, and what must not be written."""
    want = call.expected()
    check_equal(result, want)
    assert result[want.isnan()].isnan().all(), "what belongs to no group is written"


# ---- values
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", range(len(WANTS)))
@pytest.mark.parametrize("form", FORMS)
def test_sampled_groups(form: Form, part: int, kernel: str) -> None:
    rng = random.Random(part)
    out_dtype = (BF16, F16, F32, F32)[part]

    for _ in range(DRAWS):
        call = sample(rng, form, *WANTS[part], out_dtype)
        if out_dtype == F16:  # which holds no large results
            call = call.replaced(scale_a=call.tensors["scale_a"] / 64)
        check_exactly(call, launch_between_guards(call, KERNELS[kernel]))


PLAIN = {f"{c.tile_m}x{c.tile_n} {c.cluster_m}x{c.cluster_n}": c for c in host._scaling(128, False)}
PAIRS = {f"pairs {c.tile_m} {c.cluster_m}x{c.cluster_n}": c for c in host._pairing()}


class Configured:
    """hopper.grouped with a config."""

    def __init__(self, config: HopperConfig) -> None:
        self.config = config

    def unsupported(self, problem: GroupedProblem) -> str | None:
        return host.unsupported(problem)

    def run(self, problem: GroupedProblem, *given: Any) -> None:
        host.launch(problem, self.config)(*given)


# What the rule takes: no gated pairs in tiles of 256 rows, and nothing else in those of pairs.
OF_TILES = [
    *((name, "") for name in PLAIN),
    *((name, "reglu") for name, config in (PLAIN | PAIRS).items() if config.tile_m < 256),
]


@pytest.mark.parametrize(("name", "activation"), OF_TILES)
def test_every_tile_has_the_scales_of_its_rows_wherever_they_begin(
    name: str, activation: str
) -> None:
    """Groups of all remainders by 4, and of odd numbers of tiles; scales by columns and by rows."""
    config = (PLAIN | PAIRS)[name]
    call = draw(
        "ragged_m",
        "residual",
        out_dtype=F32,
        activation=activation,
        ends=(1, 131, 131, 517, 903, 904, 2999),
        extent=3000,
        N=640 * glu_split(activation),
        K=400,
    ).on("cuda")
    scale = torch.ones_like(call.tensors["scale_a"]) if activation else call.tensors["scale_a"]
    for each in (as_quantized(scale), scale):
        lying = call.replaced(scale_a=each)
        written = guarded(lying)

        written.launch(Configured(config))

        check_exactly(lying, written.out)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_any_strides(form: Form, kernel: str) -> None:
    """Columns of scales that follow each other, padded ones, and those between other values."""
    ends = {"ragged_m": (100, 100, 321), "masked": (7, 0, 100), "ragged_k": (128, 512, 1024)}
    extent = {"ragged_m": 330, "masked": 100, "ragged_k": 1024}[form]
    call = draw(form, out_dtype=F32, ends=ends[form], extent=extent, M=200, N=264, K=1040).on(
        "cuda"
    )
    by_columns, padded, spread = ({} for _ in range(3))
    for name in ("scale_a", "scale_b"):
        t = call.tensors[name]
        by_columns[name] = t.mT.contiguous().mT
        padded[name] = torch.nn.functional.pad(t.mT, (0, 3))[..., :-3].mT
        spread[name] = t.repeat_interleave(2, -1)[..., ::2]

    for scales in (by_columns, padded, spread):
        lying = call.replaced(**scales)
        check_exactly(lying, launch_between_guards(lying, KERNELS[kernel]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("N", [256, 4096])
def test_rows_are_gathered_and_scattered(N: int, kernel: str) -> None:
    names = "a_index", "scatter_index", "scatter_weights", "residual"
    call = draw("ragged_m", *names, out_dtype=F32, ends=(10, 10, 900), extent=1000, N=N, K=272).on(
        "cuda"
    )

    check_exactly(call, launch_between_guards(call, KERNELS[kernel]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_what_belongs_to_no_group_does_not_matter(form: Form, kernel: str) -> None:
    """Neither values nor scales that are not finite, of A and of the terms of B."""
    ends = {"ragged_m": (5, 5, 300), "masked": (5, 0, 90), "ragged_k": (128, 128, 384)}[form]
    extent = {"ragged_m": 333, "masked": 100, "ragged_k": 640}[form]
    call = draw(form, out_dtype=F32, ends=ends, extent=extent, M=200, N=136, K=208).on("cuda")
    t = call.tensors
    bytes_a, bytes_b = t["mat_a"].view(torch.uint8), t["mat_b"].mT.view(torch.uint8)
    want = call.expected()
    if form == "masked":
        for group, count in enumerate(ends):
            bytes_a[group, count:], t["scale_a"][group, count:] = 127, torch.nan
    elif form == "ragged_m":
        bytes_a[ends[-1] :], t["scale_a"][ends[-1] :] = 127, torch.nan
    else:
        bytes_a[:, ends[-1] :], bytes_b[:, ends[-1] :] = 127, 127
        t["scale_a"][:, ends[-1] // 128 :] = torch.nan
        t["scale_b"][ends[-1] // 128 :] = torch.nan

    result = launch_between_guards(call, KERNELS[kernel])

    check_equal(result, want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_ends_never_leave_the_operands(form: Form, kernel: str) -> None:
    for wrong in ((900, 5, 20), (-7, 30, 2**31 - 1), (-(2**31), 60, 3), (100, 200, 555)):
        call = draw(form, out_dtype=F32, ends=wrong, K=208).on("cuda")

        launch_between_guards(call, KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_real_numbers_are_as_close_as_14_bits_of_each_block(form: Form, kernel: str) -> None:
    """The tensor cores sum up the products of a block; fp32 adds the sums of blocks."""
    ends = {"ragged_m": (500, 1000), "masked": (300, 150), "ragged_k": (1024, 4096)}[form]
    extent = {"ragged_m": 1000, "masked": 300, "ragged_k": 4096}[form]
    call = draw(form, real=True, out_dtype=F32, ends=ends, extent=extent, M=256, N=512, K=2048).on(
        "cuda"
    )
    want = call.expected()

    result = launch_between_guards(call, KERNELS[kernel]).double()

    is_defined = ~want.isnan()
    error, size = (result - want)[is_defined].norm(), want[is_defined].norm()
    assert error <= 2.0**-11 * size, f"{error / size}"


# ---- calls
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_replayed_with_other_groups(form: Form) -> None:
    groups = {"ragged_m": (100, 150, 333), "masked": (5, 100, 0), "ragged_k": (128, 512, 1024)}
    others = {"ragged_m": (0, 333, 333), "masked": (100, 0, 1), "ragged_k": (512, 512, 896)}
    extent = {"ragged_m": 333, "masked": 100, "ragged_k": 1024}[form]
    call = draw(form, "bias", out_dtype=F32, ends=groups[form], extent=extent, N=256, M=128).on(
        "cuda"
    )
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()

    for ends in (groups[form], others[form]):
        given = call.tensors["counts" if form == "masked" else "offs"]
        given.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        check_equal(result, call.expected())


@pytest.mark.parametrize("form", FORMS)
def test_equal_calls_have_equal_bits(form: Form) -> None:
    ends = {"ragged_m": (700, 701, 2000), "masked": (300, 7, 0), "ragged_k": (512, 512, 4096)}
    extent = {"ragged_m": 2000, "masked": 300, "ragged_k": 4096}[form]
    call = draw(form, real=True, ends=ends[form], extent=extent, M=512, N=1024, K=2048).on("cuda")

    first = call.run()

    is_defined = ~call.expected().isnan()
    for _ in range(50):
        assert torch.equal(call.run()[is_defined], first[is_defined])


@pytest.mark.parametrize("form", FORMS)
def test_the_public_call_runs_on_hopper(form: Form) -> None:
    call = draw(form, N=256, K=512).on("cuda")

    result = call.run(kernel="hopper.grouped")

    check_equal(result, call.expected())


@pytest.mark.parametrize("form", FORMS)
def test_operands_that_hopper_does_not_take_run_on_the_portable_kernel(form: Form) -> None:
    """Terms that are not contiguous."""
    call = draw(form, N=250, K=300).on("cuda")
    a, b = call.tensors["mat_a"].mT.contiguous().mT, call.tensors["mat_b"].contiguous()

    lying = call.replaced(mat_a=a, mat_b=b)

    check_equal(lying.run(), call.expected())
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': it needs fp8 operands at"):
        lying.run(kernel="hopper.grouped")


@pytest.mark.parametrize(("N", "K"), [(4096, 7168), (7168, 2048)])
@pytest.mark.parametrize("form", ["ragged_m", "masked"])
def test_experts_of_deepseek(form: Form, N: int, K: int) -> None:
    ends = (8000, 8128, 12000, 20000) if form == "ragged_m" else (1024, 3, 0, 700)
    extent = 20000 if form == "ragged_m" else 1024
    call = draw(form, ends=ends, extent=extent, N=N, K=K).on("cuda")

    result = call.run(kernel="hopper.grouped")

    check_equal(result, call.expected())


@pytest.mark.parametrize("capacity", [1024, 1028])
def test_scales_of_rows_that_tma_loads(capacity: int) -> None:
    """Those of a place are neighbours, and end inside of a tile or with it."""
    counts = (capacity, 3, 0, 700)
    call = draw("masked", ends=counts, extent=capacity, N=4096, K=7168).on("cuda")
    lying = call.replaced(scale_a=call.tensors["scale_a"].mT.contiguous().mT)

    result = lying.run(kernel="hopper.grouped")

    check_equal(result, call.expected())
