"""The public calls without a GPU: semantics of torch.matmul through the fallback and the
interpreter, and bad input.
"""

import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.causes import CAUSES, A, B, Tagged

import outblas
from outblas import FallbackWarning, OperandError, addmm, ladder, linear, matmul
from outblas.hopper.core.config import HopperConfig
from outblas.kernels.portable_config import PortableConfig

GROWN = A.clone().requires_grad_()

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 4)),
    ((6, 5), (5,)),
    ((6, 5), (5, 4)),
    ((3, 6, 5), (5, 4)),
    ((6, 5), (3, 5, 4)),
    ((2, 1, 6, 5), (3, 5, 4)),
    ((3, 6, 5), (5,)),
    ((5,), (3, 5, 4)),
    ((0, 5), (5, 4)),
    ((6, 5), (5, 0)),
    ((6, 0), (0, 4)),
    ((0,), (0,)),
    ((0, 6, 5), (5, 4)),
    ((3, 6, 0), (3, 0, 4)),
]


@pytest.fixture(params=[None, "portable"])
def kernel(request: pytest.FixtureRequest) -> str | None:
    return request.param


def integers(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randint(-8, 9, shape).float() for shape in shapes]


@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES)
def test_matmul_is_torch_matmul(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], kernel: str | None
) -> None:
    a, b = integers(shape_a, shape_b)
    want = torch.matmul(a, b)
    got = matmul(a, b, kernel=kernel)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    out = torch.full_like(want, torch.nan)
    assert matmul(a, b, out=out, kernel=kernel) is out
    assert torch.equal(out, want)


def test_out_dtype_widens(kernel: str | None) -> None:
    a, b = torch.full((3, 300), 3.0).bfloat16(), torch.full((300, 2), 3.0).bfloat16()
    assert matmul(a, b, kernel=kernel)[0, 0] == 2704  # 2700 has no bf16
    wide = matmul(a, b, out_dtype=torch.float32, kernel=kernel)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.full((3, 2), 2700.0))


@pytest.mark.parametrize("shape", [(6, 4), (4,), (6, 1), (1,), ()])
def test_addmm_is_torch_addmm(shape: tuple[int, ...], kernel: str | None) -> None:
    a, b, c = integers((6, 5), (5, 4), shape)
    want = torch.addmm(c, a, b, alpha=0.5, beta=-2.0)
    assert torch.equal(addmm(c, a, b, alpha=0.5, beta=-2.0, kernel=kernel), want)
    assert torch.equal(addmm(c, a, b, kernel=kernel), torch.addmm(c, a, b))
    ignored = torch.full(shape, torch.nan)
    assert torch.equal(addmm(ignored, a, b, beta=0, kernel=kernel), a @ b)
    assert torch.equal(addmm(c, a[:, :0], b[:0], beta=3, kernel=kernel), (3 * c).expand(6, 4))
    assert torch.equal(addmm(c, a * torch.nan, b, alpha=0, kernel=kernel), c.expand(6, 4))


def test_addmm_in_place(kernel: str | None) -> None:
    a, b, c = integers((6, 5), (5, 4), (6, 4))
    want = torch.addmm(c, a, b, beta=0.5)
    assert addmm(c, a, b, beta=0.5, out=c, kernel=kernel) is c
    assert torch.equal(c, want)
    with pytest.raises(ValueError, match="out overlaps input in memory"):
        addmm(c[:1], a[:2], b, out=c[:2], kernel=kernel)


def test_each_fallback_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            matmul(A, B)
            matmul(GROWN, B)
            matmul(GROWN.to("meta"), B.to("meta"))
    ours = [w for w in caught if w.category is FallbackWarning]
    assert [w.filename for w in ours] == [__file__, __file__]
    assert "CPU tensors" in str(ours[0].message)
    assert "meta tensors" in str(ours[1].message)


@pytest.mark.parametrize("cause", CAUSES)
def test_strict_mode_names_the_cause(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(FallbackWarning, match=cause):
        CAUSES[cause]()
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match=f"OUTBLAS_STRICT=1 forbids.*{cause}"):
        CAUSES[cause]()


