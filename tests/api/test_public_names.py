"""`dir(outblas)` shows the API and nothing else, and what type checkers know of choices is true."""

from typing import get_args

import pytest
import torch

import outblas
from outblas.core.epilogue import ACTIVATIONS, Activation
from outblas.runtime.default_kernel import MODES, Mode

MODULES = {"autotune", "inductor", "nn"}


def test_dir_has_the_api_and_its_modules_and_each_is_documented() -> None:
    shown = {name for name in dir(outblas) if not name.startswith("__")}

    assert shown == {*outblas.__all__, *MODULES}
    assert [name for name in shown if not getattr(outblas, name).__doc__] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'outblas' has no attribute 'no_such_name'"):
        vars(outblas)["__getattr__"]("no_such_name")


def test_the_choices_that_are_typed_are_those_that_exist() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)
    assert set(get_args(Mode)) == set(MODES)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_every_activation_that_is_typed_is_accepted(activation: Activation) -> None:
    input, weight = torch.ones(2, 8), torch.ones(4, 8)

    assert outblas.linear(input, weight, activation=activation).shape in ((2, 4), (2, 2))
