"""fp8: `scaled_mm` against float64, exactly where sums are small integers; what it says of its
arguments, and who overrides it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2, fp8_operands

from outblas import OperandError, scaled_mm
from outblas.core.epilogue import EpilogueArgs, apply
from outblas.core.problem import problem as describe
from outblas.torch_ops import eager_scaled

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_hopper)])

Tensor = torch.Tensor
ONE = torch.ones(())


def relative_error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


# ---- values
# The scales of a product of 96 by 160: one a row of A and one a column of B, or one of all.
SCALES = {
    "rows and columns": ((96, 1), (1, 160)),
    "one element": ((1,), ()),
    "rows": ((96, 1), ()),
}
# A unit of the last place, relative, of each dtype of the output.
UNITS = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2**-17}


@devices
@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize(("shape_a", "shape_b"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("with_epilogue", [False, True], ids=["plain", "epilogue"])
def test_a_scaled_product_is_rounded_once(
    shape_a: tuple[int, ...],
    shape_b: tuple[int, ...],
    dtype: torch.dtype,
    with_epilogue: bool,
    device: str,
) -> None:
    # One rounding is up to 2 of these units. Over a whole product of these numbers it is less than
    # one, but not of any numbers: one scale may push all of few integers to the worst place.
    torch.manual_seed(0)
    # Sums of integers up to 2, which the tensor cores hold.
    a, b = fp8_operands(96, 160, 256, E5M2, device=device, most=2)
    scale_a, scale_b = (torch.rand(s, device=device) + 0.5 for s in (shape_a, shape_b))
    want = scale_a.double() * (a.double() @ b.double()) * scale_b.double()
    how: dict[str, Any] = {"out_dtype": dtype}
    if with_epilogue:
        bias = torch.randn(160, device=device).to(dtype)
        residual = torch.randn(96, 160, device=device).to(dtype)
        how |= {"bias": bias, "activation": "gelu", "residual": residual}
        want = apply(want + bias.double(), "gelu", residual.double())

    got = scaled_mm(a, b, scale_a, scale_b, **how)

    assert got.dtype == dtype
    assert relative_error(got, want) < UNITS[dtype]


SHAPES = [
    (128, 128, 128),
    (300, 264, 272),
    (1000, 1040, 1000),
    (16, 4096, 1024),
    (7, 9, 33),
    (256, 192, 4096),
]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("columns_first", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "promoted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_integers_are_exact(
    shape: tuple[int, int, int],
    fast: bool,
    formats: tuple[torch.dtype, torch.dtype],
    columns_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums below 2¹³, which the tensor cores hold."""
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    a, b = fp8_operands(*shape, *formats, device="cuda", most=1)
    want = a.double() @ b.double()
    if columns_first:
        a, b = a.t().contiguous().t(), b.contiguous()

    one = ONE.cuda()
    y = scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)

    assert torch.equal(y.double(), want)


