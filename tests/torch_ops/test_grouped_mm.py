"""`outblas.grouped_mm` without a GPU: torch group by group, and the portable kernel in Triton's
interpreter, both beside products of single groups.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.core import grouped
from outblas.core.compiling import CompileForbidden
from outblas.core.errors import OperandError
from outblas.core.grouped import NO_TENSORS, Form
from outblas.kernels import grouped as kernels
from outblas.torch_ops import grouped_mm

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

FORMS: tuple[Form, ...] = ("ragged_m", "ragged_n", "ragged_k")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENDS = {
    "one group": (45,),
    "empty groups": (0, 4, 4, 27, 27, 45, 45),
    "single rows": (1, 2, 3, 4, 5),
    "all rows": (13, 50),
    "no rows": (0, 0, 0),
    "one huge group": (1, 49, 50),
    "one group more than a slot": (16, 17, 33, 48, 50),
}
EXTENT = 50  # of the dimension that is divided


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def operands(
    form: Form,
    groups: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    M: int = 33,
    N: int = 37,
    K: int = 24,
) -> tuple[Tensor, Tensor]:
    """Returns operands of which the divided dimension has `EXTENT`."""
    shapes: tuple[tuple[int, ...], ...]
    match form:
        case "ragged_m":
            shapes = (EXTENT, K), (groups, K, N)
        case "ragged_n":
            shapes = (groups, M, K), (K, EXTENT)
        case _:
            shapes = (M, EXTENT), (EXTENT, N)
    a, b = (integers(*shape, dtype=dtype) for shape in shapes)
    return a, b


def expected(form: Form, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> list[Tensor]:
    """Returns the product of each group in float64."""
    begins = (0, *ends[:-1])
    a, b = a.double(), b.double()
    match form:
        case "ragged_m":
            return [a[i:j] @ b[g] for g, (i, j) in enumerate(zip(begins, ends, strict=True))]
        case "ragged_n":
            return [a[g] @ b[:, i:j] for g, (i, j) in enumerate(zip(begins, ends, strict=True))]
    return [a[:, i:j] @ b[i:j] for i, j in zip(begins, ends, strict=True)]


def parts(form: Form, result: Tensor, ends: tuple[int, ...]) -> list[Tensor]:
    """Returns each group's part of a result."""
    pairs = list(zip((0, *ends[:-1]), ends, strict=True))
    match form:
        case "ragged_m":
            return [result[i:j] for i, j in pairs]
        case "ragged_n":
            return [result[:, i:j] for i, j in pairs]
    return list(result)


