"""Epilogues on a GPU: any steps together, on any dtypes and layouts, by every kernel that
has them.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support import sanitizer
from support.epilogue_schedules import EPILOGUES, SCHEDULES, check
from support.fused import Fused
from support.paths import TESTS

from outblas import matmul
from outblas.core.epilogue import ACTIVATIONS, Activation, apply, glu_split

pytestmark = pytest.mark.gpu
EXTENTS = st.sampled_from([1, 2, 17, 64, 128, 200, 256, 333, 520])


@st.composite
def calls(draw: Any) -> Fused:
    """Batches have no addend, which is addmm's; a product in fp32 of 16-bit operands has none
    either.
    """
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    addend = draw(st.booleans())
    batch = () if addend else draw(st.sampled_from([(), (), (3,), (2, 3)]))
    form = st.sampled_from(["", "row", "column", "matrix"])
    layout = st.sampled_from(["nn", "nt", "tn", "tt"])
    scales: dict[str, Any] = {"alpha": 2.0, "beta": 0.5} if addend else {}
    if not addend and dtype != torch.float32 and draw(st.booleans()):
        scales = {"out_dtype": torch.float32}
    return Fused(
        draw(EXTENTS),
        max(2, draw(EXTENTS)),
        draw(EXTENTS),
        dtype,
        draw(st.sampled_from([None, *ACTIVATIONS])),
        bias=draw(form),
        residual=draw(form),
        aux=draw(st.booleans()),
        batch=batch,
        layout=draw(layout) + draw(st.sampled_from("nts")),
        pad=draw(st.sampled_from([0, 8, 3])),
        offset=draw(st.sampled_from([0, 8, 1])),
        **scales,
    )


HOPPER = pytest.param("hopper.gemm", 90, marks=pytest.mark.sm90)


@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.parametrize(
    ("kernel", "examples"), [(None, 90), ("portable", 90), ("turing.cp_async", 30), HOPPER]
)
def test_any_combination_of_steps_is_right(kernel: str | None, examples: int) -> None:
    """A call that the kernel refuses does not count."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(call=calls())
    def is_right(call: Fused) -> None:
        try:
            call.check(kernel, "cuda")
        except ValueError as error:
            if kernel is None or not str(error).startswith(f"kernel {kernel!r}"):
                raise
            reject()

    is_right()


PROGRAM = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.epilogue_schedules import EPILOGUES, SCHEDULES, check
for schedule in SCHEDULES:
    for epilogue in EPILOGUES:
        check(schedule, epilogue, "", 1)
    print("right:", schedule)
"""


@pytest.mark.sm90
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_jittered_calls_give_equal_bits(schedule: str, epilogue: str) -> None:
    check(schedule, epilogue, ",jitter=True", 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
def test_rows_have_the_same_bits_in_all_batches(activation: Activation, dtype: torch.dtype) -> None:
    columns = 776 * glu_split(activation)
    x = torch.randn(1024, 520, device="cuda").bfloat16()
    weight = torch.randn(columns, 520, device="cuda").bfloat16()
    bias = torch.randn(columns, device="cuda").to(dtype)
    residual = torch.randn(1024, 776, device="cuda").to(dtype)

    def layer(rows: slice) -> torch.Tensor:
        return matmul(
            x[rows],
            weight.t(),
            bias=bias,
            activation=activation,
            residual=residual[rows],
            out_dtype=dtype,
            batch_invariant=True,
        )

    whole = layer(slice(None))

    first_rows = [slice(n) for n in (1, 17, 64, 200, 1000)]
    last_rows = [slice(1024 - n, None) for n in (1, 63, 520)]
    for rows in first_rows + last_rows:
        assert torch.equal(layer(rows), whole[rows]), rows


@pytest.mark.parametrize("kernel", ["portable", HOPPER.values[0]])
def test_more_than_two_to_the_31_elements(kernel: str) -> None:
    M, N, K = 2**16 + 8, 2**15 + 8, 16
    a = torch.randn(M, K, device="cuda").bfloat16()
    b = torch.randn(N, K, device="cuda").bfloat16()
    bias = torch.randn(N, device="cuda").bfloat16()
    residual = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    aux = torch.empty_like(residual)

    out = matmul(a, b.t(), bias=bias, activation="gelu", residual=residual, aux=aux, kernel=kernel)

    for rows in (slice(100), slice(M // 2, M // 2 + 100), slice(M - 100, None)):
        x = a[rows].double() @ b.t().double() + bias.double()
        torch.testing.assert_close(aux[rows].double(), x, rtol=2**-8, atol=1e-5)
        want = apply(x, "gelu", residual[rows].double())
        torch.testing.assert_close(out[rows].double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    sanitizer.finds_nothing(tool, PROGRAM, len(SCHEDULES))
