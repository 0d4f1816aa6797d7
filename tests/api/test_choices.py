"""What type checkers know of the choices of a call is what the call accepts."""

from typing import get_args

import pytest
import torch

import outblas
from outblas.core.epilogue import ACTIVATIONS, Activation
from outblas.runtime.default_kernel import MODES, Mode


def test_the_activations_that_are_typed_are_those_that_exist() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)


def test_the_modes_of_tuning_that_are_typed_are_those_that_exist() -> None:
    assert set(get_args(Mode)) == set(MODES)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_every_activation_that_is_typed_is_accepted(activation: Activation) -> None:
    input, weight = torch.ones(2, 8), torch.ones(4, 8)

    found = outblas.linear(input, weight, activation=activation)

    assert found.shape in ((2, 4), (2, 2))
