"""`outblas.grouped_mm` on a GPU, compared with GEMMs of single groups in float64: sampled groups
with epilogues and scatters, every tile of hopper.grouped, graphs that are replayed with other
groups, gradients.
"""

import random
from typing import Any, NamedTuple

import pytest
import torch
from support.grouped_calls import (
    FORMS,
    GroupedCall,
    check_equal,
    draw,
    empty_aux,
    guarded,
)

import outblas
from outblas.core.epilogue import glu_split
from outblas.core.grouped import Form, GroupedProblem
from outblas.hopper.gemm import group_host as host

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

DRAWS = 25  # of each part: 675 samples, in parts that processes share
SIZES = (1, 7, 64, 129, 500, 2048, 5000)  # of the ragged dimension
# Whether A and B are transposed in memory, as the kernel takes them.
LAYOUTS: dict[Form, tuple[tuple[bool, bool], tuple[bool, bool]]] = {
    "ragged_m": ((False, True), (False, False)),
    "ragged_n": ((False, True), (True, True)),
    "ragged_k": ((True, False), (True, False)),
}
COLUMNS = (8, 64, 136, 256, 1000)
GROUPS = (1, 2, 5, 31, 32)
MANY_GROUPS = (33, 100, 300)
HOPPER = "hopper.grouped"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


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


def check(
    call: GroupedCall, result: Tensor, aux: Tensor | None, *, untouched: bool = False
) -> None:
    """Compares a result, and aux, which is NaN where no group writes it. The result is so too where
    it is `untouched`.
    """
    x, want = call.x_and_result()
    check_equal(result, want)
    if untouched:
        assert torch.equal(result.isnan(), want.isnan())
    if aux is not None:
        check_equal(aux, x)
        assert torch.equal(aux.isnan(), x.isnan())


def draw_ends(rng: random.Random, count: int, extent: int) -> tuple[int, ...]:
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
    ends, total = [], 0.0
    for weight in weights:
        total += weight
        ends.append(int(extent * total / sum(weights)))
    return tuple(min(end, extent) for end in ends)


# Of each part, because each is a compile.
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
    "ragged_n": (Wants(), Wants("relu", ("residual",), aux=True), Wants(), Wants("", ("residual",)))
    * 2,
    "ragged_k": (
        Wants(),
        Wants("relu", ("bias", "residual")),
        Wants("reglu", ("bias",), aux=True),
        Wants("", ("residual",)),
    )
    * 2,
}


