"""`outblas.scaled_grouped_mm` on a GPU, compared with GEMMs of single groups in float64: sampled
groups with epilogues between guards, every tile, scales of any strides, graphs that are replayed
with other groups, and what lies outside of groups.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.grouped_calls import GroupedCall, check_equal, guarded
from support.scaled_groups import FORMS, draw

from outblas.call import quantization
from outblas.call.epilogue import glu_split
from outblas.call.grouped import Form
from outblas.call.hooks import GroupedKernels
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm.group_rule import candidates
from outblas.kernels import grouped as portable

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
ROWS = "a_index", "scatter_index", "scatter_weights", "residual"
forms = pytest.mark.parametrize("form", FORMS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


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
    if out_dtype == F16:  # which holds no large results
        scale = scale / 64
    return call.replaced(scale_a=as_quantized(scale) if rng.random() < 0.5 else scale)


def as_quantized(scale: Tensor) -> Tensor:
    """Scales that lie as those of `quantize` do, by columns, which TMA loads in granules."""
    *rows, blocks = scale.shape
    return quantization.empty_scales((*rows, 128 * blocks), "1x128", scale.device).copy_(scale)


def by_config(config: Any) -> Any:
    """hopper.grouped with a config."""
    return SimpleNamespace(run=lambda problem, *tensors: host.launch(problem, config)(*tensors))


def check(call: GroupedCall, kernels: GroupedKernels) -> None:
    """The result of a kernel is exact. It starts as NaN between guards, and what belongs to no
    group stays. What no group reads is NaN, unless rows are gathered.
    """
    armed, scale = call, call.tensors["scale_a"]
    if "a_index" not in call.tensors:
        armed = call.poisoned()
        lying = torch.empty_strided(scale.shape, scale.stride(), device=scale.device)
        armed = armed.replaced(scale_a=lying.copy_(armed.tensors["scale_a"]))
    written = guarded(armed)
    assert kernels is portable or host.unsupported(written.problem) is None
    written.launch(kernels)
    written.check_guards()
    expected = call.expected()
    check_equal(written.out, expected)
    assert written.out[expected.isnan()].isnan().all(), "what belongs to no group is written"


# ---- values
@kernels
@pytest.mark.parametrize("part", range(len(WANTS)))
@forms
def test_sampled_groups(form: Form, part: int, kernel: str) -> None:
    rng = random.Random(part)
    for _ in range(DRAWS if kernel == "hopper.grouped" else DRAWS // 4):
        check(sample(rng, form, *WANTS[part], (BF16, F16, F32, F32)[part]), KERNELS[kernel])


# Activations, columns of the result and tiles. 640 columns are whole blocks, so that tiles of pairs
# sum one half after the other.
TILES = [
    *(("", 640, number) for number in range(6)),
    *(("reglu", 640, number) for number in range(5)),
    *(("reglu", 600, number) for number in range(4)),
]


@pytest.mark.parametrize(("activation", "N", "number"), TILES)
def test_every_tile_has_the_scales_of_its_rows_wherever_they_begin(
    activation: str, N: int, number: int
) -> None:
    """Groups of all remainders by 4, and of odd numbers of tiles; scales by columns and by rows."""
    call = draw(
        "ragged_m",
        "residual",
        out_dtype=F32,
        activation=activation,
        ends=(1, 131, 131, 517, 903, 904, 2999),
        extent=3000,
        N=N * glu_split(activation),
        K=400,
    ).on("cuda")
    scale = torch.ones_like(call.tensors["scale_a"]) if activation else call.tensors["scale_a"]
    for lying in (as_quantized(scale), scale):
        lying_call = call.replaced(scale_a=lying)
        tiles = candidates(guarded(lying_call).problem)
        check(lying_call, by_config(tiles[number]))


@kernels
@forms
def test_scales_of_any_strides(form: Form, kernel: str) -> None:
    """Columns of scales that follow each other, padded ones, and those between other values."""
    ends = {"ragged_m": (100, 100, 321), "masked": (7, 0, 100), "ragged_k": (128, 512, 1024)}[form]
    extent = {"ragged_m": 330, "masked": 100, "ragged_k": 1024}[form]
    call = draw(form, out_dtype=F32, ends=ends, extent=extent, M=200, N=264, K=1040).on("cuda")
    by_columns, padded, spread = ({} for _ in range(3))
    for name in ("scale_a", "scale_b"):
        t = call.tensors[name]
        by_columns[name] = t.mT.contiguous().mT
        padded[name] = torch.nn.functional.pad(t.mT, (0, 3))[..., :-3].mT
        spread[name] = t.repeat_interleave(2, -1)[..., ::2]

    for scales in (by_columns, padded, spread):
        written = guarded(call.replaced(**scales))
        written.launch(KERNELS[kernel])
        check_equal(written.out, call.expected())


@kernels
@pytest.mark.parametrize("N", [256, 4096])
def test_rows_are_gathered_and_scattered(N: int, kernel: str) -> None:
    call = draw("ragged_m", *ROWS, out_dtype=F32, ends=(10, 10, 900), extent=1000, N=N, K=272)
    check(call.on("cuda"), KERNELS[kernel])


@kernels
@forms
def test_wrong_ends_never_leave_the_operands(form: Form, kernel: str) -> None:
    for wrong in ((900, 5, 20), (-7, 30, 2**31 - 1), (-(2**31), 60, 3), (100, 200, 555)):
        written = guarded(draw(form, out_dtype=F32, ends=wrong, K=208).on("cuda"))
        written.launch(KERNELS[kernel])
        written.check_guards()


# ---- calls. Of each form: ends or counts of groups, others, and the extent.
REAL: dict[Form, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "ragged_m": ((700, 701, 2000), (0, 2000, 2000), 2000),
    "masked": ((300, 7, 0), (0, 300, 1), 300),
    "ragged_k": ((512, 512, 4096), (128, 1024, 2048), 4096),
}


@forms
def test_a_graph_is_replayed_with_other_groups(form: Form) -> None:
    ends, others, extent = REAL[form]
    call = draw(form, "bias", out_dtype=F32, ends=ends, extent=extent, N=256, M=128).on("cuda")
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()

    for replayed in (ends, others):
        groups = call.tensors["counts" if form == "masked" else "offs"]
        groups.copy_(torch.tensor(replayed, dtype=torch.int32))
        graph.replay()
        check_equal(result, call.expected())


@pytest.mark.parametrize("kernel", [*KERNELS, None])
@forms
def test_real_numbers_are_as_close_as_14_bits_of_each_block(form: Form, kernel: str | None) -> None:
    """The tensor cores sum up the products of a block; fp32 adds the sums of blocks. Equal calls
    have equal bits.
    """
    ends, _, extent = REAL[form]
    call = draw(form, real=True, out_dtype=F32, ends=ends, extent=extent, M=512, N=1024, K=2048)
    call = call.on("cuda")
    expected = call.expected()
    is_defined = ~expected.isnan()

    results = [call.run(kernel=kernel)[is_defined] for _ in range(20)]

    error, size = (results[0] - expected[is_defined]).norm(), expected[is_defined].norm()
    assert error <= 2.0**-11 * size, f"{error / size}"
    assert all(torch.equal(result, results[0]) for result in results)


@forms
def test_operands_that_hopper_does_not_take_run_on_the_portable_kernel(form: Form) -> None:
    """Terms that are not contiguous."""
    call = draw(form, N=250, K=300).on("cuda")
    a, b = call.tensors["mat_a"].mT.contiguous().mT, call.tensors["mat_b"].contiguous()
    lying = call.replaced(mat_a=a, mat_b=b)

    check_equal(lying.run(), call.expected())
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': it needs fp8 operands at"):
        lying.run(kernel="hopper.grouped")


EXPERTS: list[tuple[Form, tuple[int, ...], int]] = [
    ("ragged_m", (8000, 8128, 12000, 20000), 20000),
    ("masked", (1024, 3, 0, 700), 1024),
    ("masked", (1028, 3, 0, 700), 1028),  # scales of a place end inside of a tile
]


@pytest.mark.parametrize(("N", "K"), [(4096, 7168), (7168, 2048)])
@pytest.mark.parametrize(("form", "ends", "extent"), EXPERTS, ids=str)
def test_experts_of_deepseek(
    form: Form, ends: tuple[int, ...], extent: int, N: int, K: int
) -> None:
    call = draw(form, ends=ends, extent=extent, N=N, K=K).on("cuda")
    by_columns = call.replaced(scale_a=call.tensors["scale_a"].mT.contiguous().mT)
    expected = call.expected()

    for lying in (call, by_columns):
        check_equal(lying.run(kernel="hopper.grouped"), expected)