def test_fallbacks_give_what_torch_gives() -> None:
    assert type(matmul(A.as_subclass(Tagged), B)) is Tagged
    assert matmul(A.to("meta"), B.to("meta")).shape == (6, 4)
    x = torch.arange(30).reshape(6, 5)
    assert torch.equal(matmul(x, x.t()), x @ x.t())
    z = torch.randn(6, 5, dtype=torch.complex64)
    assert torch.equal(matmul(z.conj(), z.t()), z.conj() @ z.t())
    assert torch.equal(matmul(z.conj().imag, B), z.conj().imag @ B)
    assert torch.equal(matmul(A.double(), B.double()), A.double() @ B.double())
    _, tangent = torch.func.jvp(lambda a: matmul(a, B), (A,), (torch.ones_like(A),))
    assert torch.allclose(tangent, torch.ones_like(A) @ B)


def test_portable_takes_negated_views() -> None:
    z = torch.randint(-8, 9, (6, 5)) + 1j * torch.randint(-8, 9, (6, 5))
    imaginary = z.to(torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(matmul(imaginary, B.round(), kernel="portable"), imaginary @ B.round())


def test_interpreter_needs_no_gradients_when_they_are_off() -> None:
    with torch.no_grad():
        matmul(GROWN, B, kernel="portable")


def test_out_of_every_kind(kernel: str | None) -> None:
    a, b = integers((3, 2, 3), (3, 2))
    unfoldable = torch.empty(60).as_strided((3, 2, 2), (2, 6, 1))
    assert torch.equal(matmul(a, b, out=unfoldable, kernel=kernel), a @ b)
    negated = torch.zeros(3, 2, 2, dtype=torch.complex64).conj().imag
    assert matmul(a, b, out=negated, kernel=kernel) is negated
    assert torch.equal(negated, a @ b)
    lazy = torch.ones(2, 2, dtype=torch.complex64).conj().imag
    assert torch.equal(addmm(lazy, a[0], b, out=lazy, kernel=kernel), a[0] @ b - 0.0)


def test_writing_out_is_seen_by_autograd(kernel: str | None) -> None:
    out, weight = torch.rand(6, 4), torch.rand(6, 4, requires_grad=True)
    loss = (weight * out).sum()
    matmul(A, B, out=out, kernel=kernel)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_overlap_is_checked_on_every_path() -> None:
    s = torch.rand(6, 6)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="out overlaps mat1"),
    ):
        addmm(torch.zeros(6), s, torch.rand(6, 6), out=s)
    with pytest.raises(ValueError, match="out overlaps input"):
        matmul(s.as_subclass(Tagged), torch.rand(6, 6), out=s)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, aux, out: matmul(a, b, activation="gelu", aux=aux, out=out),
        lambda a, b, aux, out: matmul(
            a.as_subclass(Tagged), b, activation="gelu", aux=aux, out=out
        ),
        lambda a, b, aux, out: torch.ops.outblas.gemm_out(out, aux, a, b, activation="gelu"),
    ],
)
def test_nothing_is_written_where_torch_has_no_such_activation(call, dtype) -> None:
    a, b, aux, out = (t.to(dtype) for t in (A, B, torch.full((6, 4), 7.0), torch.full((6, 4), 7.0)))
    with pytest.raises(NotImplementedError, match="not implemented for"):
        call(a, b, aux, out)
    assert bool((aux == 7).all())
    assert bool((out == 7).all())


