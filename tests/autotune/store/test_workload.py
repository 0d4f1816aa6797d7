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
        ({"grouping": "8"}, "16x4096x4096 bfloat16 nt groups 8"),
        (
            {"grouping": "8:zipf", "weights": "cold"},
            "16x4096x4096 bfloat16 nt cold groups 8:zipf",
        ),
    ],
    ids=str,
)
def test_a_workload_is_written_with_what_sets_it_apart(fields: dict[str, Any], text: str) -> None:
    assert str(Workload(**DECODE, **fields)) == text


@pytest.mark.parametrize(("text", "layout"), [("8", "nn"), ("8:zipf", "nt"), ("8:terms", "tn")])
def test_a_workload_of_groups_is_one_of_grouped_mm(text: str, layout: str) -> None:
    workload = Workload(**DECODE, layout=layout, grouping=text)

    assert workload.grouped is not None
    assert workload.grouped.shape == workload.shape
    assert str(workload.grouped.grouping) == text


def test_groups_and_epilogues_have_one_spelling() -> None:
    assert Workload(**DECODE).grouped is None
    assert Workload(**DECODE, grouping="08:zipf") == Workload(**DECODE, grouping="8:zipf")
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
        ({"grouping": None}, "grouping is None, expected a text"),
        ({"grouping": "8:skewed"}, "grouping is '8:skewed', expected a number of groups, with"),
        ({"grouping": "0"}, "grouping is '0', expected a number of groups"),
        ({"grouping": "8", "layout": "tn"}, "layout is 'tn', expected nt or nn with grouping 8"),
        ({"grouping": "8:terms"}, "layout is 'nt', expected tn with grouping 8:terms"),
        ({"grouping": "8", "epilogue": "bias"}, "epilogue is 'bias', expected none with grouping"),
        ({"grouping": "8", "dtype": "tf32"}, "dtype is 'tf32', expected another with grouping 8"),
    ],
    ids=str,
)
def test_a_workload_that_is_none_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{**DECODE, **fields})
