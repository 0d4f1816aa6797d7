"""fp8: `scaled_mm`, exactly, because scales are powers of two and operands small integers; its
gradients; what it says of its arguments; and its warm calls.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import (
    ALL,
    BY_ROW,
    E4M3,
    E5M2,
    ORDERS,
    RECIPES,
    ROW,
    SQUARE,
    block_scale,
    fp8_operands,
    scaled,
)
from support.scaled_plans import product_of_pairs
from torch.nn.functional import ScalingType, SwizzleType

from outblas import OperandError, scaled_mm
from outblas.call import launcher
from outblas.call.epilogue import ACTIVATIONS, GATED, Activation, apply
from outblas.torch_ops import block_scales, eager_scaled, scaled_operator
from outblas.torch_ops import scaled_mm as module

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_hopper)])

Tensor = torch.Tensor
Shape = tuple[int, int, int]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BLOCKS = [(BY_ROW, SQUARE), (BY_ROW, BY_ROW), (SQUARE, BY_ROW), (SQUARE, SQUARE)]
PAIRS = [*BLOCKS, (ROW, ROW), (ROW, ALL), (ALL, ROW), (ALL, ALL)]


class Case:
    """Operands of a product, their scales and the product in float64."""

    def __init__(
        self,
        shape: Shape,
        pair: tuple[str, str],
        device: str = "cpu",
        order: str = "by rows",
        formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    ) -> None:
        M, N, K = shape
        self.a, self.b = fp8_operands(M, N, K, *formats, device=device, most=2)
        self.stored = [
            scale_of(rows, K, recipe, order).to(device)
            for rows, recipe in zip((M, N), pair)  # noqa: B905
        ]
        wide = [
            scaled(t, scale, recipe) if recipe in (BY_ROW, SQUARE) else t.double() * scale.double()
            for t, scale, recipe in zip((self.a, self.b.t()), self.stored, pair, strict=True)
        ]
        self.exact = wide[0] @ wide[1].t()

        # scales of square blocks, and of rows of B, lie the other way round
        scale_a, scale_b = (
            t.t() if recipe == SQUARE or (recipe == ROW and is_b) else t
            for is_b, (t, recipe) in enumerate(zip(self.stored, pair, strict=True))
        )
        self.scales = scale_a, RECIPES[pair[0]], scale_b, RECIPES[pair[1]]


def scale_of(rows: int, K: int, recipe: str, order: str = "by rows") -> Tensor:
    """Scales of an operand that is stored with one row for each row of A or column of B."""
    if recipe in (BY_ROW, SQUARE):
        return block_scale(rows, K, recipe, order)
    by_row = 2.0 ** (torch.arange(rows) % 5 - 2).unsqueeze(1)
    if order == "every second":
        by_row = by_row.repeat_interleave(2, 0)[::2]
    return by_row if recipe == ROW else torch.tensor(0.5)


@pytest.fixture(autouse=True)
def _kernels_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a product that torch would compute is an error."""
    if "cuda" in request.node.name:
        monkeypatch.setenv("OUTBLAS_STRICT", "1")


# ---- values
# Whole blocks; tails of M, N and K; fewer than a block of each; one row; one column; few terms.
SHAPES = [
    (128, 256, 384),
    (257, 129, 1000),
    (7, 300, 145),
    (1, 384, 256),
    (200, 1, 300),
    (200, 260, 33),
    (5, 7, 1),
]
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]


@devices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_exact(shape: Shape, device: str) -> None:
    """For every pairing of recipes, orders of scales and formats, of operands that lie either way,
    with fast sums where they may be.
    """
    for i, pair in enumerate(PAIRS):
        for order, formats in zip(ORDERS, FORMATS, strict=True):
            case = Case(shape, pair, device, order, formats)
            fast = pair not in BLOCKS and i % 2 == 0
            a, b = case.a, case.b
            if order == "padded":  # which no kernel reads as they lie
                a, b = a.t().contiguous().t(), b.contiguous()

            got = scaled_mm(a, b, *case.scales, output_dtype=F32, use_fast_accum=fast)

            assert torch.equal(got.double(), case.exact), (pair, order, formats)


@devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pair", [(BY_ROW, SQUARE), (SQUARE, BY_ROW), (ROW, ROW)], ids=" by ".join)
def test_an_epilogue_follows_the_scales_and_is_rounded_once(
    pair: tuple[str, str], dtype: torch.dtype, device: str
) -> None:
    case = Case((130, 264, 272), pair, device)
    bias = torch.arange(-100, 164, device=device).to(dtype)
    residual = torch.arange(130, device=device).to(dtype).unsqueeze(1)

    got = scaled_mm(
        *(case.a, case.b, *case.scales),
        bias=bias,
        output_dtype=dtype,
        activation="relu",
        residual=residual,
    )

    want = (case.exact + bias.double()).relu() + residual.double()
    assert torch.equal(got, want.to(dtype))


@devices
@pytest.mark.parametrize("shape", [(0, 16, 256), (8, 0, 256), (8, 16, 0)], ids=str)
def test_an_empty_product_is_zero(shape: Shape, device: str) -> None:
    case = Case(shape, (BY_ROW, SQUARE), device)

    got = scaled_mm(case.a, case.b, *case.scales)

    assert torch.equal(got, torch.zeros(shape[0], shape[1], device=device).bfloat16())


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("K", [1024, 16384])
def test_promoted_sums_keep_their_error_and_fast_ones_have_at_most_torchs(K: int) -> None:
    a, b = fp8_operands(512, 512, K, device="cuda")
    one, exact = torch.ones((), device="cuda"), a.double() @ b.double()

    def error(product: Callable[..., Tensor], fast: bool) -> float:
        given = a, b, one, ScalingType.TensorWise, one, ScalingType.TensorWise
        y = product(*given, output_dtype=F32, use_fast_accum=fast)
        return float((y.double() - exact).norm() / exact.norm())

    promoted, fast = error(scaled_mm, False), error(scaled_mm, True)

    assert promoted < 1.5e-4
    assert promoted < fast < 1.1 * error(torch.nn.functional.scaled_mm, True)


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

    assert (pairs.dtype, pairs.stride(1)) == (BF16, 1)
    assert pairs.shape[1] >= 2
    bytes_of_rows = pairs.view(E4M3).float()
    assert torch.equal(bytes_of_rows[:, :K], t.float())
    assert not bytes_of_rows[:, K:].any()


# ---- how a call may be written
M, N, K = 6, 16, 32
A = torch.randint(-4, 5, (M, K)).to(E4M3)
B = torch.randint(-4, 5, (N, K)).to(E4M3).t()
BIAS, RESIDUAL = torch.randint(-4, 5, (N,)).to(BF16), torch.randint(-4, 5, (M, N)).to(BF16)
HALF = torch.tensor(0.5)
ROWS, COLUMNS = torch.full((M, 1), 2.0), torch.full((1, N), 0.25)
ONE = ScalingType.TensorWise
PLAIN: dict[str, Any] = {
    "mat_a": A,
    "mat_b": B,
    "scale_a": HALF,
    "scale_recipe_a": ONE,
    "scale_b": HALF,
    "scale_recipe_b": ONE,
}
BY_PLACE = (A, B, HALF, ONE, HALF, ONE, None, None, BIAS.half(), F16, (), True)
CALLS_ALIKE: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "all of torch's arguments by place": (
        lambda: scaled_mm(*BY_PLACE),
        {"bias": BIAS.half(), "output_dtype": F16, "use_fast_accum": True},
    ),
    "lists of one": (lambda: scaled_mm(A, B, [HALF], [ONE], [HALF], [ONE], [], []), {}),
    "no swizzle": (
        lambda: scaled_mm(
            A, B, HALF, ONE, HALF, ONE, SwizzleType.NO_SWIZZLE, contraction_dim=(-1, 0)
        ),
        {},
    ),
    "a recipe that is an object of its own": (
        lambda: scaled_mm(A, B, HALF, ScalingType(ONE.value), HALF, ONE),
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS_ALIKE)
def test_calls_are_written_as_those_of_torch(name: str) -> None:
    call, arguments = CALLS_ALIKE[name]

    assert torch.equal(call(), scaled_mm(**PLAIN | arguments))