@pytest.mark.parametrize("how", [{}, {"aux": torch.tensor(7.0)}])
@pytest.mark.parametrize("kernel", [None, "portable"])
def test_the_product_of_two_vectors_has_no_columns_to_pair(how, kernel: str | None) -> None:
    with pytest.raises(OperandError, match=r"'geglu' pairs the columns.*got shape \(\)"):
        matmul(A[0], A[1], activation="geglu", kernel=kernel, **how)
    assert how.get("aux", torch.tensor(7.0)) == 7


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)])
@pytest.mark.parametrize("function", [matmul, linear])
def test_a_gated_product_with_a_vector_pairs_rows(shape, function, kernel: str | None) -> None:
    a, v, bias, residual = integers(shape, (5,), (6,), (3,))
    x, out = a @ v + bias, torch.full((*shape[:-2], 3), torch.nan)
    want = torch.relu(x[..., :3]) * x[..., 3:] + residual
    how = {"bias": bias, "activation": "reglu", "residual": residual, "kernel": kernel}
    for _ in range(3):
        assert torch.equal(function(a, v, **how), want)
        assert torch.equal(function(a, v, out=out, **how), want)
    assert torch.equal(out, want)
    grown = a.clone().requires_grad_()
    function(grown, v, **how).sum().backward()
    (want,) = torch.autograd.grad(
        (lambda x: torch.relu(x[..., :3]) * x[..., 3:])(
            (g := a.clone().requires_grad_()) @ v + bias
        ).sum(),
        g,
    )
    assert torch.equal(grown.grad, want)
    if kernel is not None:
        with pytest.raises(
            ValueError, match=r"batch_invariant is True, and activation 'reglu' .* pairs rows"
        ):
            function(a, v, batch_invariant=True, **how)


@pytest.mark.parametrize("function", [matmul, linear])
def test_overlap_with_a_vector_names_it(function, kernel: str | None) -> None:
    a, v = integers((6, 5), (5,))
    before = v.clone()
    with pytest.raises(OperandError, match=r"out overlaps (other|weight)"):
        function(a, v, activation="reglu", out=v[:3], kernel=kernel)
    assert torch.equal(v, before)


def test_what_an_epilogue_writes_shares_memory_with_nothing() -> None:
    for a in (A, A.double(), A.as_subclass(Tagged)):
        b, buffer = B.to(a.dtype), torch.full((6, 8), 7.0, dtype=a.dtype)
        left, middle = buffer[:, :4], buffer[:, 2:6]
        for message, views in {
            "out overlaps residual": {"out": left, "residual": middle},
            "aux overlaps residual": {"aux": left, "residual": middle},
            "out overlaps aux": {"aux": left, "out": middle},
        }.items():
            with pytest.raises(OperandError, match=message):
                matmul(a, b, **views)
        assert bool((buffer == 7).all())


@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 3, 5)])
@pytest.mark.parametrize("lazy", ["b", "bias"])
def test_forward_mode_gradients_of_what_negates(shape, lazy: str) -> None:
    """Torch asserts within itself where a view is taken of a tensor that negates, and its tangent
    does not.
    """
    given = {"b": B, "bias": torch.randn(4)}
    given[lazy] = torch._neg_view(given[lazy])
    x = torch.randn(shape)

    def found(product):
        primals = tuple(given.values())
        return torch.func.jvp(
            lambda b, bias: product(x, b, bias), primals, tuple(map(torch.ones_like, primals))
        )

    want = found(lambda a, b, bias: torch.matmul(a, b) + bias)
    for ours in (
        lambda a, b, bias: matmul(a, b, bias=bias),
        lambda a, b, bias: torch.ops.outblas.gemm(a, b, None, bias),
    ):
        torch.testing.assert_close(found(ours), want)


def test_an_epilogue_of_a_sparse_product() -> None:
    a, b, bias = torch.randn(6, 5), torch.randn(5, 4).relu().to_sparse(), torch.randn(4)
    torch.testing.assert_close(matmul(a, b, bias=bias), a @ b.to_dense() + bias)


def test_a_vector_times_a_sparse_matrix_goes_to_out() -> None:
    v, b, out = torch.randn(5), B.relu().to_sparse(), torch.full((4,), torch.nan)
    assert matmul(v, b, out=out) is out
    assert torch.equal(out, torch.matmul(v, b))


def test_nested_tensors_go_to_torch() -> None:
    x = torch.nested.nested_tensor([torch.rand(2, 5), torch.rand(3, 5)])
    y = torch.nested.nested_tensor([B, B])
    assert all(map(torch.equal, matmul(x, y).unbind(), torch.matmul(x, y).unbind()))


