"""`outblas.grouped_mm` on a GPU, beside the products of single groups in float64: sampled groups
with epilogues and scatters, every tile of hopper.grouped, graphs that are replayed with other
groups, gradients.
"""

import functools
import random
from typing import Any, NamedTuple

import pytest
import torch

import outblas
from outblas.core import grouped
from outblas.core.epilogue import glu_split
from outblas.core.grouped import Form, GroupedTensors
from outblas.hopper.gemm import group_host as host

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

FORMS: tuple[Form, ...] = ("ragged_m", "ragged_n", "ragged_k")
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


class Extras(NamedTuple):
    """What a call asks for besides its products. aux and out are written."""

    activation: str = ""
    bias: Tensor | None = None
    residual: Tensor | None = None
    aux: Tensor | None = None
    a_index: Tensor | None = None
    scatter_index: Tensor | None = None
    scatter_weights: Tensor | None = None

    @property
    def tensors(self) -> GroupedTensors:
        given = {name: t for name, t in self._asdict().items() if name != "activation"}
        return GroupedTensors(**given)

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments of `grouped_mm`."""
        given = self._asdict()
        return {name: value for name, value in given.items() if isinstance(value, Tensor) or value}

    def activated(self, x: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                return x.relu()
            case "reglu":
                gate, value = x.chunk(2, dim=-1)
                return gate.relu() * value
        return x


NO_EXTRAS = Extras()


class Call(NamedTuple):
    """A product in a form, and where its groups end. All of its values are small integers, so that
    sums are exact, and one rounding decides all bits of a result.
    """

    form: Form
    a: Tensor
    b: Tensor
    ends: tuple[int, ...]

    @property
    def offs(self) -> Tensor:
        return torch.tensor(self.ends, dtype=torch.int32, device="cuda")

    def groups(self, a_index: Tensor | None = None) -> list[tuple[slice, Tensor, Tensor]]:
        """Returns the part of the ragged dimension and the operands of each group, in float64."""
        found, rows = [], self.a
        if a_index is not None:
            rows = self.a[a_index.long().clamp(0, self.a.shape[0] - 1)]
        for g, (i, j) in enumerate(zip((0, *self.ends[:-1]), self.ends, strict=True)):
            part = slice(i, j)
            match self.form:
                case "ragged_m":
                    operands = rows[part], self.b[g]
                case "ragged_n":
                    operands = self.a[g], self.b[:, part]
                case _:
                    operands = self.a[:, part], self.b[part]
            found.append((part, operands[0].double(), operands[1].double()))
        return found

    def shape(self, columns: int, rows: int = 0) -> tuple[int, ...]:
        """Returns the shape of a result with so many columns, and rows where others than A's are
        gathered.
        """
        lead = (len(self.ends),) if self.form == "ragged_k" else ()
        return (*lead, rows or self.a.shape[-2], columns)

    def part_of(self, t: Tensor, group: int, part: slice) -> Tensor:
        """Returns the part of a result, or of a tensor like it, that is a group's."""
        match self.form:
            case "ragged_m":
                return t[part]
            case "ragged_n":
                return t[:, part]
        return t[group]

    def check(self, result: Tensor, extras: Extras = NO_EXTRAS) -> None:
        for g, (part, a, b) in enumerate(self.groups(extras.a_index)):
            x, own = a @ b, functools.partial(self.part_of, group=g, part=part)
            if extras.bias is not None:
                x = x + extras.bias[g].double()
            if extras.aux is not None:
                assert torch.equal(own(extras.aux), x.to(result.dtype)), f"x of group {g} at {part}"
            y = extras.activated(x)
            if extras.scatter_weights is not None:
                y = y * extras.scatter_weights[part, None].double()
            if extras.scatter_index is not None:
                to = extras.scatter_index[part].long()
                inside = (to >= 0) & (to < result.shape[0])
                y, to = y[inside], to[inside]
                got, residual = result[to], None if extras.residual is None else extras.residual[to]
            else:
                got = own(result)
                residual = None if extras.residual is None else own(extras.residual)
            if residual is not None:
                y = y + residual.double()
            assert torch.equal(got, y.to(result.dtype)), f"group {g} at {part}"


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


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