def as_torch_wants(stored: Tensor, recipe: str, padded: bool) -> Tensor:
    """Scales in the order that torch requires: those of square blocks lie along K, in fours."""
    if recipe == BY_ROW:
        return stored.t().contiguous().t()
    blocks = stored.shape[1]
    wide = torch.full((stored.shape[0], -(-blocks // 4) * 4), float("nan"))
    wide[:, :blocks] = stored
    return (wide if padded else stored).t()


@pytest.mark.parametrize("pair", BLOCKS, ids=" by ".join)
def test_scales_of_blocks_come_as_torch_wants_them(pair: tuple[str, str]) -> None:
    for terms, padded in ((100, True), (400, False), (640, True), (640, False)):
        case = Case((200, 300, terms), pair)
        scale_a, scale_b = (
            as_torch_wants(stored, recipe, padded)
            for stored, recipe in zip(case.stored, pair, strict=True)
        )
        _, recipe_a, _, recipe_b = case.scales

        got = scaled_mm(case.a, case.b, scale_a, recipe_a, scale_b, recipe_b, output_dtype=F32)

        assert torch.equal(got.double(), case.exact), (terms, padded)


# ---- which recipe a shape means
# (M, N, K), the shapes of both scales, and the recipes that the kernel is asked for.
MEANT: dict[str, tuple[Shape, tuple[int, ...], tuple[int, ...], Any]] = {
    "blocks of A's rows": ((200, 300, 400), (200, 4), (4, 3), (BY_ROW, SQUARE)),
    "blocks of rows and columns": ((200, 300, 400), (200, 4), (4, 300), (BY_ROW, BY_ROW)),
    "square blocks of A": ((200, 300, 400), (2, 4), (4, 300), (SQUARE, BY_ROW)),
    "square blocks of both": ((200, 300, 400), (2, 4), (4, 3), (SQUARE, SQUARE)),
    "rows and columns": ((200, 300, 400), (200, 1), (1, 300), None),
    "one element": ((200, 300, 400), (1, 1), (1,), None),
    "one block of terms is a whole row": ((200, 300, 100), (200, 1), (1, 300), None),
    "one block of terms, square for B": ((200, 300, 100), (200, 1), (1, 3), (BY_ROW, SQUARE)),
    "one block of terms, square for A": ((200, 300, 100), (2, 1), (1, 300), (SQUARE, BY_ROW)),
    "one block of A": ((100, 300, 100), (1, 1), (1, 3), (SQUARE, SQUARE)),
    "one block of B": ((200, 100, 100), (2, 1), (1, 1), (SQUARE, SQUARE)),
    "one block of each": ((100, 90, 80), (1, 1), (1, 1), None),
    "one row": ((1, 300, 400), (1, 4), (4, 3), (BY_ROW, SQUARE)),
    "one row with a scale for each column": ((1, 300, 100), (1, 1), (1, 300), None),
    "one column": ((200, 1, 400), (200, 4), (4, 1), (BY_ROW, SQUARE)),
    "as many rows as blocks of terms": ((4, 4, 400), (4, 4), (4, 4), (BY_ROW, BY_ROW)),
}


@pytest.mark.parametrize("name", MEANT)
def test_the_shapes_of_scales_mean_recipes(name: str) -> None:
    sizes, shape_a, shape_b, meant = MEANT[name]

    recipes = block_scales.recipes(*sizes, torch.ones(shape_a), torch.ones(shape_b))

    assert recipes == meant


# ---- gradients of bias and residual
class Differentiable:
    """A call as a function of bias and residual, what torch makes of it in fp32, the two, and a
    gradient that arrives.
    """

    def __init__(self, activation: Activation | None, dtype: torch.dtype, device: str) -> None:
        columns = 2 * N if activation in GATED else N
        # Sums of integers up to 2, which the tensor cores hold.
        self.a, self.b = fp8_operands(M, columns, K, device=device, most=2)
        scales = HALF.to(device), torch.rand(1, columns, device=device) + 0.5
        self.scales = scales[0], ONE, scales[1], ScalingType.RowWise
        self.activation, self.dtype = activation, dtype
        self.leaves = (
            torch.randn(columns, device=device).to(dtype).requires_grad_(),
            torch.randn(M, 1, device=device).to(dtype).requires_grad_(),
        )
        self.grad = torch.randn(N, M, device=device).to(dtype).t()

    def ours(self, bias: Tensor, residual: Tensor) -> Tensor:
        how: dict[str, Any] = {"activation": self.activation, "output_dtype": self.dtype}
        return scaled_mm(self.a, self.b, *self.scales, bias=bias, residual=residual, **how)

    def torchs(self, bias: Tensor, residual: Tensor) -> Tensor:
        scale_a, _, scale_b, _ = self.scales
        x = (scale_a * self.a.float()) @ (scale_b * self.b.float()) + bias.float()
        return apply(x, self.activation or "", residual.float()).to(self.dtype)

    def gradients(self, function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*self.leaves), self.leaves, self.grad)


TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    F32: {"atol": 1e-4, "rtol": 1e-4},
    BF16: {"atol": 0.1, "rtol": 0.03},
}


@devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_bias_and_residual_have_gradients(
    activation: Activation | None, dtype: torch.dtype, device: str
) -> None:
    case = Differentiable(activation, dtype, device)

    got = case.gradients(case.ours)

    torch.testing.assert_close(got, case.gradients(case.torchs), **TOLERANCES[dtype])


# None, a function of one number, and a gated one.
@devices
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu"], ids=str)
def test_compiled_calls_have_gradients_and_eager_ones_second_derivatives(
    activation: Activation | None, device: str
) -> None:
    case = Differentiable(activation, F32, device)
    torch._dynamo.reset()
    compiled = torch.compile(case.ours, backend="aot_eager", fullgraph=True)

    def derivatives(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = function(*case.leaves).square().sum()
        first = torch.autograd.grad(loss, case.leaves, create_graph=True)
        squares = torch.stack([t.square().sum() for t in first])
        return torch.autograd.grad(squares.sum(), case.leaves)

    torch.testing.assert_close(
        case.gradients(compiled), case.gradients(case.torchs), **TOLERANCES[F32]
    )
    torch.testing.assert_close(
        derivatives(case.ours), derivatives(case.torchs), atol=1e-3, rtol=1e-4
    )


# ---- what is refused: beside plain arguments, and 200x300x400 with scales of blocks
WIDE_A, WIDE_B = fp8_operands(200, 300, 400)
ROW_BLOCKS, SQUARE_BLOCKS = RECIPES[BY_ROW], RECIPES[SQUARE]
IN_BLOCKS = {"scale_recipe_a": ROW_BLOCKS, "scale_recipe_b": SQUARE_BLOCKS}
LARGE = (
    {"mat_a": WIDE_A, "mat_b": WIDE_B, "scale_a": torch.ones(200, 4), "scale_b": torch.ones(4, 3)}
) | IN_BLOCKS
REFUSED: dict[str, dict[str, Any]] = {
    "mat_a.dtype is torch.float32, expected one of torch.float8_e4m3fn": PLAIN
    | {"mat_a": torch.ones(M, K)},
    r"mat_a.shape\[1\] is 32 but mat_b.shape\[0\] is 64": PLAIN
    | {"mat_b": fp8_operands(4, N, 64)[1]},
    "mat_a has 1 dimensions, expected 2": PLAIN | {"mat_a": A[0]},
    r"scale_a.shape is \(16, 1\), expected \(6, 1\) with RowWise": PLAIN
    | {"scale_a": torch.ones(16, 1), "scale_recipe_a": RECIPES[ROW]},
    r"scale_b.shape is \(\), expected \(1, 16\) with RowWise": PLAIN
    | {"scale_recipe_b": RECIPES[ROW]},
    r"scale_a.shape is \(6, 1\), expected one element with TensorWise": PLAIN | {"scale_a": ROWS},
    "scale_b is torch.float16": PLAIN | {"scale_b": HALF.half()},
    "output_dtype is torch.float64, expected one of torch.bfloat16": PLAIN
    | {"output_dtype": torch.float64},
    "bias.dtype is torch.float32, expected torch.bfloat16": PLAIN | {"bias": torch.ones(N)},
    r"scale_a.shape is \(200, 3\), expected \(200, 4\) with BlockWise1x128": LARGE
    | {"scale_a": torch.ones(200, 3)},
    r"scale_a.shape is \(2, 4\), expected \(4, 2\) with BlockWise128x128": LARGE
    | {"scale_a": torch.ones(2, 4), "scale_recipe_a": SQUARE_BLOCKS},
    r"scale_b.shape is \(3, 4\), expected \(4, 3\) with BlockWise128x128": (
        LARGE | {"scale_b": torch.ones(3, 4)}
    ),
    r"scale_b.shape is \(4, 300\), expected \(300, 4\) with BlockWise1x128": LARGE
    | {"scale_b": torch.ones(4, 300), "scale_recipe_b": ROW_BLOCKS},
    r"scale_b.shape is \(\), expected \(4, 1\) or \(1, 1\) with BlockWise128x128": PLAIN
    | IN_BLOCKS
    | {"scale_a": ROWS},
    "scale_a is torch.float64 on cpu, expected torch.float32 on cpu": LARGE
    | {"scale_a": torch.ones(200, 4).double()},
    "use_fast_accum is True, expected False with scales of blocks": LARGE
    | {"use_fast_accum": True},
    "scale_recipe_a is BlockWise1x32, expected one of TensorWise, RowWise, BlockWise1x128": PLAIN
    | {"scale_recipe_a": ScalingType.BlockWise1x32},
    "scale_recipe_b is TensorWise, expected BlockWise1x128 or BlockWise128x128 with": PLAIN
    | {"scale_recipe_a": ROW_BLOCKS},
    "scale_recipe_b is BlockWise128x128, expected TensorWise or RowWise with TensorWise": PLAIN
    | {"scale_recipe_b": SQUARE_BLOCKS},
    "scale_recipe_a has 2 entries, expected one": PLAIN | {"scale_recipe_a": [ONE, ONE]},
    "scale_b has 2 entries, expected one": PLAIN | {"scale_b": [HALF, HALF]},
    "swizzle_b is SWIZZLE_32_4_4, expected NO_SWIZZLE or None": PLAIN
    | {"swizzle_b": SwizzleType.SWIZZLE_32_4_4},
    r"contraction_dim is \(0, 1\), expected \(\) or \(1, 0\)": PLAIN | {"contraction_dim": (0, 1)},
    r"contraction_dim is \(1,\), expected": PLAIN | {"contraction_dim": (1,)},
}
BAD_TYPES: dict[str, dict[str, Any]] = {
    "mat_a is NoneType, expected a torch.Tensor": {"mat_a": None},
    "mat_b is list, expected a torch.Tensor": {"mat_b": [1.0]},
    "scale_a is float, expected a torch.Tensor": {"scale_a": 1.0},
    "scale_b is NoneType, expected a torch.Tensor": {"scale_b": None},
    "bias is float, expected a torch.Tensor": {"bias": 1.0},
    "output_dtype is str, expected a torch.dtype": {"output_dtype": "bfloat16"},
    "output_dtype is list, expected a torch.dtype": {"output_dtype": []},
    "use_fast_accum is int, expected a bool": {"use_fast_accum": 1},
    "activation is int, expected a str": {"activation": 3},
    r"scaled_mm\(\) got an unexpected keyword argument 'out_dtype'": {"out_dtype": BF16},
    "scale_recipe_b is str, expected a member of torch.nn.functional.ScalingType": {
        "scale_recipe_b": "RowWise"
    },
    "swizzle_a is int, expected a member of torch.nn.functional.SwizzleType": {"swizzle_a": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_names_the_argument(message: str) -> None:
    with pytest.raises(OperandError, match=message):
        scaled_mm(**REFUSED[message])


@pytest.mark.parametrize("message", BAD_TYPES)
def test_arguments_of_a_wrong_type(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        scaled_mm(**PLAIN | BAD_TYPES[message])


# ---- warm calls: a stand-in has the kernel's place on the CPU
Recorded = tuple[list[str], list[Any]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The calls that go through the operator, and the problems that are planned."""
    calls, problems = list[str](), list[Any]()
    by_operator = module._by_operator

    def record(*given: Any) -> Tensor:
        calls.append("scaled_mm")
        return by_operator(*given)

    def stand_in(problem: Any, *_: object, no_product: bool) -> Callable[..., None]:
        problems.append(problem)

        def launch(a: Tensor, b: Tensor, c: None, out: Tensor, *rest: Any) -> None:
            _, _, bias, residual, _, scale_a, scale_b = rest
            x = product_of_pairs(problem.formats, a, b, scale_a, scale_b)
            x = x if bias is None else x + bias
            out.copy_(apply(x, problem.epilogue.activation, residual))

        return launch

    monkeypatch.setattr(module, "_by_operator", record)
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", stand_in)
    return calls, problems


BLOCKS_A, BLOCKS_B = block_scale(200, 400, BY_ROW), block_scale(300, 400, SQUARE).t()
BY_COLUMNS = block_scale(300, 400, BY_ROW)
# Names with the formats of the problem.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (PLAIN | {"scale_b": torch.tensor(2.0)}, "promoted"),
    "one scale for both": (PLAIN, "promoted"),
    "scales of rows and columns": (
        PLAIN
        | {"scale_a": ROWS, "scale_recipe_a": RECIPES[ROW]}
        | {"scale_b": COLUMNS, "scale_recipe_b": RECIPES[ROW]},
        "promoted",
    ),
    "all of an epilogue": (
        PLAIN | {"bias": BIAS, "activation": "gelu", "residual": RESIDUAL},
        "promoted",
    ),
    "fast sums": (PLAIN | {"use_fast_accum": True}, ""),
    "fp32 out": (PLAIN | {"output_dtype": F32}, "promoted"),
    "scales of blocks": (
        LARGE | {"scale_a": BLOCKS_A, "scale_b": BLOCKS_B},
        "promoted 1x128 128x128",
    ),
    "scales of blocks by columns": (
        LARGE | {"scale_a": BLOCKS_A, "scale_b": BY_COLUMNS, "scale_recipe_b": ROW_BLOCKS},
        "promoted 1x128 1x128",
    ),
    "scales of blocks in another order": (
        LARGE | {"scale_a": BLOCKS_A.t().contiguous().t(), "scale_b": BLOCKS_B},
        "promoted 1x128 128x128",
    ),
}


def test_warm_calls_skip_the_operator_and_keep_apart(recorded: Recorded) -> None:
    """Of one shape or of several. The kernel's results are torch's."""
    calls, problems = recorded
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scaled_operator, "unsupported_reason", lambda device: "no kernel")
        by_torch = {name: scaled_mm(**options) for name, (options, _) in CALLS.items()}
    cold = {name: scaled_mm(**options) for name, (options, _) in CALLS.items()}
    calls.clear()

    warm = {name: scaled_mm(**options) for name, (options, _) in CALLS.items()}

    assert calls == []
    formats = {f"e4m3 e4m3 {words}".strip() for _, words in CALLS.values()}
    assert {problem.formats for problem in problems} == formats
    in_blocks = next(p for p in problems if p.formats.endswith("1x128 128x128")).epilogue
    assert in_blocks.scale_a.strides == BLOCKS_A.stride()
    assert in_blocks.scale_b.strides == BLOCKS_B.stride()
    for name, result in warm.items():
        assert torch.equal(result, cold[name]), name
        assert (result.dtype, result.stride()) == (cold[name].dtype, cold[name].stride()), name
        torch.testing.assert_close(result, by_torch[name], msg=name, atol=0.05, rtol=0.02)


def test_a_wrong_argument_is_refused_when_its_like_is_warm(recorded: Recorded) -> None:
    plain: dict[str, Any] = PLAIN
    for fast in (False, True):
        scaled_mm(**plain | {"use_fast_accum": fast})

    for name, wrong in (("use_fast_accum", 1), ("output_dtype", []), ("scale_a", 1.0)):
        with pytest.raises(TypeError, match=f"{name} is "):
            scaled_mm(**plain | {name: wrong})
    with pytest.raises(OperandError, match="scale_recipe_a has 2 entries"):
        scaled_mm(**plain | {"scale_recipe_a": [ONE, ONE]})
    with pytest.raises(
        OperandError, match=r"scale_a.shape is \(\), expected \(6, 1\) with RowWise"
    ):
        scaled_mm(**plain | {"scale_recipe_a": RECIPES[ROW]})
