"""Calls that may not compile: where OUTBLAS_COMPILE forbids it torch computes, and says so once;
while a CUDA graph is captured, plans that were made before are taken.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, launcher
from outblas.call.artifact import example
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs

A, B = torch.ones(2, 3), torch.ones(3, 4)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call would have to compile a kernel, and none may."""

    def launch(*_: object, **options: object) -> NoReturn:
        raise CompileForbidden("a_kernel")

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", launch)
    monkeypatch.setattr(launcher, "named_launcher", launch)


def call(**changes: Any) -> Call:
    plain = Call(A, B, None, None, None, 1, 0, "", "")
    return plain._replace(**changes)


@pytest.mark.usefixtures("forbidden")
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_torch_computes_its_epilogue_too() -> None:
    bias = torch.full((4,), -5.0)

    got = dispatch.run(call(extra=EpilogueArgs("relu", bias, None, None)))

    assert torch.equal(got, (A @ B + bias).relu())


@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize(
    "changes", [{"kernel": "portable"}, {"formats": "e4m3 e4m3"}], ids=["named", "fp8"]
)
def test_a_named_kernel_and_pairs_of_fp8_are_nobody_elses(changes: dict[str, str]) -> None:
    with pytest.raises(CompileForbidden):
        dispatch.run(call(**changes))


@pytest.mark.usefixtures("forbidden")
def test_a_batch_invariant_call_is_not_torchs() -> None:
    with pytest.raises(ValueError, match="OUTBLAS_COMPILE is never"):
        dispatch.run(call(batch_invariant=True))


def test_what_triton_would_compile_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    monkeypatch.setattr(launcher, "_unsupported_config_reason", lambda *_: None)
    problem = example(torch.float32, None, "nt", (64, 64, 64))

    with pytest.raises(CompileForbidden, match="has portable"):
        launcher.named_launcher("portable", "", problem, no_product=False)


# ---- captures
@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], torch.Tensor]:
    """Calls a planned product of operands that begin at two indices of a buffer of cache lines.

    The plan was made for operands at the beginning of a line and 16 bytes into one; now a graph is
    captured.
    """
    buffer = torch.randn(1024)
    buffer = buffer[-buffer.data_ptr() % 128 // 4 :]

    def multiply(start_a: int, start_b: int) -> torch.Tensor:
        a, b = (buffer[start : start + 64].view(8, 8) for start in (start_a, start_b))
        found = dispatch.run(dispatch.Call(a, b, None, None, None, 1, 0, "portable", ""))
        torch.testing.assert_close(found, a @ b)
        return found

    multiply(0, 128 + 4)
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    return multiply


def test_a_capture_takes_the_plan_of_operands_elsewhere_in_lines(
    planned: Callable[[int, int], torch.Tensor],
) -> None:
    """But none of operands of another alignment."""
    for starts in ((0, 132), (4, 128), (0, 128), (8, 140)):
        assert planned(*starts).shape == (8, 8)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        planned(1, 132)  # A begins at 4 bytes
