"""`outblas.grouped_mm` with `counts`, groups of a fixed capacity: torch group by group, and the
portable kernel in Triton's interpreter, both beside products of single groups.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.grouped_calls import SOME_IN_CI, check_close, check_equal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.core import grouped
from outblas.core.epilogue import composed, glu_split
from outblas.core.errors import OperandError
from outblas.core.grouped import GroupedTensors
from outblas.kernels import grouped as kernels
from outblas.runtime import dispatch

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

BOTH = [None, pytest.param("portable", marks=pytest.mark.interpreter)]
EXACT = "", "relu", "reglu"  # of integers
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
C, K, N = 40, 20, 34
GIVEN = (3, 0, 40, -7, 41, 17, 2**31 - 1, -(2**31), 1)  # of which several are extreme
THERE = (3, 0, 40, 0, 40, 17, 40, 0, 1)
G = len(GIVEN)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    dispatch.clear_cache()


def counts_of(*given: int) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


COUNTS = counts_of(*GIVEN)


def integers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def draw(
    *names: str,
    activation: str = "",
    dtype: torch.dtype = BF16,
    out_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Draws the tensors of a call. Rows that are not there are NaN."""
    wide = out_dtype or dtype
    possible = {
        "bias": integers(G, N, dtype=wide),
        "residual": poisoned(integers(G, C, N // glu_split(activation), dtype=wide)),
        "aux": torch.full((G, C, N), torch.nan, dtype=wide),
    }
    found: dict[str, Any] = {
        "mat_a": poisoned(integers(G, C, K, dtype=dtype)),
        "mat_b": integers(G, K, N, dtype=dtype),
        "activation": activation or None,
        "out_dtype": out_dtype,
    }
    return found | {name: possible[name] for name in names}


def poisoned(t: Tensor) -> Tensor:
    """Fills the rows that are not there."""
    for group, count in enumerate(THERE):
        t[group, count:] = torch.nan
    return t


def run(given: dict[str, Any], **more: Any) -> Tensor:
    named = {"counts": COUNTS} | given | more
    return outblas.grouped_mm(named.pop("mat_a"), named.pop("mat_b"), **named)


def expected(given: dict[str, Any], there: tuple[int, ...] = THERE) -> tuple[Tensor, Tensor]:
    """Returns x and the result in float64; NaN where they are undefined."""
    x = torch.full((G, C, N), torch.nan, dtype=torch.float64)
    for group, count in enumerate(there):
        x[group, :count] = given["mat_a"][group, :count].double() @ given["mat_b"][group].double()
    if "bias" in given:
        x += given["bias"].double().unsqueeze(1)
    y = composed(x, given["activation"] or "", None)
    return x, y + given["residual"].double() if "residual" in given else y


def check(given: dict[str, Any], kernel: str | None) -> None:
    x, want = expected(given)

    result = run(given, kernel=kernel)

    dtype = given["out_dtype"] or given["mat_a"].dtype
    assert result.dtype == dtype
    assert result.shape == want.shape
    assert result.is_contiguous()
    if (given["activation"] or "") in EXACT:
        check_equal(result, want)
    else:
        check_close(result, want, {F32: 1e-5, F16: 1e-3, BF16: 1 / 128}[dtype])
    if "aux" in given:
        check_equal(given["aux"], x)
        assert given["aux"][x.isnan()].isnan().all(), "no row of the groups, so not written"


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("activation", SOME_IN_CI)
def test_the_rows_that_are_there_have_their_products(activation: str, kernel: str | None) -> None:
    for names in ((), ("bias", "aux"), ("bias", "residual")):
        check(draw(*names, activation=activation), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype | None, kernel: str | None) -> None:
    names = "bias", "residual", "aux"

    check(draw(*names, activation="reglu", dtype=dtype, out_dtype=out_dtype), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_tensors_of_any_strides(order: tuple[int, int, int], kernel: str | None) -> None:
    """Such as rows of groups that lie between each other."""
    given = draw("bias", "residual", "aux", activation="relu")
    back = [order.index(i) for i in range(3)]
    for name in ("mat_a", "mat_b", "residual", "aux"):
        given[name] = given[name].permute(order).contiguous().permute(back)
    given["counts"] = COUNTS.repeat_interleave(2)[::2]

    check(given, kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("sizes", [(1, 40, 20), (9, 1, 20), (9, 0, 20), (9, 40, 0), (9, 16, 1)])
def test_few_rows_and_terms(sizes: tuple[int, int, int], kernel: str | None) -> None:
    groups, rows, terms = sizes
    a, b, bias = integers(groups, rows, terms), integers(groups, terms, N), integers(groups, N)

    result = outblas.grouped_mm(a, b, bias=bias, counts=COUNTS[:groups], kernel=kernel)

    want = (a.double() @ b.double() + bias.double().unsqueeze(1)).bfloat16()
    assert result.shape == want.shape
    for group, count in enumerate(THERE[:groups]):
        assert torch.equal(result[group, :count], want[group, :count])


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ["", "reglu"])
@pytest.mark.parametrize("capacity", [1, 16, 40, 50])
def test_no_row_but_those_that_are_there_is_stored(capacity: int, activation: str) -> None:
    a, b = integers(G, capacity, K), integers(G, K, N)
    columns = N // glu_split(activation)
    guarded = torch.full((3, G, capacity, columns), torch.nan, dtype=BF16)
    aux = torch.full((3, G, capacity, N), torch.nan, dtype=BF16)
    out, tensors = guarded[1], GroupedTensors(aux=aux[1], counts=COUNTS)
    problem = grouped.describe("masked", a, b, out, G, tensors, activation=activation)
    a, b, flat, moved = grouped.in_planned_form("masked", a, b, out, tensors)

    kernels.run(problem, a, b, flat, COUNTS, moved)

    for t in (guarded, aux):
        assert t[0].isnan().all()
        assert t[2].isnan().all()
        for group, count in enumerate(min(max(n, 0), capacity) for n in GIVEN):
            assert not t[1, group, :count].isnan().any()
            assert t[1, group, count:].isnan().all()


@pytest.mark.interpreter
def test_a_call_with_other_counts_takes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Mock(wraps=grouped.describe)
    monkeypatch.setattr(grouped, "describe", described)
    given = draw("bias", "residual", activation="relu")
    given["mat_a"], given["residual"] = integers(G, C, K), integers(G, C, N)

    for shift in range(4):
        there = tuple((7 * group + shift) % (C + 1) for group in range(G))
        _, want = expected(given, there)
        check_equal(run(given, counts=counts_of(*there), kernel="portable"), want)

    assert described.call_count == 1
    with pytest.raises(OperandError, match="offs is given, expected None where both"):
        run(given, counts=None, offs=COUNTS, kernel="portable")
    with pytest.raises(OperandError, match="offs is given, expected None beside counts"):
        run(given, offs=COUNTS, kernel="portable")


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("activation", "arch", "dtype", "instruction"),
    [
        ("swiglu", 75, F16, "fma.rn.f32"),
        ("", 80, BF16, "mma.sync"),
        ("swiglu", 90, BF16, "wgmma.mma_async"),
    ],
)
def test_it_compiles_for_every_architecture(
    activation: str, arch: int, dtype: torch.dtype, instruction: str
) -> None:
    a, b = torch.empty(4, 64, 64, dtype=dtype), torch.empty(4, 64, 128, dtype=dtype)
    out = torch.empty(4, 64, 128 // glu_split(activation), dtype=dtype)
    tensors = GroupedTensors(residual=out, counts=COUNTS[:4])
    problem = grouped.describe("masked", a, b, out, 4, tensors, activation=activation)

    compiled = kernels.compile_for(problem, kernels.Block(64, 128, 32, 4, 2), arch)

    assert instruction in compiled.asm["ptx"]


def test_counts_compile_another_kernel_than_ends() -> None:
    """A graph must not be captured before the kernel of the very call is loaded."""
    a, b = torch.empty(4, 64, 64, dtype=BF16), torch.empty(4, 64, 128, dtype=BF16)
    out, tile = torch.empty(4, 64, 128, dtype=BF16), kernels.Block(16, 32, 32, 4, 1)
    tensors = GroupedTensors(counts=COUNTS[:4])
    masked = grouped.describe("masked", a, b, out, 4, tensors)
    ragged = grouped.describe("ragged_m", a.flatten(0, 1), b, out.flatten(0, 1), 4)

    assert kernels.traits(masked, tile, "ieee") != kernels.traits(ragged, tile, "ieee")


def test_the_portable_kernel_names_what_it_refuses() -> None:
    a, b = (torch.empty(shape, device="meta") for shape in ((2, 2**30, 1), (2, 1, 1)))
    out = torch.empty(2, 2**30, 1, device="meta")
    made = grouped.describe("masked", a, b, out, 2, GroupedTensors(counts=COUNTS[:2]))
    many = replace(made, device=torch.device("cpu"))
    tail = replace(many, M=64, capacity=32, zero_tail=True)

    assert "at most 2147483520 rows of all groups, but was given 2147483648" in str(
        kernels.unsupported(many)
    )
    assert "no rows to zero where groups have places of their own" in str(kernels.unsupported(tail))


# ---- torch's machinery
def test_a_call_is_one_graph_under_compile() -> None:
    given = draw("bias", "residual", "aux", activation="swiglu", dtype=F32)
    other = {**given, "aux": given["aux"].clone()}
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")

    for shift in range(2):
        counts = COUNTS.roll(shift)
        got, want = compiled(given, counts=counts), run(other, counts=counts)
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(given["aux"].nan_to_num(), other["aux"].nan_to_num())


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_aux", "grouped_gemm_to_aux"])
def test_the_operators_pass_torchs_own_checks(name: str) -> None:
    given = draw("bias", "residual", activation="swiglu", dtype=F32)
    given = {n: torch.nan_to_num(t) for n, t in given.items() if isinstance(t, Tensor)}
    operands = given["mat_a"], given["mat_b"], None, given["bias"], given["residual"]
    counts = torch.full((G,), C, dtype=torch.int32)
    arguments: list[Any] = [*operands, None, None, None, "swiglu", None, "", False, counts]
    if name == "grouped_gemm_to_aux":
        arguments.insert(0, torch.zeros(G, C, N))

    torch.library.opcheck(getattr(torch.ops.outblas, name).default, tuple(arguments))


def test_fake_tensors_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        given = draw(activation="swiglu", out_dtype=F32)
        counts = torch.empty(G, dtype=torch.int32)
        operands = given["mat_a"], given["mat_b"], *[None] * 6, "swiglu", F32, "", False, counts
        y, x = torch.ops.outblas.grouped_gemm_aux(*operands)
        short = run(given, counts=counts)

    assert y.shape == short.shape == (G, C, N // 2)
    assert x.shape == (G, C, N)
    assert y.dtype == x.dtype == short.dtype == F32


def test_vmap_takes_calls_one_by_one() -> None:
    given = draw("bias", activation="relu", dtype=F32)
    several = torch.stack([given["mat_a"], given["mat_a"] + 1])

    mapped = torch.vmap(lambda a: run(given, mat_a=a))(several)

    for one, a in zip(mapped, several, strict=True):
        _, want = expected({**given, "mat_a": a})
        check_equal(one, want)


def test_autocast_casts_nothing() -> None:
    given = draw("bias", dtype=F32)

    with torch.autocast("cpu", dtype=BF16):
        result = run(given)

    assert result.dtype == F32
    check_equal(result, expected(given)[1])


def test_flops_are_those_of_all_places() -> None:
    """How many rows are there is not known to the host."""
    given = draw("bias", "aux", activation="swiglu", dtype=F32)

    with FlopCounterMode(display=False) as counter:
        run(given)

    assert counter.get_total_flops() == 2 * G * C * N * K


class Overriding(torch.Tensor):
    """A tensor type that overrides functions."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function, sorted(n for n, value in (kwargs or {}).items() if value is not None)


def test_counts_may_override_the_call() -> None:
    function, names = run(draw("bias"), counts=COUNTS.as_subclass(Overriding))  # type: ignore[misc]

    assert function is outblas.grouped_mm
    assert names == ["bias", "counts"]


# ---- no gradients
@pytest.mark.parametrize("name", ["mat_a", "mat_b", "bias", "residual"])
def test_inputs_that_need_gradients_are_named(name: str) -> None:
    given = draw("bias", "residual", dtype=F32)
    given[name].requires_grad_()

    for kernel in (None, "portable"):
        with pytest.raises(OperandError, match=rf"counts is given with .* gradients \({name}\)"):
            run(given, kernel=kernel)
        with torch.no_grad():
            result = run(given, kernel=kernel)
        assert not result.requires_grad
        with pytest.raises(OperandError, match="counts is given"):  # also where a plan is known
            run(given, kernel=kernel)


def test_an_aux_beside_gradients_is_refused() -> None:
    given = draw("aux", dtype=F32)
    given["mat_b"].requires_grad_()

    with pytest.raises(OperandError, match="aux is given with inputs that need gradients"):
        run(given)


def test_forward_mode_gradients_are_refused() -> None:
    given = draw(dtype=F32)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["mat_a"], given["mat_a"])
        with pytest.raises(OperandError, match="mat_a carries a forward-mode gradient"):
            run(given, mat_a=dual)


# ---- wrong arguments
A, B, TWO = torch.ones(2, 6, 8), torch.ones(2, 8, 4), counts_of(2, 6)
INDEX = torch.arange(12)


def wrong(a: Tensor = A, b: Tensor = B, counts: Any = TWO, **given: Any) -> Tensor:
    return outblas.grouped_mm(a, b, counts=counts, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: wrong(A[0]),
            "counts is given, expected None where mat_a has 2 and mat_b 3 dimensions",
        ),
        (lambda: wrong(A, B[0]), "counts is given, expected None where mat_a has 3 and mat_b 2"),
        (lambda: wrong(A[0], B[0]), "counts is given, expected None where mat_a has 2 and mat_b 2"),
        (lambda: wrong(offs=TWO), "offs is given, expected None beside counts"),
        (lambda: wrong(a_index=INDEX), "a_index is given, expected None beside counts"),
        (lambda: wrong(scatter_index=INDEX), "scatter_index is given, expected None beside counts"),
        (
            lambda: wrong(scatter_weights=torch.ones(12)),
            "scatter_weights is given, expected None beside counts",
        ),
        (
            lambda: wrong(counts=TWO.long()),
            r"counts is torch.int64 of shape \(2,\) on cpu, expected torch.int32 of 1 dimension",
        ),
        (lambda: wrong(counts=TWO.view(1, 2)), r"counts is torch.int32 of shape \(1, 2\)"),
        (lambda: wrong(counts=TWO.to("meta")), "counts is .* on meta, expected .* on cpu"),
        (lambda: wrong(counts=counts_of(1)), r"mat_a.shape\[0\] is 2 but counts has 1 elements"),
        (lambda: wrong(b=B[:1]), r"mat_b.shape\[0\] is 1 but counts has 2 elements"),
        (
            lambda: wrong(A[:0], B[:0], counts_of()),
            "counts has 0 elements, expected 1 to 1024",
        ),
        (
            lambda: wrong(
                torch.ones(1025, 1, 1), torch.ones(1025, 1, 1), torch.ones(1025, dtype=torch.int32)
            ),
            "counts has 1025 elements, expected 1 to 1024",
        ),
        (
            lambda: wrong(residual=torch.ones(2, 6, 4), activation="swiglu"),
            r"residual is .* expected torch.float32 of shape \(2, 6, 2\)",
        ),
        (lambda: wrong(aux=torch.ones(2, 6, 4).half()), "aux is torch.float16"),
        (lambda: wrong(bias=torch.ones(2, 6)), r"bias is .* of shape \(2, 4\)"),
        (
            lambda: torch.ops.outblas.grouped_gemm(A, B, zero_tail=True, counts=TWO),
            "zero_tail is True, expected False beside counts",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call()


def test_counts_of_another_type_are_named() -> None:
    with pytest.raises(TypeError, match=r"counts is list, expected a torch\.Tensor"):
        wrong(counts=[2, 6])


def test_an_aux_shares_no_memory() -> None:
    memory = torch.zeros(100)
    a = memory[:96].view(2, 6, 8)

    with pytest.raises(OperandError, match="aux overlaps mat_a in memory"):
        wrong(a, aux=memory[4:52].view(2, 6, 4))

    assert not memory.any(), "nothing is written"
