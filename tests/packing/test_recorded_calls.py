"""The kernels that a pack has for a recorded call are those that the call launches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import outblas
from outblas.core import machines, registry
from outblas.core.problem import Problem
from outblas.core.products import parse_line
from outblas.packing import build, examples
from outblas.runtime.recorded_shapes import RecordedShapes

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N = 384, 512
ONE = torch.ones(())


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def scaled(M: int, scale_a: torch.Tensor, scale_b: torch.Tensor, **how: Any) -> Any:
    return outblas.scaled_mm(fp8(M, K), fp8(N, K).t(), scale_a, scale_b, **how)


def in_blocks(M: int, of_a: str, of_b: str, **how: Any) -> Any:
    a, scale_a = outblas.quantize(torch.ones(M, K), of_a)
    b, scale_b = outblas.quantize(torch.ones(N, K), of_b)
    return outblas.scaled_mm(a, b.t(), scale_a, scale_b.t(), **how)


TO_FP8: dict[str, Any] = {"out_dtype": E4M3, "out_recipe": "1x128"}
CALLS: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensorwise": (lambda M: scaled(M, ONE, ONE), "fp8-e4m3 nt tensorwise"),
    "rowwise": (
        lambda M: scaled(M, torch.ones(M, 1), torch.ones(1, N), use_fast_accum=True),
        "fp8-e4m3 nt rowwise fast-accum",
    ),
    "rows by one": (
        lambda M: scaled(M, torch.ones(M, 1), ONE, out_dtype=torch.float32),
        "fp8-e4m3 nt rowwise:tensorwise to-float32",
    ),
    "a layer of a checkpoint": (
        lambda M: outblas.FP8Linear(K, N, dtype=torch.half)(torch.ones(M, K).half()),
        "fp8-e4m3 nt bias 1x128:128x128 to-float16",
    ),
    "columns with scales of their own": (
        lambda M: in_blocks(M, "1x128", "1x128"),
        "fp8-e4m3 nt 1x128",
    ),
    "squares": (lambda M: in_blocks(M, "128x128", "128x128"), "fp8-e4m3 nt 128x128"),
    "scales by rows": (
        lambda M: scaled(M, torch.ones(M, K // 128), torch.ones(K // 128, N)),
        "fp8-e4m3 nt 1x128-rows:1x128",
    ),
    "gated pairs into fp8": (
        lambda M: in_blocks(M, "1x128", "128x128", activation="swiglu", **TO_FP8),
        "fp8-e4m3 nt swiglu 1x128:128x128 to-e4m3",
    ),
    "powers of two": (
        lambda M: in_blocks(M, "1x128", "128x128", out_power_of_two=True, **TO_FP8),
        "fp8-e4m3 nt 1x128:128x128 to-e4m3-pow2",
    ),
    "an odd K": (
        lambda M: outblas.scaled_mm(fp8(M, 33), fp8(N, 33, dtype=E5M2).t(), ONE, ONE),
        "fp8-e4m3-e5m2 nt tensorwise",
    ),
    "a residual": (
        lambda M: scaled(M, ONE, ONE, bias=half(N), residual=half(M, N), activation="gelu"),
        "fp8-e4m3 nt bias+gelu+residual tensorwise",
    ),
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that are recorded."""
    found: list[Problem] = []
    note = RecordedShapes._note

    def keep(self: RecordedShapes, problem: Problem) -> None:
        found.append(problem)
        note(self, problem)

    monkeypatch.setattr(RecordedShapes, "_note", keep)
    return found


@pytest.mark.parametrize("M", [1, 2, 32, 300])
@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_launches_what_its_line_packs(
    name: str, M: int, noted: list[Problem]
) -> None:
    call, words = CALLS[name]
    machine, module = machines.find("H100"), registry.load("hopper.gemm")

    with outblas.record_shapes() as recorded:
        call(M)

    ((line,), (problem,)) = recorded.lines, noted
    (packed,) = build._problems(parse_line(line), machine)
    called = module.pack_problem(problem, machine)
    assert recorded.others == []
    if M == 32:  # with one row, its scale may count as one for all
        assert line.split(" ", 1)[1] == words
    assert module.unsupported(packed, None) is None
    assert module.pack_variants(packed, None, machine) == module.pack_variants(
        called, None, machine
    )


@pytest.mark.parametrize(("columns", "dtype"), [(512, E4M3), (200, torch.float32)])
def test_a_result_in_fp8_is_packed_as_the_gpu_computes_it(columns: int, dtype: torch.dtype) -> None:
    """Where another kernel quantizes, the product has a result in fp32."""
    products = parse_line(f"4096x{columns}x4096 fp8-e4m3 1x128:128x128 to-e4m3")

    (asked,) = examples.problems(products)
    (packed,) = build._problems(products, machines.find("H100"))

    assert asked.out_dtype == E4M3
    assert packed.out_dtype == dtype
    assert (packed.epilogue.scale_out is None) == (dtype == torch.float32)