def test_scalars_of_numpy() -> None:
    c = torch.rand(6, 4)
    got = addmm(c, A, B, alpha=np.float32(0.5), beta=np.int64(2))
    assert torch.allclose(got, torch.addmm(c, A, B, alpha=0.5, beta=2))
    for value in (2**70 * 10**40, 10**400, 1e300):
        with pytest.raises(
            ValueError, match=r"alpha is .* expected a number that float32 can hold"
        ):
            addmm(c, A, B, alpha=value)


def test_scalars_as_torch_takes_them() -> None:
    c = torch.rand(6, 4)
    for value in (
        2,
        2.5,
        True,
        np.float32(0.5),
        np.int64(2),
        np.bool_(True),
        torch.tensor(2.5),
        torch.tensor(3),
        2 + 0j,
    ):
        assert torch.equal(addmm(c, A, B, alpha=value), torch.addmm(c, A, B, alpha=value))
        assert torch.equal(addmm(c, A, B, beta=value), torch.addmm(c, A, B, beta=value))
        torch.testing.assert_close(
            addmm(c, A, B, alpha=value, activation="relu"),
            torch.relu(torch.addmm(c, A, B, alpha=value)),
        )


def test_integers_take_the_scalars_that_they_take_in_torch() -> None:
    c, a, b = (
        torch.arange(4, dtype=torch.int32),
        *(torch.ones(s, dtype=torch.int32) for s in ((3, 0), (0, 4))),
    )
    assert torch.equal(addmm(c, a, b, alpha=2), torch.addmm(c, a, b, alpha=2))
    fraction: Any = np.float32(1.25)  # torch takes it, and its stub does not say so
    assert torch.equal(addmm(c, a, b, alpha=fraction), torch.addmm(c, a, b, alpha=fraction))
    assert [inspect.signature(addmm).parameters[name].default for name in ("alpha", "beta")] == [
        1,
        1,
    ]
    assert all(
        type(inspect.signature(addmm).parameters[name].default) is int for name in ("alpha", "beta")
    )


def test_bools_take_bools() -> None:
    c, a, b = (torch.ones(s, dtype=torch.bool) for s in ((), (3, 0), (0, 4)))
    assert torch.equal(addmm(c, a, b, beta=True), torch.addmm(c, a, b, beta=True))


@pytest.mark.parametrize(
    "how", [{}, {"bias": torch.ones(4)}, {"activation": "relu"}, {"kernel": "portable"}]
)
def test_addmm_without_an_addend_is_a_type_error(how) -> None:
    with pytest.raises(TypeError, match=r"input is NoneType, expected a torch\.Tensor"):
        addmm(None, A, B, **how)


def test_complex_scalars_go_with_complex_operands() -> None:
    a, b, c = (t.to(torch.complex64) for t in (A, B, torch.rand(6, 4)))
    for value in (1 + 2j, np.complex64(1 + 2j), torch.tensor(1 + 2j)):
        assert torch.equal(addmm(c, a, b, alpha=value), torch.addmm(c, a, b, alpha=1 + 2j))
        with pytest.raises(
            OperandError,
            match=r"alpha is \(1\+2j\), expected a real number for operands of torch.float32",
        ):
            addmm(c.real, A, B, alpha=value)


NAMES = {
    matmul: (("input", A), ("other", B)),
    addmm: (("input", torch.ones(6, 4)), ("mat1", A), ("mat2", B)),
    linear: (("input", A), ("weight", B.t())),
}
ALIASES = {matmul: ("a", "b"), addmm: ("c", "a", "b"), linear: ("x", "w")}
TORCHS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    matmul: torch.matmul,
    addmm: torch.addmm,
    linear: torch.nn.functional.linear,
}


