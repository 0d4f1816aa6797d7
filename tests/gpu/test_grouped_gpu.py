"""`outblas.grouped_mm` on a GPU, compared with GEMMs of single groups in float64: sampled groups
and counts with epilogues, gathers and scatters, every tile of hopper.grouped, graphs that are
replayed with other groups, gradients.
"""

import itertools
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.grouped_calls import (
    EXTENT,
    FLOATING,
    GroupedCall,
    check_close,
    check_equal,
    draw,
    empty_aux,
    guarded,
    subsets,
)

import outblas
from outblas.call.epilogue import ACTIVATIONS, GATED, glu_split
from outblas.call.grouped import Form
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm.group_rule import candidates

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

DRAWS = 25  # of each part, in parts that processes share
SIZES = (1, 7, 64, 129, 500, 2048, 5000)  # of the ragged dimension
ROOMS = (1, 16, 100, 512, 700)  # for the rows of a group
# Whether A and B are transposed in memory, as the kernel takes them.
LAYOUTS: dict[Form, tuple[tuple[bool, bool], tuple[bool, bool]]] = {
    "ragged_m": ((False, True), (False, False)),
    "masked": ((False, True), (False, True)),
    "ragged_n": ((False, True), (True, True)),
    "ragged_k": ((True, False), (True, False)),
}
COLUMNS = (8, 64, 136, 256, 1000)
GROUPS = (1, 2, 5, 31, 32)
MANY_GROUPS = (33, 100, 300)
HOPPER = "hopper.grouped"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relaid(call: GroupedCall, transposed: tuple[bool, bool]) -> GroupedCall:
    """The call on a GPU, with operands that lie transposed in memory or not."""
    there = call.on("cuda")
    operands = zip(("mat_a", "mat_b"), transposed, strict=True)
    columns = {
        n: there.tensors[n].mT.contiguous().mT for n, is_transposed in operands if is_transposed
    }
    return there.replaced(**columns)


class Wants(NamedTuple):
    """What a call has besides its operands."""

    activation: str = ""
    names: tuple[str, ...] = ()
    aux: bool = False

    def draw(self, form: Form, **how: Any) -> GroupedCall:
        """Draws a call of N columns of the result. Some rows are scattered outside of the result,
        and some that are gathered do not exist.
        """
        N = how.pop("N") * glu_split(self.activation)
        return draw(form, *self.names, activation=self.activation, N=N, index=torch.int32, **how)


def check(call: GroupedCall, result: Tensor, aux: Tensor | None) -> None:
    """Compares a result, and aux, which is NaN where no group writes it."""
    x, expected = call.x_and_result()
    check_equal(result, expected)
    if aux is not None:
        check_equal(aux, x)
        assert torch.equal(aux.isnan(), x.isnan())


