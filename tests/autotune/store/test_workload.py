"""Workloads: what tells one from another, and which there are not."""

from typing import Any

import pytest

from outblas.autotune.store.records import Workload

DECODE: dict[str, Any] = {"M": 16, "N": 4096, "K": 4096}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "16x4096x4096 bfloat16 nt"),
        ({"out_dtype": "float32"}, "16x4096x4096 bfloat16 to float32 nt"),
        ({"weights": "cold"}, "16x4096x4096 bfloat16 nt cold"),
        ({"epilogue": "bias+gelu"}, "16x4096x4096 bfloat16 nt bias+gelu"),
        ({"weights": "cold", "epilogue": "relu"}, "16x4096x4096 bfloat16 nt cold relu"),
    ],
    ids=str,
)
def test_a_workload_is_written_with_what_sets_it_apart(fields: dict[str, Any], text: str) -> None:
    assert str(Workload(**DECODE, **fields)) == text


@pytest.mark.parametrize("fields", [{"weights": "cold"}, {"epilogue": "bias"}], ids=str)
def test_shapes_learn_nothing_from_other_weights_and_epilogues(fields: dict[str, Any]) -> None:
    plain, other = Workload(**DECODE), Workload(**DECODE, **fields)

    assert plain.kind != other.kind
    assert (plain.is_plain, other.is_plain) == (True, False)


def test_an_epilogue_has_one_spelling() -> None:
    assert Workload(**DECODE, epilogue=" bias + gelu ") == Workload(**DECODE, epilogue="bias+gelu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "hot"}, "weights is 'hot', expected one of warm, cold"),
        ({"epilogue": "gelu+bias"}, r"epilogue is 'gelu\+bias', expected some of bias, an activ"),
        ({"epilogue": None}, "epilogue is None, expected a text"),
        ({"epilogue": "swiglu", "N": 7}, "N is 7, expected an even number with swiglu"),
        (
            {"epilogue": "bias", "out_dtype": "float32"},
            "out_dtype is 'float32', expected bfloat16 with epilogue bias",
        ),
    ],
    ids=str,
)
def test_a_workload_that_is_none_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{**DECODE, **fields})