@pytest.mark.parametrize(
    ("form", "part"), [(form, part) for form in FORMS for part in range(len(WANTS[form]))]
)
def test_sampled_groups(form: Form, part: int) -> None:
    """By the kernel for this GPU; in two parts operands lie in any way, for the best kernel."""
    rng = random.Random(f"{form} {part}")
    torch.manual_seed(part)
    # The same for a part, because each pair is a compile.
    dtype = (BF16, F16)[part % 2]
    out_dtype = F32 if part in (2, 7) else dtype
    wants, groups = WANTS[form][part], MANY_GROUPS if part == 6 else GROUPS
    kernel, transposed = HOPPER, LAYOUTS[form][part // 2 % 2]
    if part in (0, 4):
        kernel, transposed = None, (rng.random() < 0.5, rng.random() < 0.5)

    for _ in range(DRAWS):
        call = wants.draw(form, dtype=dtype, out_dtype=out_dtype, **draw_sizes(rng, groups))
        call = relaid(call, transposed)
        aux = empty_aux(call, out_dtype) if wants.aux else None

        check(call, call.run(kernel=kernel, aux=aux), aux)


def draw_sizes(
    rng: random.Random, groups: tuple[int, ...], columns: tuple[int, ...] = COLUMNS
) -> dict[str, Any]:
    extent, count = rng.choice(SIZES), rng.choice(groups)
    sizes = {name: rng.choice(columns) for name in ("M", "N", "K")}
    ends = draw_ends(rng, count, extent)
    return {**sizes, "extent": extent, "ends": ends, "rows_of_a": rng.choice(SIZES)}


@pytest.mark.parametrize("form", FORMS)
def test_the_portable_kernel(form: Form) -> None:
    rng = random.Random(form)
    torch.manual_seed(0)

    for dtype in (BF16, F16, F32) * 5:
        sizes = draw_sizes(rng, (*GROUPS, *MANY_GROUPS), (1, *COLUMNS))
        call = relaid(draw(form, dtype=dtype, **sizes), (rng.random() < 0.5, rng.random() < 0.5))
        check(call, call.run(kernel="portable"), None)


# What `test_every_tile` compiles for each tile.
EVERY_TILE: dict[str, tuple[Form, Wants]] = {
    "rows": ("ragged_m", Wants()),
    "terms": ("ragged_k", Wants()),
    "columns": ("ragged_n", Wants("relu", ("residual",), aux=True)),
    "rows with an epilogue": ("ragged_m", Wants("reglu", ("bias", "residual"), aux=True)),
    "terms with an epilogue": ("ragged_k", Wants("reglu", ("bias", "residual"), aux=True)),
    "scattered rows": ("ragged_m", Wants("relu", ("residual", "scatter_index", "scatter_weights"))),
    "gathered rows": ("ragged_m", Wants("reglu", ("bias", "a_index"), aux=True)),
}


class Configured:
    """hopper.grouped with a config."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def unsupported(self, problem: GroupedProblem) -> str | None:
        return host.unsupported(problem)

    def run(self, problem: GroupedProblem, *given: Any) -> None:
        host.launch(problem, self.config)(*given)


@pytest.mark.parametrize("name", EVERY_TILE)
@pytest.mark.parametrize("number", range(len(host._TILES)))
def test_every_tile(number: int, name: str) -> None:
    """In a result that starts as NaN, between guards. Behind the last group, and where no row is
    scattered to, it stays.
    """
    config, (form, wants) = host._candidates()[number], EVERY_TILE[name]
    if "a_index" in wants.names:
        config = host._gathering()[number % len(host._gathering())]
    rng = random.Random(number)
    torch.manual_seed(number)

    sizes = [(1, 1), (700, 3), (3000, 32)]
    if wants == Wants():
        sizes.append((2600, 300))  # for which a schedule is compiled that has room
    for extent, count in sizes:
        ends = draw_ends(rng, count, extent - extent // 5)
        how = {"extent": extent, "ends": ends, "rows_of_a": extent}
        call = wants.draw(form, M=200 if form == "ragged_k" else 264, N=264, K=200, **how)
        call = relaid(call, LAYOUTS[form][0])
        written = guarded(call, aux=wants.aux)
        assert host.unsupported(written.problem) is None

        written.launch(Configured(config))

        check(call, written.out, written.aux if wants.aux else None, untouched=True)
        written.check_guards()


def test_terms_of_the_next_group_are_not_read_into_a_sum() -> None:
    """Infinities and NaN where the next group begins would not vanish in a product with zero."""
    call = draw("ragged_k", M=192, N=256, ends=(100, 133, 133, 640), extent=700)
    call = relaid(call, LAYOUTS["ragged_k"][0])
    want, (a, b) = call.expected(), (call.tensors["mat_a"], call.tensors["mat_b"])
    a[:, 640:], b[640:] = torch.inf, torch.nan
    a[:, 133], b[133] = torch.nan, -torch.inf

    result = call.run(kernel=HOPPER)

    check_equal(result[:3], want[:3])
    assert result[3].isnan().all()


@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_a_graph_is_replayed_with_other_groups(form: Form) -> None:
    rng = random.Random(5)
    ends = (0,) * 40
    call = relaid(
        draw(form, M=256, N=128, K=256, ends=ends, extent=1000), (form == "ragged_k", False)
    )
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()

    for _ in range(100):
        call.tensors["offs"].copy_(torch.tensor(draw_ends(rng, 40, 1000), dtype=torch.int32))
        graph.replay()
        check_equal(result, call.expected())


def test_the_same_groups_give_the_same_bits_beside_any_others() -> None:
    a = torch.randn(3000, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8, 4096, 512, device="cuda", dtype=torch.bfloat16).mT
    first = torch.tensor([0, 300, 300, 1000, 1001, 1500, 2000, 3000], device="cuda")
    second = torch.tensor([0, 300, 700, 1000, 1001, 1001, 2600, 3000], device="cuda")

    one, other = (outblas.grouped_mm(a, b, offs=offs.int()) for offs in (first, second))

    assert torch.equal(one[:300], other[:300])
    assert torch.equal(one[1000:1001], other[1000:1001])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_torchs(dtype: torch.dtype) -> None:
    ends = (0, 100, 100, 613, 800)
    given = integers(900, 128, dtype=dtype), integers(5, 128, 256, dtype=dtype)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    a, b = (t.clone().requires_grad_() for t in given)
    wide_a, wide_b = (t.double().requires_grad_() for t in given)

    outblas.grouped_mm(a, b, offs=offs)[:800].float().sum().backward()
    begins = (0, *ends[:-1])
    torch.cat(
        [wide_a[i:j] @ wide_b[g] for g, (i, j) in enumerate(zip(begins, ends, strict=True))]
    ).sum().backward()

    for leaf, wide in ((a, wide_a), (b, wide_b)):
        assert leaf.grad is not None
        assert wide.grad is not None
        assert torch.equal(leaf.grad, wide.grad.to(dtype))
