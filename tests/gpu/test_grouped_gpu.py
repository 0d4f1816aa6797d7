"""`outblas.grouped_mm` on a GPU, beside the products of single groups in float64: sampled groups,
every tile of hopper.grouped, graphs that are replayed with other groups, gradients.
"""

import random
from typing import Any, NamedTuple

import pytest
import torch

import outblas
from outblas.core import grouped
from outblas.core.grouped import Form
from outblas.hopper.grouped import host

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

FORMS: tuple[Form, ...] = ("ragged_m", "ragged_n", "ragged_k")
PARTS, DRAWS = 20, 25  # 500 samples, in parts that processes share
SIZES = (1, 7, 64, 129, 500, 2048, 5000)  # of the ragged dimension
COLUMNS = (1, 8, 64, 136, 256, 1000)
GROUPS = (1, 2, 5, 31, 32, 33, 100, 300)


class Call(NamedTuple):
    """A product in a form, and where its groups end."""

    form: Form
    a: Tensor
    b: Tensor
    ends: tuple[int, ...]

    @property
    def offs(self) -> Tensor:
        return torch.tensor(self.ends, dtype=torch.int32, device="cuda")

    def groups(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Returns the part of the result and the operands of each group, in float64."""
        found = []
        for g, (i, j) in enumerate(zip((0, *self.ends[:-1]), self.ends, strict=True)):
            part = slice(i, j)
            match self.form:
                case "ragged_m":
                    operands = self.a[part], self.b[g]
                case "ragged_n":
                    operands = self.a[g], self.b[:, part]
                case _:
                    operands = self.a[:, part], self.b[part]
            found.append((part, operands[0].double(), operands[1].double()))
        return found

    def check(self, result: Tensor, bias: Tensor | None = None) -> None:
        for g, (part, a, b) in enumerate(self.groups()):
            want = a @ b
            if bias is not None:
                want = want + bias[g].double()
            match self.form:
                case "ragged_m":
                    got = result[part]
                case "ragged_n":
                    got = result[:, part]
                case _:
                    got = result[g]
            assert torch.equal(got, want.to(result.dtype)), f"group {g} at {part}"


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


def draw(rng: random.Random, form: Form, dtype: torch.dtype) -> Call:
    extent, count = rng.choice(SIZES), rng.choice(GROUPS)
    M, N, K = (rng.choice(COLUMNS) for _ in range(3))
    match form:
        case "ragged_m":
            shapes: Any = (extent, K), (count, K, N)
        case "ragged_n":
            shapes = (count, M, K), (K, extent)
        case _:
            shapes = (M, extent), (extent, N)
    a, b = (
        integers(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
        if rng.random() < 0.5
        else integers(*shape, dtype=dtype)
        for shape in shapes
    )
    return Call(form, a, b, draw_ends(rng, count, extent))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(PARTS))
def test_sampled_groups(part: int, form: Form) -> None:
    rng = random.Random(f"{form} {part}")
    torch.manual_seed(part)
    # The same for a part, because each pair is a compile.
    dtype = rng.choice([torch.bfloat16, torch.float16])
    out_dtype = rng.choice([dtype, torch.float32])

    for _ in range(DRAWS):
        call = draw(rng, form, dtype)
        bias = None
        if form != "ragged_n" and rng.random() < 0.3:
            bias = integers(len(call.ends), call.b.shape[-1], dtype=out_dtype)

        result = outblas.grouped_mm(call.a, call.b, offs=call.offs, bias=bias, out_dtype=out_dtype)

        call.check(result, bias)


@pytest.mark.parametrize("form", FORMS)
def test_the_portable_kernel(form: Form) -> None:
    rng = random.Random(form)
    torch.manual_seed(0)

    for dtype in (torch.bfloat16, torch.float16, torch.float32) * 5:
        call = draw(rng, form, dtype)
        call.check(outblas.grouped_mm(call.a, call.b, offs=call.offs, kernel="portable"))


@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
@pytest.mark.parametrize("number", range(len(host._TILES)))
def test_every_tile(number: int, form: Form) -> None:
    """In a result that starts as NaN, between guards. Behind the last group it stays."""
    config = host._candidates()[number]
    rng = random.Random(number)
    torch.manual_seed(number)

    for extent, count in ((1, 1), (700, 3), (3000, 33), (2600, 300)):
        ends = draw_ends(rng, count, extent - extent // 5)
        a, b = (
            (
                integers(extent, 200, dtype=torch.bfloat16),
                integers(count, 264, 200, dtype=torch.bfloat16).mT,
            )
            if form == "ragged_m"
            else (
                integers(extent, 200, dtype=torch.bfloat16).t(),
                integers(extent, 264, dtype=torch.bfloat16),
            )
        )
        lead = (extent,) if form == "ragged_m" else (count, 200)
        guarded = torch.full((3, *lead, 264), torch.nan, dtype=torch.bfloat16, device="cuda")
        out = guarded[1]
        problem = grouped.describe(form, a, b, out, count)
        call = Call(form, a, b, ends)

        host.launch(problem, config)(a, b, out, call.offs)

        call.check(out)
        assert guarded[0].isnan().all()
        assert guarded[2].isnan().all()
        if form == "ragged_m":
            assert out[ends[-1] :].isnan().all()


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
