"""Counting steps of long work, for whoever listens."""

import pytest

from outblas.core import progress


def told(*kernels: str) -> list[str]:
    """What a listener hears of work on these kernels, each on two shapes."""
    heard: list[str] = []
    with progress.heard(heard.append):
        for _ in progress.counted(kernels):
            for _ in progress.counted([64, 128], lambda size: f"N = {size}"):
                pass
    return heard


def test_items_come_as_they_are_without_a_listener() -> None:
    assert list(progress.counted(["a", "b"])) == ["a", "b"]


def test_each_item_is_counted_before_it_comes() -> None:
    heard: list[str] = []

    with progress.heard(heard.append):
        counted = progress.counted(["simt.naive", "portable"])
        first = next(counted)

    assert (first, heard) == ("simt.naive", ["1 of 2 simt.naive"])


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


def test_what_is_said_stands_behind_the_step() -> None:
    heard: list[str] = []

    with progress.heard(heard.append):
        for _ in progress.counted(["hopper.gemm"]):
            progress.say("burst, round 3 of 15")

    assert heard[-1] == "1 of 1 hopper.gemm: burst, round 3 of 15"


def test_nothing_is_told_once_the_listener_is_gone() -> None:
    heard: list[str] = []
    with progress.heard(heard.append):
        pass

    progress.say("too late")

    assert heard == []


@pytest.mark.parametrize("name", ["", "  "])
def test_a_step_without_a_name_is_counted_alone(name: str) -> None:
    heard: list[str] = []

    with progress.heard(heard.append):
        list(progress.counted([name]))

    assert heard == ["1 of 1"]
