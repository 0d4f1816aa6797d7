"""What `dir(outblas)` shows, and arguments of the public calls: names by torch and by letters, and
the scalars that addmm takes.
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
    """A function of ours, torch's of that name, and operands by torch's names and by ours."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    operands: dict[str, Tensor]
    letters: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What torch calls the operands."""
        return tuple(self.operands)

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The operands, by position."""
        return tuple(self.operands.values())


SIGNATURES = [
    Signature(matmul, torch.matmul, {"input": A, "other": B}, ("a", "b")),
    Signature(
        addmm, torch.addmm, {"input": torch.ones(6, 4), "mat1": A, "mat2": B}, ("c", "a", "b")
    ),
    Signature(linear, torch.nn.functional.linear, {"input": A, "weight": B.t()}, ("x", "w")),
]
signatures = pytest.mark.parametrize(
    "signature", [pytest.param(each, id=each.ours.__name__) for each in SIGNATURES]
)


@signatures
@pytest.mark.parametrize(
    "keywords_of",
    [
        pytest.param(lambda names, letters: names, id="torch's names"),
        pytest.param(lambda names, letters: letters, id="letters"),
        pytest.param(lambda names, letters: (names[0], *letters[1:]), id="torch's name first"),
        pytest.param(lambda names, letters: (*letters[:-1], names[-1]), id="torch's name last"),
    ],
)
def test_operands_come_by_any_of_their_names(
    signature: Signature, keywords_of: Callable[..., tuple[str, ...]]
) -> None:
    keywords = keywords_of(signature.names, signature.letters)

    got = signature.ours(**dict(zip(keywords, signature.values, strict=True)))

    assert torch.equal(got, signature.torchs(**signature.operands))


@signatures
def test_the_signature_has_the_names_of_torch(signature: Signature) -> None:
    parameters = inspect.signature(signature.ours).parameters

    required = [p.name for p in parameters.values() if p.default is p.empty]

    assert required == list(signature.names)
    assert not {"aliases", *signature.letters} & parameters.keys()


@signatures
def test_operands_that_do_not_fit_the_signature_are_named(signature: Signature) -> None:
    *others, last = signature.values
    name, letter = signature.names[-1], signature.letters[-1]
    calls: dict[str, Callable[[], Tensor]] = {
        "got an unexpected keyword argument 'kernal'": (
            lambda: signature.ours(*signature.values, kernal="portable")
        ),
        f"got '{name}' twice, the second time as '{letter}'": (
            lambda: signature.ours(*signature.values, **{letter: last})
        ),
        f"{name} is NoneType, expected a torch.Tensor": lambda: signature.ours(*others),
    }

    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            call()


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
