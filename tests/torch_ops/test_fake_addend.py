"""Fakes of products with an addend check it as the operators do."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outblas.core.errors import OperandError
from outblas.torch_ops import ops


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (3, 2)], ids=str)
def test_an_addend_that_does_not_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    with FakeTensorMode(), pytest.raises(OperandError):
        ops.addmm(torch.empty((*shape[:-1], 7)), torch.empty(3, 4), torch.empty(4, 5))