def draw(
    rng: random.Random,
    form: Form,
    dtype: torch.dtype,
    *,
    groups: tuple[int, ...] = GROUPS,
    columns: tuple[int, ...] = COLUMNS,
    transposed: tuple[bool, bool] | None = None,
    halves: int = 1,
) -> Call:
    """Draws a call. `transposed`: which operands are transposed in memory, by default any.
    `halves`: columns of B for one of the result.
    """
    extent, count = rng.choice(SIZES), rng.choice(groups)
    M, N, K = (rng.choice(columns) for _ in range(3))
    match form:
        case "ragged_m":
            shapes: Any = (extent, K), (count, K, halves * N)
        case "ragged_n":
            shapes = (count, M, K), (K, extent)
        case _:
            shapes = (M, extent), (extent, halves * N)
    transposed = transposed or (rng.random() < 0.5, rng.random() < 0.5)
    a, b = (
        integers(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
        if is_transposed
        else integers(*shape, dtype=dtype)
        for shape, is_transposed in zip(shapes, transposed, strict=True)
    )
    return Call(form, a, b, draw_ends(rng, count, extent))


class Wants(NamedTuple):
    """Which of `Extras` a call has."""

    activation: str = ""
    names: tuple[str, ...] = ()

    @property
    def halves(self) -> int:
        return glu_split(self.activation)

    def extras(self, call: Call, dtype: torch.dtype) -> Extras:
        """Draws the tensors. Rows are scattered to a permutation, of which a few leave the result,
        and gathered from any rows of A, a few of which do not exist. aux starts as NaN.
        """
        wide = call.b.shape[-1]
        rows = call.ends[-1] + 11 if "a_index" in self.names else call.a.shape[-2]
        shape = call.shape(wide // self.halves, rows)
        span = call.a.shape[-2] + 4
        index = torch.randperm(rows, device="cuda", dtype=torch.int32)
        index = torch.where(index % 17 == 3, index - rows, index)
        index = torch.where(index % 17 == 5, index + rows, index)
        found = {
            "bias": lambda: integers(len(call.ends), wide, dtype=dtype),
            "residual": lambda: integers(*shape, dtype=dtype),
            "aux": lambda: torch.full(
                call.shape(wide, rows), torch.nan, dtype=dtype, device="cuda"
            ),
            "a_index": lambda: torch.randint(-2, span, (rows,), device="cuda", dtype=torch.int32),
            "scatter_index": lambda: index,
            "scatter_weights": lambda: integers(rows, dtype=torch.float32),
        }
        return Extras(self.activation, **{name: found[name]() for name in self.names})


# Of each part, because each is a compile.
WANTS: dict[Form, tuple[Wants, ...]] = {
    "ragged_m": (
        Wants(),
        Wants("relu", ("bias",)),
        Wants("reglu", ("bias", "aux")),
        Wants("", ("residual", "scatter_index", "scatter_weights")),
        Wants("", ("residual", "aux")),
        Wants("reglu", ("residual", "aux", "scatter_index")),
        Wants("", ("bias",)),
        Wants("reglu", ("bias", "residual", "scatter_index", "scatter_weights")),
        Wants("", ("a_index",)),
        Wants("reglu", ("bias", "aux", "a_index")),
        Wants("relu", ("residual", "a_index", "scatter_index", "scatter_weights")),
    ),
    "ragged_n": (Wants(), Wants("relu", ("residual", "aux")), Wants(), Wants("", ("residual",)))
    * 2,
    "ragged_k": (
        Wants(),
        Wants("relu", ("bias", "residual")),
        Wants("reglu", ("bias", "aux")),
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
    dtype = (torch.bfloat16, torch.float16)[part % 2]
    out_dtype = torch.float32 if part in (2, 7) else dtype
    wants, groups = WANTS[form][part], MANY_GROUPS if part == 6 else GROUPS
    kernel, transposed = HOPPER, LAYOUTS[form][part // 2 % 2]
    if part in (0, 4):
        kernel, transposed = None, (rng.random() < 0.5, rng.random() < 0.5)

    for _ in range(DRAWS):
        call = draw(rng, form, dtype, groups=groups, transposed=transposed, halves=wants.halves)
        extras = wants.extras(call, out_dtype)

        result = outblas.grouped_mm(
            call.a, call.b, offs=call.offs, out_dtype=out_dtype, kernel=kernel, **extras.options
        )

        call.check(result, extras)


@pytest.mark.parametrize("form", FORMS)
def test_the_portable_kernel(form: Form) -> None:
    rng = random.Random(form)
    torch.manual_seed(0)

    for dtype in (torch.bfloat16, torch.float16, torch.float32) * 5:
        call = draw(rng, form, dtype, columns=(1, *COLUMNS), groups=(*GROUPS, *MANY_GROUPS))
        call.check(outblas.grouped_mm(call.a, call.b, offs=call.offs, kernel="portable"))


# What `test_every_tile` compiles for each tile.
EVERY_TILE: dict[str, tuple[Form, Wants]] = {
    "rows": ("ragged_m", Wants()),
    "terms": ("ragged_k", Wants()),
    "columns": ("ragged_n", Wants("relu", ("residual", "aux"))),
    "rows with an epilogue": ("ragged_m", Wants("reglu", ("bias", "residual", "aux"))),
    "terms with an epilogue": ("ragged_k", Wants("reglu", ("bias", "residual", "aux"))),
    "scattered rows": ("ragged_m", Wants("relu", ("residual", "scatter_index", "scatter_weights"))),
    "gathered rows": ("ragged_m", Wants("reglu", ("bias", "aux", "a_index"))),
}


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
        call = Call(form, *operands_of(form, extent, count, wants.halves), ends)
        extras = wants.extras(call, torch.bfloat16)
        rows = 0 if extras.a_index is None else len(extras.a_index)
        shape = call.shape(call.b.shape[-1] // wants.halves, rows)
        guarded = torch.full((3, *shape), torch.nan, dtype=torch.bfloat16, device="cuda")
        out, given = guarded[1], (form, call.a, call.b)
        problem = grouped.describe(*given, out, count, extras.tensors, activation=extras.activation)
        a, b, c, tensors = grouped.in_planned_form(*given, out, extras.tensors)
        assert host.unsupported(problem) is None

        host.launch(problem, config)(a, b, c, call.offs, tensors)

        call.check(out, extras)
        assert guarded[0].isnan().all()
        assert guarded[2].isnan().all()
        for t in untouched(call, out, extras):
            assert t.isnan().all()


def operands_of(form: Form, extent: int, count: int, halves: int) -> tuple[Tensor, Tensor]:
    """Returns operands that lie as the kernel takes them."""
    dtype = torch.bfloat16
    match form:
        case "ragged_m":
            return (
                integers(extent, 200, dtype=dtype),
                integers(count, 264 * halves, 200, dtype=dtype).mT,
            )
        case "ragged_n":
            return integers(count, 264, 200, dtype=dtype), integers(extent, 200, dtype=dtype).t()
    return integers(extent, 200, dtype=dtype).t(), integers(extent, 264 * halves, dtype=dtype)


def untouched(call: Call, out: Tensor, extras: Extras) -> list[Tensor]:
    """Returns what no group has of the result and of aux."""
    end, left = call.ends[-1], [out] if extras.aux is None else [out, extras.aux]
    match call.form:
        case "ragged_k":
            return []
        case "ragged_n":
            return [t[:, end:] for t in left]
    if extras.scatter_index is None:
        return [t[end:] for t in left]
    named = extras.scatter_index[:end].long()
    is_named = torch.zeros(len(out), dtype=torch.bool, device="cuda")
    is_named[named[(named >= 0) & (named < len(out))]] = True
    return [out[~is_named]]


def test_terms_of_the_next_group_are_not_read_into_a_sum() -> None:
    """Infinities and NaN where the next group begins would not vanish in a product with zero."""
    a = integers(700, 192, dtype=torch.bfloat16).t()
    b = integers(700, 256, dtype=torch.bfloat16)
    ends = (100, 133, 133, 640)
    clean = Call("ragged_k", a.clone(memory_format=torch.preserve_format), b.clone(), ends)
    a[:, 640:], b[640:] = torch.inf, torch.nan
    a[:, 133], b[133] = torch.nan, -torch.inf

    result = outblas.grouped_mm(a, b, offs=clean.offs, kernel="hopper.grouped")

    whole = [group for group in range(4) if group != 3]
    want = torch.stack([x @ y for _, x, y in clean.groups()])
    assert torch.equal(result[whole], want[whole].bfloat16())
    assert result[3].isnan().all()


@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_a_graph_is_replayed_with_other_groups(form: Form) -> None:
    rng = random.Random(5)
    a, b = integers(1000, 256, dtype=torch.bfloat16), integers(40, 256, 128, dtype=torch.bfloat16)
    if form == "ragged_k":
        a, b = a.t(), integers(1000, 128, dtype=torch.bfloat16)
    offs = torch.zeros(40, dtype=torch.int32, device="cuda")
    outblas.grouped_mm(a, b, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = outblas.grouped_mm(a, b, offs=offs)

    for _ in range(100):
        call = Call(form, a, b, draw_ends(rng, 40, 1000))
        offs.copy_(call.offs)
        graph.replay()
        call.check(result)


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
