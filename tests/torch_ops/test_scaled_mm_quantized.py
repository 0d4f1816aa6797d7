"""`scaled_mm` with `out_recipe`: results in fp8 and their scales are those that `quantize` makes of
the result in float32; what is refused, and what tracers see.
"""

from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2, fp8_operands, with_recipes
from support.scaled_plans import product_of_pairs
from torch.nn.functional import ScalingType

import outblas
from outblas import OperandError, quantize
from outblas.base import registry
from outblas.base.compiling import CompileForbidden
from outblas.call import launcher
from outblas.call.default_kernel import PRODUCTION
from outblas.call.epilogue import ACTIVATIONS, GATED, apply
from outblas.call.problem import Problem
from outblas.device import launch
from outblas.torch_ops import scaled_mm as module
from outblas.torch_ops import scaled_operator, scaled_output

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
scaled_mm: Any = outblas.scaled_mm  # overloads do not take several dicts of arguments
ONE = torch.ones(())
FP8: dict[str, Any] = {"output_dtype": E4M3, "out_recipe": "1x128"}


def same_bits(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether values and scales are equal, NaN too, and lie in the same way."""
    (values, scale), (wanted, of_wanted) = found, expected
    assert values.dtype == wanted.dtype == E4M3
    assert values.stride() == wanted.stride()
    assert scale.stride() == of_wanted.stride()
    return torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(
        scale, of_wanted
    )


def composed(*given: Tensor, power_of_two: bool = False, **how: Any) -> tuple[Tensor, Tensor]:
    """What the result has to be."""
    x = scaled_mm(*with_recipes(*given), output_dtype=torch.float32, **how)
    return quantize(x, "1x128", power_of_two=power_of_two)


# ---- values and scales
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("M", "N"), [(1, 64), (3, 1), (130, 300), (3, 128), (130, 256)])
def test_a_result_is_that_of_float32_quantized(M: int, N: int, power_of_two: bool) -> None:
    a, b = fp8_operands(M, N, 272)
    rows, columns = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5

    found = scaled_mm(*with_recipes(a, b, rows, columns), **FP8, out_power_of_two=power_of_two)

    assert (found[0].shape, found[1].shape) == ((M, N), (M, -(-N // 128)))
    assert same_bits(found, composed(a, b, rows, columns, power_of_two=power_of_two))
    is_power = (found[1].log2() == found[1].log2().round()).all()
    assert is_power == power_of_two


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_the_epilogue_comes_first(activation: Any) -> None:
    columns = 400 if activation in GATED else 200
    a, b = fp8_operands(40, columns, 160, E5M2, E4M3)
    extra: dict[str, Any] = {
        "bias": torch.randn(columns),
        "residual": torch.randn(40, 200),
        "activation": activation,
        "use_fast_accum": True,
    }

    found = scaled_mm(*with_recipes(a, b, ONE, ONE), **FP8, **extra)

    assert found[0].shape == (40, 200)
    assert same_bits(found, composed(a, b, ONE, ONE, **extra))


def test_special_values_are_those_of_quantize() -> None:
    """NaN stays NaN, infinities become NaN, neither takes part in a scale, and the scale of zeros
    is 1.
    """
    a, b = torch.zeros(6, 128), torch.eye(128)
    a[0, 3], a[0, 5] = float("nan"), 2.0
    a[1, 3], a[1, 5] = float("inf"), 2.0
    a[3, 7] = -3.0
    a[4], a[5] = torch.inf, torch.nan
    a8, b8 = a.to(E5M2), b.to(E5M2)
    bias = torch.zeros(128)
    bias[9] = torch.inf

    plain = scaled_mm(*with_recipes(a8[2:4], b8, ONE, ONE), **FP8)
    found = scaled_mm(*with_recipes(a8, b8, ONE, ONE), **FP8)
    with_bias = scaled_mm(*with_recipes(a8[2:4], b8, ONE, ONE), bias=bias, **FP8)

    assert same_bits(found, composed(a8, b8, ONE, ONE))
    assert found[0][[0, 1, 4, 5]].isnan().all()  # a sum of products with NaN and infinity
    assert (found[1][[0, 1, 2, 4, 5]] == 1).all()
    assert (plain[0][0] == 0).all()
    assert plain[1][0] == 1
    assert plain[1][1] == torch.tensor(3.0) / 448
    assert plain[0][1, 7] == -448
    assert with_bias[0][1].isnan().nonzero().flatten().tolist() == [9]
    assert torch.equal(with_bias[1], plain[1])


def test_the_recipe_may_be_a_member_of_torchs_enumeration() -> None:
    a, b = fp8_operands(40, 192, 64)
    member = {"out_recipe": ScalingType.BlockWise1x128}

    found = scaled_mm(*with_recipes(a, b, ONE, ONE), **FP8 | member)

    assert same_bits(found, composed(a, b, ONE, ONE))


# ---- by the kernel that multiplies, for which a function stands
class Kernel:
    """Stands for `hopper.gemm`, which `quantizes` or not: `problems` were planned, and `asked` for
    before.
    """

    def __init__(self, quantizes: bool) -> None:
        self.answer = quantizes
        self.asked: list[Problem] = []
        self.problems: list[Problem] = []

    def quantizes(self, problem: Problem) -> bool:
        self.asked.append(problem)
        return self.answer

    def named_launcher(self, name: str, config: str, problem: Problem, *, no_product: bool) -> Any:
        assert (name, config, problem.out_dtype) == (PRODUCTION, "", E4M3)
        return self.launcher(problem, "", no_product=no_product)

    def launcher(self, problem: Problem, tune: str, *, no_product: bool) -> Any:
        self.problems.append(problem)

        def run(a: Any, b: Any, c: None, out: Tensor, alpha: int, beta: int, *rest: Any) -> None:
            bias, residual, _, scale_a, scale_b, *scale_out = rest
            x = product_of_pairs(problem.formats, a, b, scale_a, scale_b)
            x = apply(x if bias is None else x + bias, problem.epilogue.activation, residual)
            if problem.out_dtype != E4M3:
                out.copy_(x)
                return
            values, scale = quantize(x, "1x128", power_of_two=problem.epilogue.power_of_two)
            out.copy_(values)
            scale_out[0].copy_(scale)

        return run


@pytest.fixture(params=[True, False], ids=["fused", "composed"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(request.param)
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(registry, "load", lambda name: found)
    monkeypatch.setattr(launcher, "unsupported_reason", lambda record, problem: None)
    monkeypatch.setattr(launcher, "no_kernel_reason", launch.unsupported_dtype)  # of all kernels
    monkeypatch.setattr(launcher, "best_launcher", found.launcher)
    monkeypatch.setattr(launcher, "named_launcher", found.named_launcher)
    monkeypatch.setattr(scaled_output, "_QUANTIZES", {})
    return found


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_kernel_or_quantize_makes_a_result(
    kernel: Kernel, activation: Any, power_of_two: bool
) -> None:
    a, b = fp8_operands(40, 512, 160, most=2)
    rows, columns = 2.0 ** torch.randint(-2, 3, (40, 1)), 2.0 ** torch.randint(-2, 3, (1, 512))
    bias = torch.randint(-4, 5, (512,)).float()
    x = (a.float() * rows) @ (b.float() * columns) + bias
    expected = quantize(apply(x, activation or "", None), "1x128", power_of_two=power_of_two)
    how: dict[str, Any] = {"activation": activation, "out_power_of_two": power_of_two}

    for _ in range(2):
        found = scaled_mm(*with_recipes(a, b, rows, columns), bias=bias, **FP8, **how)
        assert same_bits(found, expected)

    (asked,) = kernel.asked
    assert asked.out_dtype is E4M3
    assert asked.epilogue.power_of_two == power_of_two
    assert asked.epilogue.scale_out is not None
    assert asked.epilogue.scale_out.strides == (1, 40)
    (planned,) = kernel.problems
    assert planned == asked or planned.out_dtype is torch.float32
    assert (planned == asked) == kernel.answer


def test_warm_calls_do_not_pass_the_operator(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that another kernel quantizes. Options make calls of their own."""
    a, b = fp8_operands(40, 512, 160, most=2)
    operands = with_recipes(a, b, ONE, ONE)
    called: list[Any] = []
    by_operator = module._by_operator

    def record(operator: Any, *given: Any) -> Any:
        called.append(operator)
        return by_operator(operator, *given)

    monkeypatch.setattr(module, "_by_operator", record)
    options: list[dict[str, Any]] = [
        {},
        {"out_power_of_two": True},
        {"activation": "swiglu"},
        {"use_fast_accum": True},
    ]
    first = [scaled_mm(*operands, **FP8, **each) for each in options]
    wide = scaled_mm(*operands, output_dtype=torch.float32)
    calls = len(called)

    second = [scaled_mm(*operands, **FP8, **each) for each in options]

    assert torch.equal(scaled_mm(*operands, output_dtype=torch.float32), wide)
    assert len(called) == calls
    for one, other in zip(first, second, strict=True):
        assert one[1].data_ptr() != other[1].data_ptr()
        assert same_bits(one, other)


def test_a_kernel_that_may_not_be_compiled_leaves_a_call_to_torch(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = fp8_operands(40, 256, 160)
    expected = quantize(a.float() @ b.float(), "1x128")

    def forbidden(*given: Any, **how: Any) -> Any:
        raise CompileForbidden("hopper.gemm")

    monkeypatch.setattr(launcher, "best_launcher", forbidden)
    monkeypatch.setattr(launcher, "named_launcher", forbidden)

    found = scaled_mm(*with_recipes(a, b, ONE, ONE), **FP8)

    assert same_bits(found, expected)


# ---- arguments
REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "output_dtype is torch.bfloat16, expected torch.float8_e4m3fn with out_recipe": (
        OperandError,
        {"out_recipe": "1x128"},
    ),
    "output_dtype is torch.float8_e5m2, expected torch.float8_e4m3fn with out_recipe": (
        OperandError,
        {"out_recipe": "1x128", "output_dtype": E5M2},
    ),
    "expected one of .*, or torch.float8_e4m3fn with out_recipe": (
        OperandError,
        {"output_dtype": E4M3},
    ),
    "out_recipe is 'rowwise', expected 1x128": (ValueError, FP8 | {"out_recipe": "rowwise"}),
    "out_recipe is BlockWise128x128, expected BlockWise1x128": (
        ValueError,
        FP8 | {"out_recipe": ScalingType.BlockWise128x128},
    ),
    "out_recipe is int, expected a str": (TypeError, FP8 | {"out_recipe": 3}),
    "out_power_of_two is int, expected a bool": (TypeError, FP8 | {"out_power_of_two": 1}),
    "out_power_of_two is True, expected False without out_recipe": (
        OperandError,
        {"out_power_of_two": True},
    ),
    "bias.dtype is torch.bfloat16, expected torch.float32": (
        OperandError,
        FP8 | {"bias": torch.ones(6).bfloat16()},
    ),
    r"got an unexpected keyword argument 'out'": (TypeError, FP8 | {"out": ONE}),
    r"mat_a.shape\[1\] is 8 but mat_b.shape\[0\] is 16": (
        OperandError,
        FP8 | {"mat_b": fp8_operands(4, 6, 16)[1]},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_covered_is_refused(message: str) -> None:
    kind, how = REFUSED[message]
    a, b = fp8_operands(4, 6, 8)
    recipes = dict.fromkeys(("scale_recipe_a", "scale_recipe_b"), ScalingType.TensorWise)

    with pytest.raises(kind, match=message):
        scaled_mm(**{"mat_a": a, "mat_b": b, "scale_a": ONE, "scale_b": ONE} | recipes | how)
