"""Counting steps of long work, for whoever listens."""

import pytest

from outblas.base import progress


def told(*kernels: str) -> list[str]:
    """What a listener hears of work on these kernels, each on two shapes."""
    heard: list[str] = []
    with progress.heard(heard.append):
        for _ in progress.counted(kernels):
            for _ in progress.counted([64, 128], lambda size: f"N = {size}"):
                pass
    return heard


def test_steps_of_a_step_are_told_with_it() -> None:
    assert told("portable", "hopper.gemm") == [
        "1 of 2 portable",
        "1 of 2 portable: 1 of 2 N = 64",
        "1 of 2 portable: 2 of 2 N = 128",
        "2 of 2 hopper.gemm",
        "2 of 2 hopper.gemm: 1 of 2 N = 64",
        "2 of 2 hopper.gemm: 2 of 2 N = 128",
    ]


def test_a_loop_that_is_left_early_is_forgotten() -> None:
    heard: list[str] = []

    with progress.heard(heard.append):
        inner = progress.counted(["left"])
        next(inner)
        inner.close()  # type: ignore[attr-defined]
        progress.say("after it")

    assert heard[-1] == "after it"


@pytest.mark.parametrize("name", ["", "  "])
def test_a_step_without_a_name_is_counted_alone(name: str) -> None:
    heard: list[str] = []

    with progress.heard(heard.append):
        list(progress.counted([name]))

    assert heard == ["1 of 1"]
