"""Plans while a CUDA graph is captured, when no kernel can be compiled, nor its tiles ordered."""

from collections.abc import Callable

import pytest
import torch

from outblas.runtime import dispatch


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

    dispatch.clear_cache()
    multiply(0, 128 + 4)
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    return multiply


@pytest.mark.parametrize("starts", [(0, 132), (4, 128), (0, 128), (8, 140)])
def test_a_capture_takes_the_plan_of_operands_elsewhere_in_lines(
    planned: Callable[[int, int], torch.Tensor], starts: tuple[int, int]
) -> None:
    assert planned(*starts).shape == (8, 8)


def test_a_capture_takes_no_plan_of_operands_of_another_alignment(
    planned: Callable[[int, int], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        planned(1, 132)  # A begins at 4 bytes
