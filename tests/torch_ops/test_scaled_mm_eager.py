"""The short way of warm calls of `scaled_mm`: taken where the operator would do nothing else, with
the operator's results. A stand-in has the kernel's place on the CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fp8 import block_scale, fp8_operands, scaled

import outblas
from outblas.core.epilogue import apply
from outblas.runtime import dispatch, launcher
from outblas.torch_ops import scaled_mm as module
from outblas.torch_ops import scaled_operator

Tensor = torch.Tensor
M, N, K = 16, 24, 32


def stand_in_launcher(problem: Any, *_: object, no_product: bool) -> Callable[..., None]:
    """A launcher of what computes as the kernel does, from pairs of fp8 values."""
    recipes = problem.formats.split()[3:]

    def wide(pairs: Tensor) -> Tensor:
        return pairs.contiguous().view(torch.float8_e4m3fn).float()

    def launch(
        a: Tensor, b: Tensor, c: None, out: Tensor, alpha: int, beta: int, *rest: Any
    ) -> None:
        bias, residual, _, scale_a, scale_b = rest
        if recipes:
            of_a, of_b = (
                scaled(wide(a), scale_a, recipes[0]),
                scaled(wide(b.t()), scale_b.t(), recipes[1]),
            )
            x = (of_a @ of_b.t()).float()
        else:
            x = scale_a * wide(a) @ wide(b.t()).t() * scale_b
        x = x if bias is None else x + bias
        out.copy_(apply(x, problem.epilogue.activation, residual))

    return launch


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What calls that go through the operator leave here; the plans of others are forgotten."""
    called: list[str] = []
    by_operator = module._by_operator

    def record(*given: Any) -> Tensor:
        called.append("scaled_mm")
        return by_operator(*given)

    monkeypatch.setattr(module, "_by_operator", record)
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", stand_in_launcher)
    dispatch.clear_cache()
    yield called
    dispatch.clear_cache()


A8, B8 = fp8_operands(M, N, K)  # kept: a plan depends on where in a line of memory they begin
ONE, HALF = torch.tensor(1.0), torch.tensor(0.5)
ROWS, COLUMNS = torch.rand(M, 1), torch.rand(1, N)
BIAS, RESIDUAL = torch.randn(N).bfloat16(), torch.randn(M, N).bfloat16()
A_LARGE, B_LARGE = fp8_operands(130, 264, 400)
LARGE = {"input": A_LARGE, "mat2": B_LARGE}
BY_ROW_A = block_scale(130, 400, "1x128")
SQUARE_B = block_scale(264, 400, "128x128").t()
BY_ROW_B = block_scale(264, 400, "1x128").t()
WIDE = fp8_operands(M, 264, K)[1]
EACH_OF_WIDE = torch.tensor([[1.0, 2.0, 4.0]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one scale for both": {"scale_b": ONE},
    "scales of rows and columns": {"scale_a": ROWS, "scale_b": COLUMNS},
    "bias": {"bias": BIAS},
    "all of an epilogue": {"bias": BIAS, "activation": "gelu", "residual": RESIDUAL},
    "fast sums": {"use_fast_accum": True},
    "fp32 out": {"out_dtype": torch.float32},
    "scales of blocks": LARGE | {"scale_a": BY_ROW_A, "scale_b": SQUARE_B},
    "scales of blocks by columns": LARGE | {"scale_a": BY_ROW_A, "scale_b": BY_ROW_B},
    "scales of blocks in another order": LARGE
    | {"scale_a": BY_ROW_A.t().contiguous().t(), "scale_b": SQUARE_B},
    "one block of A": {"scale_a": HALF.view(1, 1), "mat2": WIDE, "scale_b": EACH_OF_WIDE},
}


def call(**changes: Any) -> Tensor:
    """A product of 16×24×32."""
    given: dict[str, Any] = {"input": A8, "mat2": B8, "scale_a": ONE, "scale_b": HALF} | changes
    return outblas.scaled_mm(**given)


def test_warm_calls_skip_the_operator_and_keep_apart(operators: list[str]) -> None:
    """Of one shape or of several. The kernel's results are torch's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scaled_operator, "unsupported_reason", lambda device: "no kernel")
        expected = {name: call(**options) for name, options in CALLS.items()}
    cold = {name: call(**options) for name, options in CALLS.items()}
    operators.clear()

    warm = {name: call(**options) for name, options in CALLS.items()}

    assert operators == []
    for name, result in warm.items():
        assert torch.equal(result, cold[name]), name
        assert (result.dtype, result.stride()) == (cold[name].dtype, cold[name].stride()), name
        torch.testing.assert_close(result, expected[name], msg=name, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("fast", [False, True])
def test_sums_are_promoted_unless_fast_ones_are_asked_for(
    fast: bool, operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    formats: list[str] = []

    def launcher_of(problem: Any, *given: object, no_product: bool) -> Callable[..., None]:
        formats.append(problem.formats)
        return stand_in_launcher(problem, *given, no_product=no_product)

    monkeypatch.setattr(launcher, "best_launcher", launcher_of)

    call(use_fast_accum=fast)

    assert formats == ["e4m3 e4m3" + " promoted" * (not fast)]


def test_the_problem_has_the_strides_of_scales_of_blocks(
    operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Any] = []

    def launcher_of(problem: Any, *given: object, no_product: bool) -> Callable[..., None]:
        problems.append(problem)
        return stand_in_launcher(problem, *given, no_product=no_product)

    monkeypatch.setattr(launcher, "best_launcher", launcher_of)

    call(**CALLS["scales of blocks"])

    assert [problem.formats for problem in problems] == ["e4m3 e4m3 promoted 1x128 128x128"]
    assert problems[0].epilogue.scale_a.strides == BY_ROW_A.stride()
    assert problems[0].epilogue.scale_b.strides == SQUARE_B.stride()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "use_fast_accum": ({"use_fast_accum": 1}, "use_fast_accum is int, expected a bool"),
    "out_dtype": ({"out_dtype": []}, "out_dtype is list, expected a torch.dtype"),
    "scale_a": ({"scale_a": 1.0}, "scale_a"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_when_its_like_is_warm(name: str, operators: list[str]) -> None:
    changes, message = WRONG[name]
    call()
    call(use_fast_accum=True)

    with pytest.raises(TypeError, match=message):
        call(**changes)