@pytest.mark.parametrize("function", NAMES)
def test_operands_come_by_position_or_by_any_of_their_names(function) -> None:
    names, given = zip(*NAMES[function], strict=True)
    want = TORCHS[function](**dict(NAMES[function]))
    for keywords in (
        names,
        ALIASES[function],
        (names[0], *ALIASES[function][1:]),
        (*ALIASES[function][:-1], names[-1]),
    ):
        assert torch.equal(function(**dict(zip(keywords, given, strict=True))), want)
    assert torch.equal(function(*given[:-1], **{ALIASES[function][-1]: given[-1]}), want)


@pytest.mark.parametrize("function", NAMES)
def test_the_signature_has_the_names_of_torch(function) -> None:
    parameters = inspect.signature(function).parameters
    shown = [p.name for p in parameters.values() if p.default is p.empty]
    assert shown == [name for name, _ in NAMES[function]]
    assert not {"aliases", *ALIASES[function]} & parameters.keys()


@pytest.mark.parametrize("function", NAMES)
def test_wrong_keywords_are_named(function) -> None:
    names, given = zip(*NAMES[function], strict=True)
    alias, name = ALIASES[function][-1], names[-1]
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'kernal'"
    ):
        function(*given, kernal="portable")
    with pytest.raises(
        TypeError,
        match=rf"{function.__name__}\(\) got '{name}' twice, the second time as '{alias}'",
    ):
        function(*given, **{alias: given[-1]})
    with pytest.raises(TypeError, match=rf"{name} is NoneType, expected a torch.Tensor"):
        function(*given[:-1])


def test_compiled_calls_take_either_name() -> None:
    calls = lambda x, y: matmul(a=x, b=y) + matmul(input=x, other=y)  # noqa: E731
    assert torch.equal(torch.compile(calls, backend="eager", fullgraph=True)(A, B), 2 * (A @ B))


with torch.inference_mode():
    INFERENCE = torch.empty(6, 4)
SQUARE = torch.randn(6, 6)

# Ours and torch's, of which torch raises what ours is, too.
ALIKE = {
    "0 dimensions": lambda f: f.matmul(torch.tensor(1.0), B),
    "sizes": lambda f: f.matmul(A, B[:4]),
    "batches": lambda f: f.matmul(A.expand(2, 6, 5), B.expand(3, 5, 4)),
    "dtypes": lambda f: f.matmul(A, B.half()),
    "list": lambda f: f.matmul([1.0], B),
    "None": lambda f: f.matmul(None, B),
    "keyword": lambda f: f.matmul(A, B, nothing=1),
    "out's dtype": lambda f: f.matmul(A, B, out=torch.empty(6, 4).double()),
    "out's device": lambda f: f.matmul(A, B, out=torch.empty(6, 4, device="meta")),
    "out's strides": lambda f: f.matmul(A, B, out=torch.empty(1, 4).expand(6, 4)),
    "out's layout": lambda f: f.matmul(A, B, out=torch.zeros(6, 4).to_sparse()),
    "out's gradient": lambda f: f.matmul(A, B, out=torch.empty(6, 4, requires_grad=True)),
    "inputs' gradient": lambda f: f.matmul(GROWN, B, out=torch.empty(6, 4)),
    "out's inference": lambda f: f.matmul(A, B, out=INFERENCE),
    "3 dimensions": lambda f: f.addmm(torch.zeros(6, 4), A.expand(2, 6, 5), B),
    "addend's shape": lambda f: f.addmm(torch.zeros(5, 4), A, B),
    "addend's dtype": lambda f: f.addmm(torch.zeros(6, 4).double(), A, B),
    "addend's type": lambda f: f.addmm(1.0, A, B),
    "large alpha": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=1e300),
    "complex alpha": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=1 + 2j),
    "alpha's type": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha="1"),
    "alpha's shape": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=torch.ones(1)),
    "alpha's gradient": lambda f: f.addmm(
        torch.zeros(6, 4), A, B, alpha=torch.tensor(1.0, requires_grad=True)
    ),
    "alpha is None": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=None),
    "alpha is an array": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=np.ones(())),
    "weight's dimensions": lambda f: f.linear(A, B.t().expand(2, 4, 5)),
    "weight's shape": lambda f: f.linear(A, B),
    "weight's dtype": lambda f: f.linear(A, B.t().half()),
    "linear of 0 dimensions": lambda f: f.linear(torch.tensor(1.0), B),
    "bias' shape": lambda f: f.linear(A, B.t(), torch.zeros(3)),
    "bias' dtype": lambda f: f.linear(A, B.t(), torch.zeros(4).double()),
}