def error_of_sums(K: int, product: Callable[..., Tensor], fast: bool) -> float:
    """The relative error of products of that many terms."""
    a, b = fp8_operands(512, 512, K, device="cuda")
    one = ONE.cuda()
    y = product(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    return relative_error(y, a.double() @ b.double())


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("K", [1024, 4096, 16384])
def test_the_error_of_promoted_sums_does_not_grow_with_k(K: int) -> None:
    assert error_of_sums(K, scaled_mm, fast=False) < 1.5e-4


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("K", [1024, 4096, 16384])
def test_the_error_of_fast_sums_is_at_most_torchs(K: int) -> None:
    ours = error_of_sums(K, scaled_mm, fast=True)

    assert error_of_sums(K, scaled_mm, fast=False) < ours
    assert ours < 1.1 * error_of_sums(K, torch._scaled_mm, fast=True)


def in_other_memory(t: Tensor, how: str) -> Tensor:
    """The same values in memory that lies otherwise."""
    if how == "every second":
        return t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    if how == "expanded":
        return t[:1, :1].expand(t.shape)
    return t


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("how", ["packed", "every second", "expanded"])
@pytest.mark.parametrize(
    "shape",
    [(1, 48, 64), (3, 264, 128), (7, 9, 33), (300, 16, 272), (264, 300, 2), (5, 7, 1)],
    ids=str,
)
def test_scales_belong_to_rows_and_columns_however_they_lie(
    shape: tuple[int, int, int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host swaps the operands, as it does for few rows, and for rows of one or two
    values.
    """
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    M, N, K = shape
    a, b = fp8_operands(M, N, K, device="cuda", most=1)
    rows = in_other_memory(2.0 ** (torch.arange(M, device="cuda") % 5 - 2).unsqueeze(1), how)
    columns = in_other_memory(2.0 ** (torch.arange(N, device="cuda") % 3 - 1).unsqueeze(0), how)

    got = scaled_mm(a, b, rows, columns, out_dtype=torch.float32)

    want = rows.double() * (a.double() @ b.double()) * columns.double()
    assert torch.equal(got.double(), want)


# ---- memory as the kernel reads it
@pytest.mark.parametrize("K", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("stride", ["packed", "overlapping", "odd"])
def test_words_of_rows_hold_the_same_values(K: int, stride: str) -> None:
    """fp8 rows reach the kernel as pairs of 16 bits: two at least, at even strides, with zeros
    where a row ends.
    """
    values = torch.randn(2, 2 * K + 1).to(E4M3)
    t = {
        "packed": values[:, :K].contiguous(),
        "overlapping": values.flatten().as_strided((1, K), (1, 1)),
        "odd": values.as_strided((2, K), (2 * K + 1, 1)),
    }[stride]

    pairs = eager_scaled.as_16_bit_pairs(t)

    assert pairs.dtype is torch.bfloat16
    assert pairs.stride(1) == 1
    assert pairs.shape[1] >= 2
    bytes_of_rows = pairs.view(E4M3).float()
    assert torch.equal(bytes_of_rows[:, :K], t.float())
    assert not bytes_of_rows[:, K:].any()


@pytest.mark.compile
@pytest.mark.parametrize("K", [1, 2])
def test_rows_of_one_pair_compile(K: int) -> None:
    """Both operands of an fp8 product lie along K, which rows of a single pair would not say."""
    pytest.importorskip("cutlass")
    from outblas.hopper import gemm
    from outblas.hopper.gemm import heuristic

    a, b = fp8_operands(64, 3, K)
    out = torch.empty(64, 3, dtype=torch.bfloat16)
    problem = describe(
        eager_scaled.as_16_bit_pairs(a),
        eager_scaled.as_16_bit_pairs(b.t()).t(),
        out,
        extra=EpilogueArgs(),
        scales=(ONE, ONE),
        formats="e4m3 e4m3",
    )

    gemm.precompile(problem, heuristic.config(problem, heuristic.Rates(), gemm.Config()), 90)


# ---- the operator
@pytest.mark.parametrize("activation", ["tanh", "swish"])
def test_the_operator_refuses_an_unknown_activation(activation: str) -> None:
    a, b = fp8_operands(4, 6, 8)

    with pytest.raises(ValueError, match=f"activation is '{activation}', expected"):
        torch.ops.outblas.scaled_mm(a, b, ONE, ONE, None, None, False, activation)


# ---- arguments
BAD_VALUES: dict[str, dict[str, Any]] = {
    "input.dtype is torch.float32, expected one of torch.float8_e4m3fn": {"a": torch.ones(4, 8)},
    r"input.shape\[1\] is 8 but mat2.shape\[0\] is 16": {"b": fp8_operands(4, 6, 16)[1]},
    r"scale_a.shape is \(6, 1\), expected one element or \(4, 1\), or": {
        "scale_a": torch.ones(6, 1)
    },
    "scale_b is torch.float16": {"scale_b": torch.ones((), dtype=torch.float16)},
    "out_dtype is torch.float64, expected one of torch.bfloat16": {"out_dtype": torch.float64},
    "bias.dtype is torch.float32, expected torch.bfloat16": {"bias": torch.ones(6)},
}
BAD_TYPES: dict[str, dict[str, Any]] = {
    "input is NoneType, expected a torch.Tensor": {"input": None},
    "mat2 is NoneType, expected a torch.Tensor": {"mat2": None},
    "mat2 is list, expected a torch.Tensor": {"mat2": [1.0]},
    "scale_a is float, expected a torch.Tensor": {"scale_a": 1.0},
    "scale_b is NoneType, expected a torch.Tensor": {"scale_b": None},
    "bias is float, expected a torch.Tensor": {"bias": 1.0},
    "out_dtype is str, expected a torch.dtype": {"out_dtype": "bfloat16"},
    "use_fast_accum is str, expected a bool": {"use_fast_accum": "no"},
    "activation is int, expected a str": {"activation": 3},
    r"scaled_mm\(\) got 'input' twice, the second time as 'a'": {"a": torch.ones(())},
    r"scaled_mm\(\) got an unexpected keyword argument 'weight'": {"weight": torch.ones(())},
}


@pytest.mark.parametrize("kind", [OperandError, ValueError, RuntimeError])
@pytest.mark.parametrize("message", BAD_VALUES)
def test_bad_input_names_the_argument(message: str, kind: type[Exception]) -> None:
    a, b = fp8_operands(4, 6, 8)
    given = {"a": a, "b": b, "scale_a": ONE, "scale_b": ONE} | BAD_VALUES[message]

    with pytest.raises(kind, match=message):
        scaled_mm(**given)


@pytest.mark.parametrize("message", BAD_TYPES)
def test_arguments_of_a_wrong_type(message: str) -> None:
    a, b = fp8_operands(4, 6, 8)
    given = {"input": a, "mat2": b, "scale_a": ONE, "scale_b": ONE} | BAD_TYPES[message]

    with pytest.raises(TypeError, match=message):
        scaled_mm(**given)