def offsets(ends: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize("ends", [pytest.param(v, id=k) for k, v in ENDS.items()])
@pytest.mark.parametrize("form", FORMS)
def test_each_group_has_its_product(form: Form, ends: tuple[int, ...], kernel: str | None) -> None:
    a, b = operands(form, len(ends))

    result = outblas.grouped_mm(a, b, offs=offsets(ends), kernel=kernel)

    for got, want in zip(parts(form, result, ends), expected(form, a, b, ends), strict=True):
        assert torch.equal(got, want.bfloat16())


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_dtypes_and_bias(form: Form, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    ends = ENDS["empty groups"]
    a, b = operands(form, len(ends), dtype)
    bias = (
        None if form == "ragged_n" else integers(len(ends), b.shape[-1], dtype=out_dtype or dtype)
    )

    result = outblas.grouped_mm(
        a, b, offs=offsets(ends), bias=bias, out_dtype=out_dtype, kernel="portable"
    )

    assert result.dtype == (out_dtype or dtype)
    added = [0.0] * len(ends) if bias is None else list(bias.double())
    wanted = expected(form, a, b, ends)
    for got, want, more in zip(parts(form, result, ends), wanted, added, strict=True):
        assert torch.equal(got, (want + more).to(result.dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_sampled_groups_of_any_strides(form: Form, seed: int) -> None:
    draw = random.Random(f"{form} {seed}")
    count = draw.choice([1, 2, 5, 17])
    ends = tuple(sorted(draw.choices(range(EXTENT + 1), k=count)))
    a, b = operands(
        form, count, M=draw.randint(1, 40), N=draw.randint(1, 40), K=draw.randint(1, 40)
    )
    a, b = (t.mT.contiguous().mT if draw.random() < 0.5 else t for t in (a, b))

    result = outblas.grouped_mm(a, b, offs=offsets(ends), kernel="portable")

    for got, want in zip(parts(form, result, ends), expected(form, a, b, ends), strict=True):
        assert torch.equal(got, want.bfloat16())


@pytest.mark.interpreter
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("form", ["ragged_m", "ragged_n"])
def test_what_no_group_covers_stays_untouched_or_gets_zeros(form: Form, zero_tail: bool) -> None:
    ends = (3, 20, 31)
    a, b = operands(form, 3)
    shape = (a.shape[-2], b.shape[-1])
    out = torch.full(shape, torch.nan, dtype=a.dtype)
    problem = grouped.describe(form, a, b, out, 3, zero_tail=zero_tail)
    given = (b.mT, a.mT, out.mT) if problem.exchanged else (a, b, out)

    kernels.run(problem, *given, offsets(ends), NO_TENSORS)

    rest = out[:, 31:] if problem.exchanged else out[31:]
    assert (rest == 0).all() if zero_tail else rest.isnan().all()
    assert not parts(form, out, ends)[-1].isnan().any()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "ends",
    [(10, 5, 20), (-7, 30, 90), (60, 70, 80), (2**31 - 1, -(2**31), 3)],
    ids=["decreasing", "negative and beyond the end", "beyond the end", "extreme"],
)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_ends_never_leave_the_operands(form: Form, ends: tuple[int, ...]) -> None:
    """The result of ends that decrease is undefined, but memory around it is not."""
    a, b = operands(form, 3)
    shape = (3, a.shape[0], b.shape[1]) if form == "ragged_k" else (a.shape[-2], b.shape[-1])
    guarded = torch.full((3, *shape), torch.nan, dtype=a.dtype)
    out = guarded[1]
    problem = grouped.describe(form, a, b, out, 3)
    given = (b.mT, a.mT, out.mT) if problem.exchanged else (a, b, out)

    kernels.run(problem, *given, offsets(ends), NO_TENSORS)

    assert guarded[0].isnan().all()
    assert guarded[2].isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize(
    "ends",
    [(-7, 10, 31), (-9, -2, 90), (20, 20, 20), (60, 70, 2**31 - 1)],
    ids=["negative", "beyond both ends", "equal", "beyond the end"],
)
@pytest.mark.parametrize("form", FORMS)
def test_ends_outside_of_the_operand_count_as_its_own(
    form: Form, ends: tuple[int, ...], kernel: str | None
) -> None:
    a, b = operands(form, 3)
    inside = tuple(min(max(end, 0), EXTENT) for end in ends)

    result = outblas.grouped_mm(a, b, offs=offsets(ends), kernel=kernel)

    for got, want in zip(parts(form, result, inside), expected(form, a, b, inside), strict=True):
        assert torch.equal(got, want.bfloat16())


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize("form", FORMS)
def test_ends_that_decrease_are_refused_on_a_cpu(form: Form, kernel: str | None) -> None:
    """On a GPU groups would share rows, and two CTAs write them."""
    a, b = operands(form, 3)
    message = r"offs\[2\] is 10 but offs\[1\] is 20, expected ends of groups that do not decrease"

    # In the order in which a plan that is kept meets them, too.
    outblas.grouped_mm(a, b, offs=offsets((10, 20, 30)), kernel=kernel)
    with pytest.raises(OperandError, match=message):
        outblas.grouped_mm(a, b, offs=offsets((10, 20, 10)), kernel=kernel)


def test_ends_that_decrease_are_refused_on_a_gpu_where_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = Mock()
    monkeypatch.setattr(grouped_mm, "_kernels_for", lambda problem, name: kernels)
    a, b = operands("ragged_m", 2)
    out = torch.empty(EXTENT, b.shape[-1])
    problem = grouped.describe("ragged_m", a, b, out, 2)
    there = replace(problem, device=torch.device("cuda", 0))
    given = a, b, out, offsets((20, 10)), NO_TENSORS

    assert grouped_mm.kernels_for(there, "") is kernels
    monkeypatch.setenv("OUTBLAS_CHECK_OFFS", "1")
    checking = grouped_mm.kernels_for(there, "")
    with pytest.raises(OperandError, match=r"offs\[1\] is 10 but offs\[0\] is 20"):
        checking.run(there, *given)
    kernels.run.assert_not_called()

    masked = replace(there, capacity=25)  # counts, which may be any
    checking.run(masked, *given)
    monkeypatch.setattr(grouped_mm, "capturing", lambda device: True)
    checking.run(there, *given)
    assert [called.args[0] for called in kernels.run.call_args_list] == [masked, there]


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("arch", "dtype", "instruction"),
    [
        (75, torch.float16, "fma.rn.f32"),
        (80, torch.bfloat16, "mma.sync"),
        (90, torch.bfloat16, "wgmma.mma_async"),
        (90, torch.float32, "fma.rn.f32"),
    ],
)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_every_architecture_gets_its_instructions(
    form: Form, arch: int, dtype: torch.dtype, instruction: str
) -> None:
    a, b = operands(form, 4, dtype, M=64, N=128, K=64)
    shape = (4, 64, 128) if form == "ragged_k" else (EXTENT, 128)
    out = torch.empty(shape, dtype=dtype)
    problem = grouped.describe(form, a, b, out, 4, zero_tail=True)
    tile = kernels.Block(64, 64, 32, 4, 2)

    compiled = kernels.compile_for(problem, tile, arch)

    assert instruction in compiled.asm["ptx"]


def test_a_batch_has_no_ends() -> None:
    a, b, bias = integers(3, 5, 8), integers(3, 8, 6), integers(3, 6)

    result = outblas.grouped_mm(a, b, bias=bias)

    assert torch.equal(result, (a.double() @ b.double() + bias.double().unsqueeze(1)).bfloat16())


@pytest.mark.parametrize("form", [*FORMS, "batch"])
@pytest.mark.parametrize("kernel", [None, pytest.param("portable", marks=pytest.mark.interpreter)])
def test_gradients_are_those_of_single_products(form: Form, kernel: str | None) -> None:
    ends = (4, 4, 27, 45)
    a, b = (
        operands(form, 4, torch.float32)
        if form != "batch"
        else (
            integers(4, 5, 8, dtype=torch.float32),
            integers(4, 8, 6, dtype=torch.float32),
        )
    )
    given = [a, b] if form in ("ragged_n", "batch") else [a, b, integers(4, b.shape[-1]).float()]
    offs = None if form == "batch" else offsets(ends)
    leaves, copies = ([t.clone().requires_grad_() for t in given] for _ in range(2))

    if form == "batch":
        result = outblas.grouped_mm(*leaves, kernel=kernel)
        loss, wanted = (result**2).sum(), (torch.bmm(*copies) ** 2).sum()
    else:
        bias = leaves[2] if len(leaves) > 2 else None
        result = outblas.grouped_mm(*leaves[:2], offs=offs, bias=bias, kernel=kernel)
        loss = torch.stack([(part**2).sum() for part in parts(form, result, ends)]).sum()
        single = expected(form, copies[0], copies[1], ends)
        if len(copies) > 2:
            single = [x + more for x, more in zip(single, copies[2], strict=True)]
        wanted = torch.stack([(part**2).sum() for part in single]).sum()
    loss.backward()
    wanted.backward()

    for leaf, copy in zip(leaves, copies, strict=True):
        assert torch.equal(leaf.grad, copy.grad), "integers, so exact"


def test_a_bias_in_float32_has_a_gradient_in_float32() -> None:
    """Gradients that 16 bits cannot hold."""
    a, b = integers(12, 8, dtype=torch.float16), integers(2, 8, 4, dtype=torch.float16)
    bias = torch.zeros(2, 4, requires_grad=True)

    y = outblas.grouped_mm(a, b, offs=offsets((5, 12)), bias=bias, out_dtype=torch.float32)
    (y * 1e5).sum().backward()

    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.tensor([[5e5] * 4, [7e5] * 4]))


def test_a_tangent_is_refused() -> None:
    a, b = operands("ragged_m", 2, torch.float32)

    with forward_ad.dual_level(), pytest.raises(OperandError, match="mat_a carries a forward"):
        outblas.grouped_mm(forward_ad.make_dual(a, a), b, offs=offsets((5, 40)))
    with pytest.raises(OperandError, match="mat_a carries a forward-mode gradient"):
        torch.func.jvp(lambda a: outblas.grouped_mm(a, b, offs=offsets((5, 40))), (a,), (a,))


def test_gradients_by_torch_func() -> None:
    a, b = operands("ragged_m", 2, torch.float32)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (outblas.grouped_mm(a, b, offs=offsets((5, 40)))[:40] ** 2).sum()

    got = torch.func.grad(loss, argnums=(0, 1))(a, b)

    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    for one, other in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", [*FORMS, "batch"])
def test_autocast_casts_nothing(form: Form) -> None:
    """As torch's function, which computes in the dtype of its operands."""
    if form == "batch":
        a, b, offs = torch.randn(2, 5, 64), torch.randn(2, 64, 8), None
    else:
        (a, b), offs = operands(form, 2, torch.float32), offsets((5, 40))
        a, b = a + torch.rand_like(a), b + torch.rand_like(b)

    plain = outblas.grouped_mm(a, b, offs=offs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = outblas.grouped_mm(a, b, offs=offs)

    assert torch.equal(cast, plain)


def test_gradients_have_gradients() -> None:
    a = torch.randn(12, 3, requires_grad=True)
    b = torch.randn(3, 3, 4, requires_grad=True)
    offs = offsets((2, 7, 12))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return outblas.grouped_mm(a, b, offs=offs)

    assert torch.autograd.gradgradcheck(product, (a, b), eps=1e-2, atol=1e-2)


def test_one_graph_under_compile() -> None:
    a, b = operands("ragged_m", 3, torch.float32)
    a.requires_grad_()

    def loss(a: Tensor, offs: Tensor) -> Tensor:
        return outblas.grouped_mm(a, b, offs=offs)[:40].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ends in ((5, 9, 40), (0, 40, 40)):
        (grad,) = torch.autograd.grad(compiled(a, offsets(ends)), a)
        (wanted,) = torch.autograd.grad(loss(a, offsets(ends)), a)
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("form", [*FORMS, "batch"])
def test_flops_are_counted_forward_and_backward(form: Form) -> None:
    """Of all that the operands have: three products of the same size."""
    sizes = {
        "ragged_m": (EXTENT, 37, 24),
        "ragged_n": (33, EXTENT, 24),
        "ragged_k": (33, 37, EXTENT),
    }
    if form == "batch":
        a, b, offs = torch.ones(4, 5, 8), torch.ones(4, 8, 6), None
        flop = 2 * 4 * 5 * 8 * 6
    else:
        (a, b), offs = operands(form, 3, torch.float32), offsets((5, 9, 40))
        flop = 2 * math.prod(sizes[form])
    a.requires_grad_()
    b.requires_grad_()

    with FlopCounterMode(display=False) as counter:
        outblas.grouped_mm(a, b, offs=offs).sum().backward()

    assert counter.get_total_flops() == 3 * flop


def test_the_operator_passes_torchs_own_checks() -> None:
    a, b = operands("ragged_m", 3, torch.float32)
    given = a.requires_grad_(), b.requires_grad_(), offsets((5, 9, 50))

    torch.library.opcheck(torch.ops.outblas.grouped_mm.default, given)


Call = Callable[[], object]
A, B, OFFS = torch.ones(6, 8), torch.ones(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: outblas.grouped_mm(A, B), "offs is None, expected the ends of groups"),
        (lambda: outblas.grouped_mm(B, B.mT, offs=OFFS), "offs is given, expected None"),
        (
            lambda: outblas.grouped_mm(A, B, offs=OFFS.long()),
            r"offs is torch.int64 .* expected torch.int32",
        ),
        (lambda: outblas.grouped_mm(A, B, offs=OFFS[:1]), r"mat_b.shape\[0\] is 2 but offs has 1"),
        (
            lambda: outblas.grouped_mm(A[:, :7], B, offs=OFFS),
            r"mat_a.shape\[-1\] is 7 but mat_b.shape\[-2\] is 8",
        ),
        (lambda: outblas.grouped_mm(A[0], B, offs=OFFS), "mat_a has 1 dimensions, expected 2 or 3"),
        (
            lambda: outblas.grouped_mm(A.int(), B, offs=OFFS),
            "mat_a.dtype is torch.int32, expected one of",
        ),
        (
            lambda: outblas.grouped_mm(A, B.half(), offs=OFFS),
            "mat_b.dtype is torch.float16 but mat_a.dtype",
        ),
        (
            lambda: outblas.grouped_mm(A, B, offs=OFFS, out_dtype=torch.float16),
            "out_dtype is torch.float16",
        ),
        (
            lambda: outblas.grouped_mm(A, B, offs=OFFS, bias=torch.ones(4)),
            r"bias is .* expected .*\(2, 4\)",
        ),
        (lambda: outblas.grouped_mm(B, A.t(), offs=OFFS), r"mat_a.shape\[-1\] is 4"),
        (
            lambda: outblas.grouped_mm(B.mT, A.t(), offs=OFFS, bias=torch.ones(2, 6)),
            "bias is given, expected None where groups are columns",
        ),
        (
            lambda: outblas.grouped_mm(A, torch.ones(0, 8, 4), offs=OFFS[:0]),
            "offs has 0 elements, expected 1",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(call: Call, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call()


WRONG: Any = [2, 6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: outblas.grouped_mm(WRONG, B, offs=OFFS), "mat_a is list, expected a torch.Tensor"),
        (lambda: outblas.grouped_mm(A, B, offs=WRONG), "offs is list, expected a torch.Tensor"),
        (lambda: outblas.grouped_mm(A, B, offs=OFFS, kernel=WRONG), "kernel is list"),
        (lambda: outblas.grouped_mm(A, B, offs=OFFS, out_dtype=WRONG), "out_dtype is list"),
    ],
)
def test_arguments_of_another_type_are_named(call: Call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="kernel is 'fast', expected"):
        outblas.grouped_mm(A, B, offs=OFFS, kernel="fast")


class Forbidden:
    """A kernel that would have to be compiled."""

    def run(self, *_: object) -> None:
        raise CompileForbidden("a_kernel")


def test_torch_computes_what_may_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "_no_kernel_reason", lambda mat_a: None)
    monkeypatch.setattr(grouped_mm, "kernels_for", lambda problem, name: Forbidden())

    with pytest.warns(outblas.FallbackWarning, match="neither a pack nor the cache has a_kernel"):
        result = outblas.grouped_mm(A, B, offs=OFFS)
    with pytest.raises(CompileForbidden):
        outblas.grouped_mm(A, B, offs=OFFS, kernel="portable")

    assert torch.equal(result, torch.full((6, 4), 8.0))


def test_hopper_needs_its_gpu() -> None:
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': needs an NVIDIA GPU"):
        outblas.grouped_mm(A, B, offs=OFFS, kernel="hopper.grouped")
    with pytest.raises(ValueError, match="but was given two batches"):
        outblas.grouped_mm(B, B.mT, kernel="hopper.grouped")


def test_a_fallback_warns_and_strict_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(
        RuntimeError, match="OUTBLAS_STRICT=1 forbids the fallback to torch: CPU tensors"
    ):
        outblas.grouped_mm(A, B, offs=OFFS)