class Torchs:
    matmul, addmm, linear = torch.matmul, torch.addmm, torch.nn.functional.linear


@pytest.mark.parametrize("name", ALIKE)
def test_who_catches_what_torch_raises_catches_ours(name) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        ALIKE[name](Torchs)
    with pytest.raises(theirs.type) as ours:
        ALIKE[name](outblas)
    assert isinstance(ours.value, ValueError) == (theirs.type is RuntimeError)


def test_an_operand_error_is_of_both_kinds_and_travels() -> None:
    with pytest.raises(
        OperandError, match=r"input.shape\[1\] is 5 but other.shape\[0\] is 4"
    ) as caught:
        matmul(A, B[:4])
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (OperandError, str(caught.value))


def test_linear_names_its_own_parameters() -> None:
    bad = {
        r"input.shape is \(6, 5\), expected \(..., 4\) for weight.shape \(5, 4\)": (A, B),
        r"weight has 3 dimensions, expected 2 \(N, K\) or 1 \(K\)": (A, B.t().expand(2, 4, 5)),
        "weight.dtype is torch.float16 but input.dtype is torch.float32": (A, B.t().half()),
        r"bias.shape is \(3,\), expected a shape that broadcasts to \(6, 4\)": (
            A,
            B.t(),
            torch.zeros(3),
        ),
    }
    for message, given in bad.items():
        with pytest.raises(OperandError, match=message):
            linear(*given)
    w = torch.rand(6, 6)
    for _ in range(4):  # by the short way too
        linear(SQUARE, w, out=torch.empty(6, 6))
        with pytest.raises(OperandError, match="out overlaps weight in memory"):
            linear(SQUARE, w, out=w)


def test_a_wrong_config_spoils_no_equal_one() -> None:
    with pytest.raises(TypeError, match=r"config num_warps is 4.0 \(float\), expected int"):
        matmul(A, B, kernel="portable", config=PortableConfig(num_warps=4.0))
    matmul(A, B, kernel="portable", config=PortableConfig(num_warps=4))
    with pytest.raises(ValueError, match="group_m is 429496730, expected 1 to 1024"):
        matmul(A, B, kernel="portable", config=PortableConfig(group_m=429496730))


BUFFER = torch.randn(20, 20)

