"""What `dir(outblas)` shows, and arguments of the public calls: their names, and the scalars that
addmm takes.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.causes import A, B

import outblas
from outblas import addmm, linear, matmul
from outblas.call.default_kernel import MODES, Mode
from outblas.call.epilogue import ACTIVATIONS, Activation

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


# ---- names
@dataclass(frozen=True)
class Signature:
    """A function of ours, torch's of that name, and operands by torch's names."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    operands: dict[str, Tensor]


SIGNATURES = [
    Signature(matmul, torch.matmul, {"input": A, "other": B}),
    Signature(addmm, torch.addmm, {"input": torch.ones(6, 4), "mat1": A, "mat2": B}),
    Signature(linear, torch.nn.functional.linear, {"input": A, "weight": B.t()}),
]
signatures = pytest.mark.parametrize(
    "signature", [pytest.param(each, id=each.ours.__name__) for each in SIGNATURES]
)


@signatures
def test_operands_have_the_names_of_torch(signature: Signature) -> None:
    parameters = inspect.signature(signature.ours).parameters.values()

    got = signature.ours(**signature.operands)

    assert torch.equal(got, signature.torchs(**signature.operands))
    assert [p.name for p in parameters if p.default is p.empty] == list(signature.operands)


@pytest.mark.parametrize("name", ["grouped_mm", "scaled_grouped_mm", "scaled_mm"])
def test_parameters_are_those_of_torch_before_keywords_of_ours(name: str) -> None:
    theirs, ours = (
        [*inspect.signature(getattr(module, name)).parameters.values()]
        for module in (torch.nn.functional, outblas)
    )
    of_torch, more = ours[: len(theirs)], ours[len(theirs) :]

    assert [(p.name, p.kind, p.default) for p in of_torch] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert {p.kind for p in more} == {inspect.Parameter.KEYWORD_ONLY}


@signatures
def test_calls_that_do_not_fit_the_signature_raise(signature: Signature) -> None:
    *others, last = signature.operands.values()

    for unknown in ("kernal", "a", "w"):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{unknown}'"):
            signature.ours(*others, last, **{unknown: last})
    with pytest.raises(TypeError, match=f"missing 1 required .*{[*signature.operands][-1]}"):
        signature.ours(*others)


# ---- scalars
C = torch.rand(6, 4)


@pytest.mark.parametrize("alpha", [1 + 2j, np.complex64(1 + 2j), torch.tensor(1 + 2j)], ids=type)
def test_complex_scalars_go_with_complex_operands(alpha: Any) -> None:
    a, b, c = (t.to(torch.complex64) for t in (A, B, C))

    assert torch.equal(addmm(c, a, b, alpha=alpha), torch.addmm(c, a, b, alpha=1 + 2j))


# ---- what the module shows
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
