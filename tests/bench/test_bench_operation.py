"""What the bench times beside bare products: epilogues, scaled fp8 operands, and how their results
are judged.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outblas.bench.operands import BlockScaled
from outblas.bench.operation import Operation
from outblas.call.epilogue import apply
from outblas.call.steps import Steps

SHAPE = (48, 64, 96)
ALL_STEPS = "bias+gelu+residual"


# ---- epilogues as text
@pytest.mark.parametrize(
    "text", ["", "bias", "gelu", "residual", "bias+residual", ALL_STEPS, "swiglu+residual"]
)
def test_an_epilogue_is_written_as_it_is_read(text: str) -> None:
    assert str(Steps.parse(text)) == text


@pytest.mark.parametrize("text", ["residual+bias", "gelu+relu", "bias+tanh", "bias+bias", "+"])
def test_an_epilogue_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"epilogue is .* expected some of bias, an activation"):
        Steps.parse(text)


# ---- operands
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        ("fp8", ((), ())),
        ("fp8-rowwise", ((48, 1), (1, 64))),
        ("fp8-block", ((48, 1), (1, 1))),
    ],
)
def test_scales_are_of_an_operand_or_of_rows_and_columns_or_of_blocks(
    dtype: str, shapes: Any
) -> None:
    operation = Operation(dtype)

    *_, extras = operation.operands(SHAPE, "nt", "cpu")

    assert tuple(scale.shape for scale in extras.scales) == shapes


# ---- what cannot be timed
@pytest.mark.parametrize(
    ("operation", "given", "message"),
    [
        (Operation("fp8"), {"layouts": ["nn"]}, "--dtype fp8 needs --layout nt"),
        (Operation("fp8"), {"backward": True}, "cannot be combined with --backward"),
        (
            Operation(steps=Steps(bias=True)),
            {"backward": True},
            "--backward cannot be combined with --epilogue",
        ),
        (Operation(steps=Steps(activation="geglu")), {"shapes": [(8, 7, 8)]}, "has N = 7"),
        (
            Operation("fp8-block"),
            {"shapes": [(8, 8, 640)]},
            "has K = 640, but --dtype fp8-block needs multiples of 512",
        ),
    ],
    ids=["layout of fp8", "backward of fp8", "backward with steps", "odd gate", "odd blocks"],
)
def test_what_an_operation_lacks_is_refused(
    operation: Operation, given: dict[str, Any], message: str
) -> None:
    asked: dict[str, Any] = {"shapes": [SHAPE], "layouts": ["nt"], "backward": False} | given

    with pytest.raises(ValueError, match=message):
        operation.check(asked["shapes"], asked["layouts"], backward=asked["backward"])


def test_fp8_promises_no_batch_invariance() -> None:
    with pytest.raises(ValueError, match="--batch-invariant cannot be combined with --dtype fp8"):
        Operation("fp8", batch_invariant=True)


# ---- calls and their check
OPERATIONS = [
    Operation(steps=Steps.parse(text)) for text in ("bias", "relu", ALL_STEPS, "swiglu+residual")
] + [Operation("float32", Steps.parse(ALL_STEPS))]


def in_float64(operation: Operation) -> Callable[..., Callable[[], torch.Tensor]]:
    """Calls that compute in float64 and round once."""

    def prepare(a: Any, b: Any, out: Any, extras: Any) -> Callable[[], torch.Tensor]:
        if operation.scaling == "block":
            left, right = BlockScaled(a, b, *extras.scales).dequantised()
            x = left @ right
        else:
            x = a.double() @ b.double()
            for scale in extras.scales:
                x = x * scale
        x = x if extras.bias is None else x + extras.bias
        residual = None if extras.residual is None else extras.residual.double()
        return lambda: apply(x, operation.steps.activation, residual).to(out.dtype)

    return prepare


SCALED = [Operation(f"fp8{scaling}") for scaling in ("", "-rowwise", "-block")]
BLOCKS = SCALED[-1]
CHECKS = pytest.mark.parametrize(
    ("operation", "integers"),
    [
        *(pytest.param(operation, False, id=str(operation)) for operation in OPERATIONS + SCALED),
        pytest.param(BLOCKS, True, id="integers"),
    ],
)


@CHECKS
def test_results_that_are_rounded_once_pass(operation: Operation, integers: bool) -> None:
    assert operation.fault(in_float64(operation), SHAPE, "cpu", integers=integers) is None


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_torchs_own_functions_compute_the_same(operation: Operation) -> None:
    a, b, out, extras = operation.operands(SHAPE, "nt", "cpu")

    result = operation.by_torch(a, b, None, extras)

    expected = in_float64(operation)(a, b, out, extras)()
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.1)


@CHECKS
def test_one_wrong_element_is_found(operation: Operation, integers: bool) -> None:
    def prepare(*operands: Any) -> Callable[[], torch.Tensor]:
        result = in_float64(operation)(*operands)()
        result[5, 7] += 0.5
        return lambda: result

    fault = operation.fault(prepare, SHAPE, "cpu", integers=integers)

    assert fault is not None
    assert fault.startswith("wrong: 1 of ")
    assert fault.endswith("first at [5, 7]")


@pytest.mark.parametrize("operand", [0, 1], ids=["scale_a", "scale_b"])
def test_a_scale_of_another_block_is_found(operand: int) -> None:
    def prepare(a: Any, b: Any, out: Any, extras: Any) -> Callable[[], torch.Tensor]:
        scales = list(extras.scales)
        scales[operand] = scales[operand].roll(1, 1 - operand)
        left, right = BlockScaled(a, b, *scales).dequantised()
        return lambda: (left @ right).to(out.dtype)

    fault = BLOCKS.fault(prepare, (48, 64, 1024), "cpu", integers=True)

    assert fault is not None
    assert fault.startswith("wrong: ")


@pytest.mark.parametrize(
    ("operation", "is_exact"),
    [
        (BLOCKS, True),
        (Operation("fp8-block", Steps(bias=True)), False),
        (Operation("fp8-rowwise"), False),
    ],
    ids=["blocks", "blocks with a bias", "rows"],
)
def test_block_scaled_products_without_an_epilogue_have_exact_ones(
    operation: Operation, is_exact: bool
) -> None:
    assert operation.has_exact_blocks == is_exact
