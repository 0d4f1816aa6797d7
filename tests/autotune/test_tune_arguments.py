"""The argument `tune` and the variable OUTBLAS_TUNE, and what is said of bad arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import outblas

A, B = torch.randn(6, 5), torch.randn(5, 4)


# Modes.


# Bad arguments.


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        pytest.param(
            ValueError,
            "tune is 'yes', expected one of off, lookup, on",
            lambda: outblas.matmul(A, B, tune="yes"),  # type: ignore[arg-type]
            id="no mode",
        ),
        pytest.param(
            ValueError,
            "tune is ''",
            lambda: outblas.matmul(A, B, tune=""),  # type: ignore[arg-type]
            id="an empty mode",
        ),
        pytest.param(
            TypeError,
            "tune is bool, expected a str: off, lookup, on",
            lambda: outblas.matmul(A, B, tune=True),  # type: ignore[arg-type]
            id="a bool",
        ),
        pytest.param(
            ValueError,
            "tune is 'yes'",
            lambda: outblas.addmm(torch.zeros(4), A, B, tune="yes"),  # type: ignore[arg-type]
            id="no mode for addmm",
        ),
        pytest.param(
            ValueError,
            "input is on cpu, expected an NVIDIA GPU",
            lambda: outblas.tune(A, B),
            id="operands on the CPU",
        ),
        pytest.param(
            TypeError,
            "input is list, expected a torch.Tensor",
            lambda: outblas.tune([1.0], B),  # type: ignore[arg-type]
            id="no tensor",
        ),
        pytest.param(
            ValueError,
            r"input.shape\[1\] is 5 but other.shape\[0\] is 4",
            lambda: outblas.tune(A, B[:4]),
            id="shapes that do not fit",
        ),
        pytest.param(
            ValueError,
            "input is on cpu, expected an NVIDIA GPU",
            lambda: outblas.tune(b=B, a=A),
            id="operands by their other names",
        ),
        pytest.param(
            TypeError,
            "unexpected keyword argument 'c'",
            lambda: outblas.tune(A, B, c=A),
            id="a name that no operand has",
        ),
        pytest.param(
            ValueError,
            "out_dtype is torch.float16",
            lambda: outblas.tune(A, B, out_dtype=torch.float16),
            id="no dtype of a product",
        ),
    ],
)
def test_bad_arguments_are_named(
    error: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=message):
        call()
