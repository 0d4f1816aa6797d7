"""`dir(outblas)` shows the API and nothing else."""

import pytest

import outblas

MODULES = {"autotune", "inductor", "nn"}


def test_dir_has_the_api_and_its_modules() -> None:
    shown = {name for name in dir(outblas) if not name.startswith("__")}

    assert shown == {*outblas.__all__, *MODULES}


@pytest.mark.parametrize("name", sorted({*outblas.__all__, *MODULES}))
def test_a_name_that_is_shown_is_there_and_documented(name: str) -> None:
    assert getattr(outblas, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'outblas' has no attribute 'no_such_name'"):
        vars(outblas)["__getattr__"]("no_such_name")