BAD: dict[type[Exception], dict[str, Callable[[torch.Tensor], object]]] = {
    ValueError: {
        r"input.shape\[1\] is 5 but other.shape\[0\] is 4": lambda o: matmul(A, B[:4], out=o),
        r"input.shape\[0\] is 5 but other.shape\[0\] is 4": lambda o: matmul(A[0], B[:4]),
        r"input.shape\[:-2\] is \(2,\) but other.shape\[:-2\] is \(3,\)": lambda o: matmul(
            A.expand(2, 6, 5), B.expand(3, 5, 4)
        ),
        "other.dtype is torch.float16 but input.dtype is torch.float32": lambda o: matmul(
            A, B.half(), out=o
        ),
        "other is on meta but input is on cpu": lambda o: matmul(A, B.to("meta"), out=o),
        "input has 0 dimensions, expected at least 1": lambda o: matmul(torch.tensor(1.0), B),
        "other has 0 dimensions, expected at least 1": lambda o: matmul(A, torch.tensor(1.0)),
        r"out.shape is \(4, 6\), expected \(6, 4\)": lambda o: matmul(A, B, out=torch.empty(4, 6)),
        "out.dtype is torch.float64, expected torch.float32": lambda o: matmul(
            A, B, out=o.double()
        ),
        "out is on meta but input is on cpu": lambda o: matmul(A, B, out=o.to("meta")),
        "out overlaps input in memory": lambda o: matmul(BUFFER[:6, :5], B, out=BUFFER[3:9, 4:8]),
        "out overlaps other in memory": lambda o: matmul(A, BUFFER[:5, :4], out=BUFFER[:6, :4]),
        r"out has strides \(0, 1\)": lambda o: matmul(A, B, out=torch.empty(1, 4).expand(6, 4)),
        "out is given with inputs that need gradients": lambda o: matmul(GROWN, B, out=o),
        "out.layout is torch.sparse_coo": lambda o: matmul(A, B, out=torch.zeros(6, 4).to_sparse()),
        "out requires grad": lambda o: matmul(A, B, out=torch.empty(6, 4, requires_grad=True)),
        "out_dtype is torch.float16, expected torch.float32 for operands of "
        "torch.float32$": lambda o: matmul(A, B, out_dtype=torch.float16),
        "kernel is 'hopper.nothing', expected one of: simt.naive, simt.coalesced": lambda o: matmul(
            A, B, out=o, kernel="hopper.nothing"
        ),
        "kernel 'hopper.tma_wgmma' needs an NVIDIA GPU, and was given CPU tensors": lambda o: (
            matmul(A, B, out=o, kernel="hopper.tma_wgmma")
        ),
        "kernel 'portable' needs operands of dtype bfloat16 or float16 or float32, and was given "
        "float64": lambda o: matmul(A.double(), B.double(), kernel="portable"),
        "kernel 'portable' needs plain tensors, and was given meta tensors": lambda o: matmul(
            A.to("meta"), B.to("meta"), kernel="portable"
        ),
        "config is given without kernel": lambda o: matmul(A, B, out=o, config=PortableConfig()),
        "kernel 'portable'.*block_m is 17": lambda o: matmul(
            A, B, out=o, kernel="portable", config=PortableConfig(block_m=17)
        ),
        "mat1 has 3 dimensions, expected 2": lambda o: addmm(o, A.expand(2, 6, 5), B),
        r"input.shape is \(5, 4\), expected a shape that broadcasts to \(6, 4\)": lambda o: addmm(
            torch.zeros(5, 4), A, B, out=o
        ),
        "input.dtype is torch.float64 but mat1.dtype is torch.float32": lambda o: addmm(
            o.double(), A, B, out=o
        ),
        "name is 'nothing', expected a ladder": lambda o: ladder("nothing"),
    },
    TypeError: {
        "input is list, expected a torch.Tensor": lambda o: matmul([[1.0]], B, out=o),
        "other is list, expected a torch.Tensor": lambda o: matmul(A, [1.0], out=o),
        "input is float, expected a torch.Tensor": lambda o: addmm(1.0, A, B, out=o),
        "out is list, expected a torch.Tensor": lambda o: matmul(A, B, out=[]),
        "out_dtype is str": lambda o: matmul(A, B, out_dtype="float32"),
        "kernel is int, expected a name": lambda o: matmul(A, B, out=o, kernel=3),
        "config is HopperConfig, expected PortableConfig for kernel 'portable'": lambda o: matmul(
            A, B, out=o, kernel="portable", config=HopperConfig()
        ),
        "alpha is str, expected a number": lambda o: addmm(o, A, B, alpha="1"),
        r"beta is a tensor of shape \(1,\), expected a number or one of shape \(\)": lambda o: (
            addmm(o, A, B, beta=torch.ones(1))
        ),
        "beta is a tensor that requires grad": lambda o: addmm(
            o, A, B, beta=torch.ones((), requires_grad=True)
        ),
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind in BAD for message in BAD[kind]]
)
def test_bad_input_names_the_argument_and_writes_nothing(
    kind: type[Exception], message: str
) -> None:
    out = torch.full((6, 4), 7.0)
    before = BUFFER.clone()
    with pytest.raises(kind, match=message):
        BAD[kind][message](out)
    assert torch.equal(out, torch.full((6, 4), 7.0))
    assert torch.equal(BUFFER, before)