def draw_ends(rng: random.Random, form: Form, count: int, extent: int) -> tuple[int, ...]:
    """Ends of even, random, few or skewed groups; or few rows, as in decoding, all of them, and
    counts for which there is no room.
    """
    if form == "masked":
        some = (0, 1, rng.randint(0, extent), rng.randint(0, extent), extent, -5, 2**31 - 1)
        return tuple(rng.choices(some, k=count))
    match rng.choice(["even", "random", "few", "skewed"]):
        case "even":
            return tuple(extent * (g + 1) // count for g in range(count))
        case "random":
            return tuple(sorted(rng.choices(range(extent + 1), k=count)))
        case "few":
            places = rng.choices(range(extent + 1), k=3)
            return tuple(sorted(rng.choices(places, k=count)))
    weights = [1 / (g + 1) for g in range(count)]
    rng.shuffle(weights)
    total = sum(weights)
    return tuple(int(extent * end / total) for end in itertools.accumulate(weights))


# ---- values. Of each part, because each is a compile.
WANTS: dict[Form, tuple[Wants, ...]] = {
    "ragged_m": (
        Wants(),
        Wants("relu", ("bias",)),
        Wants("reglu", ("bias",), aux=True),
        Wants("", ("residual", "scatter_index", "scatter_weights")),
        Wants("", ("residual",), aux=True),
        Wants("reglu", ("residual", "scatter_index"), aux=True),
        Wants("", ("bias",)),
        Wants("reglu", ("bias", "residual", "scatter_index", "scatter_weights")),
        Wants("", ("a_index",)),
        Wants("reglu", ("bias", "a_index"), aux=True),
        Wants("relu", ("residual", "a_index", "scatter_index", "scatter_weights")),
    ),
    "masked": (
        Wants(),
        Wants("relu", ("bias",)),
        Wants("reglu", ("bias", "residual"), aux=True),
        Wants("", ("residual",), aux=True),
    ),
    "ragged_n": (Wants(), Wants("relu", ("residual",), aux=True), Wants("", ("residual",))),
    "ragged_k": (
        Wants(),
        Wants("relu", ("bias", "residual")),
        Wants("reglu", ("bias",), aux=True),
        Wants("", ("residual",)),
    ),
}
PARTS = [(form, part) for form in WANTS for part in range(len(WANTS[form]))]


def draw_sizes(rng: random.Random, form: Form, groups: tuple[int, ...]) -> dict[str, Any]:
    extent, count = rng.choice(ROOMS if form == "masked" else SIZES), rng.choice(groups)
    sizes = {name: rng.choice(COLUMNS) for name in ("M", "N", "K")}
    ends = draw_ends(rng, form, count, extent)
    return {**sizes, "extent": extent, "ends": ends, "rows_of_a": rng.choice(SIZES)}


@pytest.mark.parametrize("kernel", [HOPPER, "portable", None])
@pytest.mark.parametrize(("form", "part"), PARTS)
def test_sampled_groups(form: Form, part: int, kernel: str | None) -> None:
    """By both kernels, and by the best one for operands that lie in any way. What no group reads is
    NaN.
    """
    rng = random.Random(f"{form} {part}")
    # The same for a part, because each pair is a compile.
    dtype = (BF16, F16)[part % 2]
    dtype = F32 if kernel == "portable" and part % 3 == 2 else dtype
    out_dtype = F32 if part in (2, 7) else dtype
    wants, groups = WANTS[form][part], MANY_GROUPS if part == 6 else GROUPS
    transposed = LAYOUTS[form][part // 2 % 2]
    if kernel is None:
        transposed = (form != "masked" and rng.random() < 0.5, rng.random() < 0.5)

    for _ in range(DRAWS if kernel == HOPPER else DRAWS // 5):
        sizes = draw_sizes(rng, form, groups)
        call = relaid(wants.draw(form, dtype=dtype, out_dtype=out_dtype, **sizes), transposed)
        aux = empty_aux(call, out_dtype) if wants.aux else None
        is_in_order = not {"a_index", "scatter_index"} & set(wants.names)
        armed = call.poisoned() if is_in_order else call

        check(call, armed.run(kernel=kernel, aux=aux), aux)


@pytest.mark.parametrize(
    ("form", "activation"),
    [
        (form, activation)
        for form in (*LAYOUTS, "batch")
        for activation in ACTIVATIONS
        if form != "ragged_n" or activation not in GATED  # columns of groups are no pairs
    ],
)
def test_activations(form: Form, activation: str) -> None:
    """Of exact sums, by the best kernel."""
    dtype = (BF16, F16, F32)[(len(form) + len(activation)) % 3]
    names = ("residual",) if form == "ragged_n" else ("bias", "residual")
    for M, N, K in ((19, 34, 20), (200, 264, 72)):
        call = draw(form, *names, activation=activation, dtype=dtype, M=M, N=N, K=K)

        result = call.on("cuda").run().cpu()

        if activation in ("relu", "reglu"):
            check_equal(result, call.expected())
        tolerance = {F32: 1e-4, F16: 2e-3, BF16: 1 / 64}[dtype]
        check_close(result, call.expected(), tolerance)


# What `test_every_tile` compiles for each tile.
EVERY_TILE: dict[str, tuple[Form, Wants]] = {
    "rows": ("ragged_m", Wants()),
    "terms": ("ragged_k", Wants()),
    "columns": ("ragged_n", Wants("relu", ("residual",), aux=True)),
    "counted rows": ("masked", Wants("reglu", ("bias", "residual"), aux=True)),
    "terms with an epilogue": ("ragged_k", Wants("reglu", ("bias", "residual"), aux=True)),
    "scattered rows": ("ragged_m", Wants("relu", ("residual", "scatter_index", "scatter_weights"))),
    "gathered rows": ("ragged_m", Wants("reglu", ("bias", "a_index"), aux=True)),
}


def by_config(config: Any) -> Any:
    """hopper.grouped with a config."""
    return SimpleNamespace(run=lambda problem, *tensors: host.launch(problem, config)(*tensors))


@pytest.mark.parametrize("name", EVERY_TILE)
@pytest.mark.parametrize("number", range(8))
def test_every_tile(number: int, name: str) -> None:
    """In a result that starts as NaN, between guards. Behind the last group, and where no row is
    scattered to, it stays.
    """
    form, wants = EVERY_TILE[name]
    rng = random.Random(number)
    sizes = [(1, 1), (700, 3), (600 if form == "masked" else 3000, 32)]
    if wants == Wants():
        sizes.append((2600, 300))  # for which a schedule is compiled that has room
    for extent, count in sizes:
        ends = draw_ends(rng, form, count, extent if form == "masked" else extent - extent // 5)
        how = {"extent": extent, "ends": ends, "rows_of_a": extent}
        call = wants.draw(form, M=200 if form == "ragged_k" else 264, N=264, K=200, **how)
        call = relaid(call, LAYOUTS[form][0])
        written = guarded(call, aux=wants.aux)
        assert host.unsupported(written.problem) is None

        tiles = candidates(written.problem)
        written.launch(by_config(tiles[number % len(tiles)]))

        check(call, written.out, written.aux if wants.aux else None)
        assert torch.equal(written.out.isnan(), call.expected().isnan())
        written.check_guards()


def test_terms_of_the_next_group_are_not_read_into_a_sum() -> None:
    """Infinities and NaN where the next group begins would not vanish in a product with zero."""
    call = draw("ragged_k", M=192, N=256, ends=(100, 133, 133, 640), extent=700)
    call = relaid(call, LAYOUTS["ragged_k"][0])
    expected, (a, b) = call.expected(), (call.tensors["mat_a"], call.tensors["mat_b"])
    a[:, 640:], b[640:] = torch.inf, torch.nan
    a[:, 133], b[133] = torch.nan, -torch.inf

    result = call.run(kernel=HOPPER)

    check_equal(result[:3], expected[:3])
    assert result[3].isnan().all()


# ---- calls
@pytest.mark.parametrize("form", ["ragged_m", "masked", "ragged_k"])
def test_a_graph_is_replayed_with_other_groups(form: Form) -> None:
    rng, extent = random.Random(5), 64 if form == "masked" else 1000
    call = draw(form, M=256, N=128, K=256, ends=(0,) * 40, extent=extent)
    call = relaid(call, LAYOUTS[form][0])
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()

    for _ in range(100):
        ends = torch.tensor(draw_ends(rng, form, 40, extent), dtype=torch.int32)
        call.tensors["counts" if form == "masked" else "offs"].copy_(ends)
        graph.replay()
        check_equal(result, call.expected())


def test_the_same_groups_give_the_same_bits_beside_any_others() -> None:
    a = torch.randn(3000, 512, device="cuda", dtype=BF16)
    b = torch.randn(8, 4096, 512, device="cuda", dtype=BF16).mT
    first = torch.tensor([0, 300, 300, 1000, 1001, 1500, 2000, 3000], device="cuda")
    second = torch.tensor([0, 300, 700, 1000, 1001, 1001, 2600, 3000], device="cuda")

    one, other = (outblas.grouped_mm(a, b, offs=offs.int()) for offs in (first, second))

    assert torch.equal(one[:300], other[:300])
    assert torch.equal(one[1000:1001], other[1000:1001])


def gradients(call: GroupedCall, result: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Of the sum of all that is defined."""
    is_defined = ~call.expected().isnan().to(result.device)
    return torch.autograd.grad(result[is_defined].double().sum(), list(leaves.values()))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_gradients(activation: str, dtype: torch.dtype) -> None:
    """Of real numbers; those of gathered rows are the same bits every time."""
    for rows in subsets(("a_index", "scatter_index", "scatter_weights")):
        names = "bias", "residual", *rows
        call = draw("ragged_m", *names, activation=activation, dtype=dtype, real=True, N=128, K=64)
        on_gpu, inputs = call.on("cuda"), [name for name in FLOATING if name in call.tensors]
        wide = {name: call.tensors[name].double().requires_grad_() for name in inputs}
        leaves = {name: on_gpu.tensors[name].requires_grad_() for name in inputs}

        ours, again = (gradients(call, on_gpu.replaced(**leaves).run(), leaves) for _ in range(2))

        theirs = gradients(call, call.replaced(**wide).expected(), wide)
        tolerance = 0.1 if dtype == BF16 else 1e-3
        for name, our, same, their in zip(inputs, ours, again, theirs, strict=True):
            assert torch.equal(our, same), name
            torch.testing.assert_close(
                our.cpu().double(), their, rtol=tolerance, atol=tolerance * EXTENT, msg=name
            )
