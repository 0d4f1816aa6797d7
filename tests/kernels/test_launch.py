"""What a launch of a Triton or Gluon kernel passes, beside what its compiler was told."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.rungs import own, rung

from outblas.call.epilogue import EpilogueArgs
from outblas.call.problem import Problem, problem
from outblas.device import launch
from outblas.device.grid import chunks_of
from outblas.kernels import portable

FP16, FP32 = torch.float16, torch.float32


Arguments = tuple[Any, ...]


def flattened(
    types: Any, value: Any, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Types and values by path, as Triton's launcher walks a signature and the arguments."""
    if isinstance(types, tuple):
        assert len(types) == len(value), path
        for i, (kind, part) in enumerate(zip(types, value, strict=True)):
            yield from flattened(kind, part, (*path, i))
    else:
        yield path, types, value


@dataclass(frozen=True)
class Call:
    """A product of a batch, all of whose strides differ."""

    kernel: str
    dtype: torch.dtype
    batch: tuple[int, ...] = (3, 5)
    addend: bool = True
    bias: str = ""
    residual: bool = False
    activation: str = ""

    def tensors(self) -> Arguments:
        """A, B, C and the output, None for a C that the call does not have."""
        M, N, K = 33, 40, 24

        def padded(rows: int, columns: int, pad: int, batch: tuple[int, ...]) -> torch.Tensor:
            matrix = torch.empty(*batch, rows, columns + pad, dtype=self.dtype, device="meta")
            return matrix[..., :columns]

        a, b = padded(M, K, 2, self.batch), padded(K, N, 4, self.batch)
        c = padded(M, N, 8, ()) if self.addend else None
        return a, b, c, padded(M, N, 6, self.batch)

    def epilogue(self, out: torch.Tensor) -> EpilogueArgs:
        """What is done after the product."""
        column = torch.empty(out.shape[-2], 1, dtype=self.dtype, device="meta")
        row = torch.empty(out.shape[-1], dtype=self.dtype, device="meta")
        return EpilogueArgs(
            self.activation,
            bias={"column": column, "row": row}.get(self.bias),
            residual=torch.empty_like(out) if self.residual else None,
        )

    @property
    def has_epilogue(self) -> bool:
        return bool(self.bias or self.residual or self.activation)


def specialization(kernel: str, given: Problem) -> tuple[Any, Any, Any]:
    """What the compiler is told for sm_80, the constants of the kernel, and its config."""
    if kernel == "portable":
        config = portable.Config(64, 64, 32)
        constants = portable._constants(given, config, "ieee", interpreted=False)
        return portable._specialize(given, config, 80), constants, config
    own_config = own(kernel)
    constants = rung(kernel).constants(own_config, given, 80)
    return rung(kernel).specialization(own_config, given, constants, 80), constants, own_config


CALLS = {
    "naive": Call("simt.naive", FP32),
    "pipelined, a batch": Call("simt.pipelined", FP32, batch=(3,), addend=False),
    "double_buffer": Call("turing.double_buffer", FP16),
    "cp_async": Call("turing.cp_async", FP16, addend=False),
    "cp_async, bias and gelu": Call("turing.cp_async", FP16, bias="row", activation="gelu"),
    "portable, a matrix": Call("portable", FP32, batch=()),
    "portable, bias and residual": Call(
        "portable", FP16, bias="column", residual=True, addend=False
    ),
}


@dataclass(frozen=True)
class Launch:
    """What a launch passed, beside what the compiler was told."""

    types: Arguments
    constants: dict[tuple[int, ...], Any]
    passed: Arguments
    tensors: Arguments
    epilogue: Arguments


@pytest.fixture(params=CALLS.values(), ids=list(CALLS))
def launched(request: pytest.FixtureRequest) -> Launch:
    """The first launch of a call, whose compiled kernel notes its arguments."""
    call: Call = request.param
    tensors = a, b, c, out = call.tensors()
    extra = call.epilogue(out)
    given = problem(a, b, out, c, scaled=call.addend, extra=extra)
    told, constants, config = specialization(call.kernel, given)
    passed: list[Arguments] = []

    def compiled_kernel(*arguments: Any) -> None:
        passed.append(arguments)

    start = launch.bind(given, chunks_of(given, config), lambda _: compiled_kernel, constants)
    epilogue = (extra.bias, extra.residual, extra.aux)
    start(*tensors, 2, 0.5, *(epilogue if call.has_epilogue else ()))
    types = tuple(kind for _, kind in told.signature)
    return Launch(types, dict(told.constants), passed[0], tensors, epilogue)


def test_constants_are_those_of_the_compile(launched: Launch) -> None:
    for path, kind, value in flattened(launched.types, launched.passed):
        if kind == "constexpr":
            assert value == launched.constants[path], path


def test_tensors_are_the_caller_s_and_have_the_type_that_was_told(launched: Launch) -> None:
    callers = (*launched.tensors, *launched.epilogue)
    others = ("constexpr", "i32", "i64", "fp32")

    for path, kind, value in flattened(launched.types, launched.passed):
        if kind not in others:
            assert any(value is tensor for tensor in callers), path
            assert kind == launch.TYPES[value.dtype], path
