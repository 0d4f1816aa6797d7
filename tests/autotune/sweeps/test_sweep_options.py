"""The options of a sweep, as a record and as keywords."""

import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.in_process import measure_here
from support.sweeps import SUBJECT

from outblas.autotune import Grid, SweepOptions, sweep
from outblas.autotune.sweeps.options import SweepKeywords

FACTS: dict[str, Any] = {"dtype": "float32", "layout": "nn"}
RECORD = SweepOptions(gpus="cpu", trials=1, top_k=2, strategy=Grid())


@pytest.fixture(autouse=True)
def _six_configs(faulty_log: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has six configs, measured in this process."""
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    measure_here(monkeypatch)


def test_a_keyword_takes_precedence_over_the_record(path: Path) -> None:
    (outcome,) = sweep(SUBJECT, 16, options=RECORD, trials=4, store=path, **FACTS).outcomes

    assert len(outcome.trials) == 4


def test_a_keyword_that_is_no_option_is_an_error(path: Path) -> None:
    with pytest.raises(TypeError, match=r"sweep\(\) got an unexpected keyword argument 'trails'"):
        sweep(SUBJECT, 16, trails=4, store=path, **FACTS)  # type: ignore[call-arg]


def test_keywords_are_the_fields_of_the_record() -> None:
    types = typing.get_type_hints(SweepOptions)

    assert [field.name for field in fields(SweepOptions)] == list(types)
    assert typing.get_type_hints(SweepKeywords) == types
