"""Shortcuts through Triton's interpreter find what it finds without them."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support import interpreter_shortcuts as shortcuts
from triton.runtime import interpreter as real

from outblas.device import language

pytestmark = pytest.mark.versions

SCALARS = [
    *(tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv),
    tl.pointer_type(tl.float32),
]
DTYPES = [*SCALARS, *(tl.block_type(dtype, [16]) for dtype in SCALARS)]


@pytest.fixture
def interpreter() -> Any:
    """What shortcuts change of the interpreter's module, as it was before they were taken."""
    core = SimpleNamespace(**vars(tl.core))
    core._unwrap_if_constexpr = inspect.unwrap(tl.core._unwrap_if_constexpr)
    language = SimpleNamespace(core=core, math=tl.math, tensor=tl.tensor)
    return SimpleNamespace(tl=language, _get_np_dtype=inspect.unwrap(real._get_np_dtype))


def test_a_type_of_numpy_is_that_of_the_interpreter(interpreter: Any) -> None:
    want = [interpreter._get_np_dtype(dtype) for dtype in DTYPES]

    shortcuts.known_dtypes(interpreter)

    for _ in range(2):
        assert [interpreter._get_np_dtype(dtype) for dtype in DTYPES] == want


@pytest.mark.parametrize("part", [tl, tl.core, tl.math, tl.tensor], ids=str)
def test_builtin_functions_are_those_of_triton(interpreter: Any, part: Any) -> None:
    interpreter.tl = tl
    shortcuts.known_builtins(interpreter)

    found = interpreter.inspect.getmembers(part)

    assert found
    assert found == [each for each in inspect.getmembers(part) if tl.core.is_builtin(each[1])]


@pytest.mark.parametrize(
    "given",
    [3, "3", None, tl.float32, tl.constexpr(3), [tl.constexpr(3), 4], (tl.constexpr(3), [4])],
    ids=str,
)
def test_a_constant_is_unwrapped_as_without(interpreter: Any, given: Any) -> None:
    core = interpreter.tl.core
    want = core._unwrap_if_constexpr(given)

    shortcuts.known_containers(interpreter)

    for _ in range(2):
        assert core._unwrap_if_constexpr(given) == want


@triton.jit
def lesser(a, b):  # type: ignore[no-untyped-def]
    return tl.where(a < b, a, b)


@triton.jit
def difference(a, b):  # type: ignore[no-untyped-def]
    return a - b


@triton.jit  # type: ignore[untyped-decorator]
def reduce_rows(x, rows, columns, both, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduces a matrix along each of its dimensions, and along both."""
    across, down = tl.arange(0, N), tl.arange(0, M)
    value = tl.load(x + down[:, None] * N + across[None, :])
    found = tl.reduce(value, 1, difference)
    tl.store(rows + down, found)
    tl.store(columns + across, tl.reduce(value, 0, lesser))
    tl.store(both + tl.arange(0, 1), tl.full((1,), 0, value.dtype) + tl.reduce(found, 0, lesser))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float16], ids=str)
def test_slices_are_reduced_as_elements_are(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x = (torch.arange(32).view(4, 8) * 37 % 11 - 5).to(dtype)
    by_elements = inspect.unwrap(real.ReduceOps.generic_reduce)
    monkeypatch.setattr(real.ReduceOps, "generic_reduce", by_elements)

    def reduced() -> list[torch.Tensor]:
        results = [torch.zeros(n, dtype=dtype) for n in (4, 8, 1)]
        with language.lock:
            language.interpreted(reduce_rows)[(1,)](x, *results, 4, 8)
        return results

    want = reduced()
    shortcuts.reduced_slices(real)
    found = reduced()

    assert all(map(torch.equal, found, want))
    assert torch.equal(found[1], x.amin(0))
    assert torch.equal(found[0], x[:, 0] - x[:, 1:].sum(1))


@pytest.mark.parametrize("debug", [False, True])
def test_integers_are_checked_where_the_answer_counts(interpreter: Any, debug: bool) -> None:
    options = real.InterpreterOptions(debug=debug)
    interpreter.interpreter_builder = SimpleNamespace(options=options)

    shortcuts.no_dropped_checks(interpreter)

    assert interpreter.interpreter_builder.options.sanitize_overflow == debug
