"""What a launch of a Triton or Gluon kernel passes, beside what its compiler was told."""

import pytest
import torch
from support.rungs import own, rung

from outblas.core.epilogue import EpilogueArgs
from outblas.core.problem import problem
from outblas.device import launch
from outblas.device.grid import chunks_of
from outblas.kernels import portable

FP16, FP32 = torch.float16, torch.float32


def flattened(types, value, path=()):
    """Types and values by path, as Triton's launcher walks a signature and the arguments."""
    if isinstance(types, tuple):
        assert len(types) == len(value), path
        for i, (kind, part) in enumerate(zip(types, value, strict=True)):
            yield from flattened(kind, part, (*path, i))
    else:
        yield path, types, value


def call(dtype, *, batch=(3, 5), addend=True, bias=None, residual=False, activation=None):
    """Operands of a batch, all of whose strides differ, and their problem."""
    M, N, K = 33, 40, 24
    a = torch.empty(*batch, M, K + 2, dtype=dtype, device="meta")[..., :K]
    b = torch.empty(*batch, K, N + 4, dtype=dtype, device="meta")[..., :N]
    out = torch.empty(*batch, M, N + 6, dtype=dtype, device="meta")[..., :N]
    c = torch.empty(M, N + 8, dtype=dtype, device="meta")[..., :N] if addend else None
    column = torch.empty(M, 1, dtype=dtype, device="meta")
    row = torch.empty(N, dtype=dtype, device="meta")
    extra = EpilogueArgs(
        activation or "",
        bias={"column": column, "row": row}.get(bias),
        residual=torch.empty_like(out) if residual else None,
    )
    given = problem(a, b, out, c, scaled=addend, extra=extra)
    return given, (a, b, c, out), (extra.bias, extra.residual, extra.aux)


def specialization(kernel, given):
    """What the compiler is told for sm_80, and the constants of the kernel."""
    if kernel == "portable":
        config = portable.Config(64, 64, 32)
        constants = portable._constants(given, config, "ieee", interpreted=False)
        return portable._specialize(given, config, 80), constants, config
    config = own(kernel)
    constants = rung(kernel).constants(config, given, 80)
    return rung(kernel).specialization(config, given, constants, 80), constants, config


@pytest.mark.parametrize(
    ("kernel", "dtype", "what"),
    [
        ("simt.naive", FP32, {}),
        ("simt.pipelined", FP32, {"batch": (3,), "addend": False}),
        ("turing.double_buffer", FP16, {}),
        ("turing.cp_async", FP16, {"addend": False}),
        ("turing.cp_async", FP16, {"bias": "row", "activation": "gelu"}),
        ("portable", FP32, {"batch": ()}),
        ("portable", FP16, {"bias": "column", "residual": True, "addend": False}),
    ],
)
def test_a_launch_passes_what_the_compiler_was_told(kernel, dtype, what):
    given, tensors, extra = call(dtype, **what)
    special, constants, config = specialization(kernel, given)
    passed = []
    start = launch.bind(
        given,
        chunks_of(given, config),
        lambda programs: lambda *args: passed.append(args),
        constants,
    )
    start(*tensors, 2, 0.5, *(extra if what.keys() & {"bias", "residual", "activation"} else ()))
    types = tuple(kind for _, kind in special.signature)
    constant = dict(special.constants)
    for path, kind, value in flattened(types, passed[0]):
        if kind == "constexpr":
            assert value == constant[path]
        elif kind in ("i32", "i64"):
            assert isinstance(value, int)
            assert value > 1
        elif kind == "fp32":
            assert isinstance(value, float)
        else:
            assert any(value is tensor for tensor in (*tensors, *extra))
            assert kind == launch.TYPES[value.dtype]
    assert [value for value in passed[0][:4] if value is not None] == [
        tensor for tensor in tensors if tensor is not None
    ]
