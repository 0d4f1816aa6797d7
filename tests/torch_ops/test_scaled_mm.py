"""fp8: `scaled_mm` against float64, exactly where sums are small integers, its errors, what the
kernel is made of.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outblas import FallbackWarning, OperandError, scaled_mm
from outblas.core.epilogue import ACTIVATIONS, GATED, apply
from outblas.runtime import fallback
from outblas.torch_ops import scaled_mm as scaled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = (
    (128, 128, 128),
    (300, 264, 272),
    (1000, 1040, 1000),
    (16, 4096, 1024),
    (7, 9, 33),
    (256, 192, 4096),
)
gpu = [pytest.mark.gpu, pytest.mark.sm90]


def operands(
    M: int, N: int, K: int, a: Any = E4M3, b: Any = E4M3, device: str = "cpu", most: int = 0
) -> Any:
    """Normal values, or integers up to `most`; B as a transposed weight."""
    generator = torch.Generator(device).manual_seed(M + N + K)

    def made(rows: int, dtype: torch.dtype) -> torch.Tensor:
        t = torch.randn(rows, K, generator=generator, device=device)
        return (t.round().clamp(-most, most) if most else t).to(dtype)

    return made(M, a), made(N, b).t()


def error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double() - x).norm() / x.norm())


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_scales_and_epilogues(device: str) -> None:
    M, N, K = 96, 160, 256
    a, b = operands(M, N, K, E5M2, device=device, most=2)  # sums that the tensor cores hold
    x = a.double() @ b.double()
    rows, columns = torch.rand(M, 1, device=device) + 0.5, torch.rand(1, N, device=device) + 0.5
    for scale_a, scale_b in ((rows, columns), (rows[0], columns[0, 0]), (rows, columns[0, 0])):
        scaled = scale_a.double() * x * scale_b.double()
        for dtype, unit in (
            (torch.bfloat16, 2**-9),
            (torch.float16, 2**-12),
            (torch.float32, 2**-17),
        ):
            bias, residual = (
                torch.randn(N, device=device).to(dtype),
                torch.randn(M, N, device=device).to(dtype),
            )
            assert error(scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype), scaled) < unit
            how = {"bias": bias, "activation": "gelu", "residual": residual, "out_dtype": dtype}
            want = apply(scaled + bias.double(), "gelu", residual.double())
            assert error(scaled_mm(a, b, scale_a, scale_b, **how), want) < unit


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: tuple[int, int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums below 2¹³, which the tensor cores hold."""
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    one = torch.ones((), device="cuda")
    for kinds in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)):
        a, b = operands(*shape, *kinds, device="cuda", most=1)
        for first, second in ((a, b), (a.t().contiguous().t(), b.contiguous())):
            y = scaled_mm(first, second, one, one, out_dtype=torch.float32, use_fast_accum=fast)
            assert torch.equal(y.double(), a.double() @ b.double())


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("K", [1024, 4096, 16384])
def test_precision_of_sums(K: int) -> None:
    """Promoted, the error does not grow with K; in the tensor cores it does, no faster than
    torch's.
    """
    a, b = operands(512, 512, K, device="cuda")
    one, x = torch.ones((), device="cuda"), a.double() @ b.double()

    def ours(fast: bool) -> float:
        return error(scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast), x)

    theirs = error(
        torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=True), x
    )
    assert ours(False) < 1.5e-4
    assert ours(False) < ours(True) < 1.1 * theirs


def as_stored(t, how):
    """The same values in memory that lies otherwise."""
    if how == "every second":
        return t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    if how == "expanded":
        return t[:1, :1].expand(t.shape)
    return t


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("how", ["packed", "every second", "expanded"])
@pytest.mark.parametrize(
    "shape", [(1, 48, 64), (3, 264, 128), (7, 9, 33), (300, 16, 272), (264, 300, 2), (5, 7, 1)]
)
def test_scales_belong_to_rows_and_columns_however_they_lie(
    shape, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host swaps the operands, as it does for few rows, and for rows of one or two
    values.
    """
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    M, N, K = shape
    a, b = operands(M, N, K, device="cuda", most=1)
    rows = as_stored(2.0 ** (torch.arange(M, device="cuda") % 5 - 2).unsqueeze(1), how)
    columns = as_stored(2.0 ** (torch.arange(N, device="cuda") % 3 - 1).unsqueeze(0), how)
    want = rows.double() * (a.double() @ b.double()) * columns.double()
    assert torch.equal(scaled_mm(a, b, rows, columns, out_dtype=torch.float32).double(), want)


@pytest.mark.parametrize("K", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("stride", ["packed", "overlapping", "odd"])
def test_words_of_rows_hold_the_same_values(K: int, stride: str) -> None:
    """fp8 rows reach the kernel as pairs of 16 bits: two at least, at even strides, with zeros
    where a row ends.
    """
    values = torch.randn(2, 2 * K + 1).to(E4M3)
    t = {
        "packed": values[:, :K].contiguous(),
        "overlapping": values.flatten().as_strided((1, K), (1, 1)),
        "odd": values.as_strided((2, K), (2 * K + 1, 1)),
    }[stride]
    pairs = scaled._as_16_bit_pairs(t)
    assert pairs.dtype is torch.bfloat16
    assert pairs.stride(1) == 1
    assert pairs.shape[1] >= 2
    back = pairs.view(E4M3).float()
    assert torch.equal(back[:, :K], t.float())
    assert not back[:, K:].any()


@pytest.mark.compile
@pytest.mark.parametrize("K", [1, 2])
def test_rows_of_one_pair_compile(K: int) -> None:
    """Both operands of an fp8 product lie along K, which rows of a single pair would not say."""
    pytest.importorskip("cutlass")
    from outblas.core import problem as described
    from outblas.core.epilogue import EpilogueArgs
    from outblas.hopper import gemm
    from outblas.hopper.gemm import heuristic

    a, b = operands(64, 3, K)
    one, out = torch.ones(()), torch.empty(64, 3, dtype=torch.bfloat16)
    first, second = scaled._as_16_bit_pairs(a), scaled._as_16_bit_pairs(b.t()).t()
    how = {"extra": EpilogueArgs(), "scales": (one, one), "formats": "e4m3 e4m3"}
    problem = described.problem(first, second, out, **how)
    gemm.precompile(problem, heuristic.config(problem, 132, gemm.Config()), 90)


def test_torch_takes_it_without_a_gpu_and_says_so() -> None:
    a, b = operands(4, 6, 8)
    one = torch.ones(())
    fallback._seen.discard("fp8 CPU tensors")
    with pytest.warns(FallbackWarning, match="fp8 CPU tensors"):
        scaled_mm(a, b, one, one)
    assert scaled_mm(a[:0], b, one, one).shape == (0, 6)
    bias = torch.ones(6).bfloat16()
    for given in (
        (a, b, one, one),
        (a, b, one, one, bias.requires_grad_(), None, False, "gelu", bias),
    ):
        checks = (
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )  # its schema's has no fp8
        torch.library.opcheck(torch.ops.outblas.scaled_mm.default, given, test_utils=checks)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"a": torch.ones(4, 8)},
            "input.dtype is torch.float32, expected one of torch.float8_e4m3fn",
        ),
        ({"b": operands(4, 6, 16)[1]}, r"input.shape\[1\] is 8 but mat2.shape\[0\] is 16"),
        (
            {"scale_a": torch.ones(6, 1)},
            r"scale_a.shape is \(6, 1\), expected one element or \(4, 1\)",
        ),
        ({"scale_b": torch.ones((), dtype=torch.float16)}, "scale_b is torch.float16"),
        (
            {"out_dtype": torch.float64},
            "out_dtype is torch.float64, expected one of torch.bfloat16",
        ),
        ({"bias": torch.ones(6)}, "bias.dtype is torch.float32, expected torch.bfloat16"),
    ],
)
def test_bad_input_names_the_argument(change: dict[str, Any], message: str) -> None:
    a, b = operands(4, 6, 8)
    given = {"a": a, "b": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())} | change
    for kind in (OperandError, ValueError, RuntimeError):
        with pytest.raises(kind, match=message):
            scaled_mm(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "input is NoneType, expected a torch.Tensor"),
        ({"mat2": None}, "mat2 is NoneType, expected a torch.Tensor"),
        ({"mat2": [1.0]}, "mat2 is list, expected a torch.Tensor"),
        ({"scale_a": 1.0}, "scale_a is float, expected a torch.Tensor"),
        ({"scale_b": None}, "scale_b is NoneType, expected a torch.Tensor"),
        ({"bias": 1.0}, "bias is float, expected a torch.Tensor"),
        ({"out_dtype": "bfloat16"}, "out_dtype is str, expected a torch.dtype"),
        ({"use_fast_accum": "no"}, "use_fast_accum is str, expected a bool"),
        ({"activation": 3}, "activation is int, expected a str"),
        ({"a": torch.ones(())}, r"scaled_mm\(\) got 'input' twice, the second time as 'a'"),
        ({"weight": torch.ones(())}, r"scaled_mm\(\) got an unexpected keyword argument 'weight'"),
    ],
)
def test_arguments_of_a_wrong_type(change, message: str) -> None:
    a, b = operands(4, 6, 8)
    given = {"input": a, "mat2": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())} | change
    with pytest.raises(TypeError, match=message):
        scaled_mm(**given)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_arguments_have_the_names_of_torchs() -> None:
    a, b = operands(16, 32, 16, most=2)
    one, bias = torch.ones(()), torch.ones(32).bfloat16()
    want = torch._scaled_mm(
        input=a, mat2=b, scale_a=one, scale_b=one, bias=bias, out_dtype=torch.bfloat16
    )
    assert torch.equal(scaled_mm(a, b, one, one, bias), want)
    assert torch.equal(scaled_mm(input=a, mat2=b, scale_a=one, scale_b=one, bias=bias), want)
    assert torch.equal(scaled_mm(a=a, b=b, scale_a=one, scale_b=one, bias=bias), want)
    names = list(inspect.signature(scaled_mm).parameters)
    assert names[:5] == ["input", "mat2", "scale_a", "scale_b", "bias"]


def test_an_operator_names_its_own_arguments() -> None:
    a, b = operands(4, 6, 8)
    one = torch.ones(())
    with pytest.raises(OperandError, match=r"a.shape\[1\] is 6 but b.shape\[0\] is 8"):
        torch.ops.outblas.scaled_mm(a[:, :6], b, one, one)
    for name in ("tanh", "swish"):
        with pytest.raises(ValueError, match=f"activation is '{name}', expected"):
            torch.ops.outblas.scaled_mm(a, b, one, one, None, None, False, name)


class Knowing(torch.Tensor):
    """It overrides our function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is scaled_mm:
            return "ours", len(args), sorted(kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


class Duck:
    """No tensor at all."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "duck" if func is scaled_mm else NotImplemented


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_types_override_the_function() -> None:
    a, b = operands(4, 6, 8)
    one = torch.ones(())
    found = scaled_mm(a, b.as_subclass(Knowing), one, one, activation="relu")
    assert found == ("ours", 4, ["activation", "out_dtype", "use_fast_accum"])
    assert scaled_mm(a, Duck(), one, one) == "duck"
    assert type(scaled_mm(a, b.as_subclass(Plain), one, one)) is Plain
    with pytest.raises(OperandError, match=r"input.shape\[1\] is 6"):
        scaled_mm(a[:, :6], b.as_subclass(Plain), one, one)
    with torch.device("cpu"):
        assert scaled_mm(a, b, one, one).shape == (4, 6)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_fakes_check_alike(kind: str) -> None:
    mode = FakeTensorMode()
    given = *operands(4, 6, 8), torch.ones(())
    a, b, one = (mode.from_tensor(t) if kind == "fake" else t.to("meta") for t in given)
    with mode if kind == "fake" else contextlib.nullcontext():
        assert scaled_mm(a, b, one, one).shape == (4, 6)
        with pytest.raises(RuntimeError, match=r"input.shape\[1\] is 6 but mat2.shape\[0\] is 8"):
            scaled_mm(a[:, :6], b, one, one)
        with pytest.raises(ValueError, match="activation is 'tanh'"):
            torch.ops.outblas.scaled_mm(a, b, one, one, None, None, False, "tanh")


# ---- gradients
def differentiated(activation, dtype, device="cpu"):
    """A call of bias and residual, what torch makes of it in fp32, and the two."""
    M, N, K = 6, 16, 32
    columns = 2 * N if activation in GATED else N
    a, b = operands(M, columns, K, device=device, most=2)  # sums that the tensor cores hold
    one, unit = torch.full((), 0.5, device=device), torch.rand(1, columns, device=device) + 0.5
    bias = torch.randn(columns, device=device).to(dtype).requires_grad_()
    residual = torch.randn(M, 1, device=device).to(dtype).requires_grad_()

    def ours(bias, residual):
        how = {"bias": bias, "residual": residual, "activation": activation, "out_dtype": dtype}
        return scaled_mm(a, b, one, unit, **how)

    def torchs(bias, residual):
        x = (one * a.float()) @ (unit * b.float()) + bias.float()
        return apply(x, activation or "", residual.float()).to(dtype)

    return ours, torchs, (bias, residual)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_bias_and_residual_have_gradients(activation, dtype, device) -> None:
    torch._dynamo.reset()
    ours, torchs, leaves = differentiated(activation, dtype, device)
    g = torch.randn(16, 6, device=device).to(dtype).t()
    want = torch.autograd.grad(torchs(*leaves), leaves, g)
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.03}
    )
    for call in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        y = call(*leaves)
        assert y.requires_grad
        torch.testing.assert_close(torch.autograd.grad(y, leaves, g), want, **tolerance)
    for needed in (0, 1):
        given = [t if i == needed else t.detach() for i, t in enumerate(leaves)]
        (found,) = torch.autograd.grad(ours(*given), leaves[needed], g)
        torch.testing.assert_close(found, want[needed], **tolerance)
    with torch.no_grad():
        assert not ours(*leaves).requires_grad


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu"])
def test_second_derivatives_and_transforms(activation: str | None) -> None:
    ours, torchs, leaves = differentiated(activation, torch.float32)
    plain = [t.detach() for t in leaves]
    results = []
    for f in (ours, torchs):
        first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)

        def loss(*given, f=f):
            return f(*given).square().sum()

        transformed = torch.func.grad(loss, (0, 1))(*plain)
        hessian = torch.func.jacrev(torch.func.jacrev(loss))(*plain)
        results.append([*first, *second, *transformed, hessian])
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("name", ["a", "b", "scale_a", "scale_b"])
def test_no_gradient_is_cut_in_silence(name: str) -> None:
    torch._dynamo.reset()
    a, b = operands(4, 6, 8)
    given = {"a": a, "b": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())}
    given[name].requires_grad_()
    message = f"{name}.* requires grad, and of scaled_mm only bias and residual have gradients"
    bias = torch.ones(6).bfloat16().requires_grad_()
    calls: list[Callable[..., Any]] = [
        scaled_mm,
        torch.ops.outblas.scaled_mm,
        lambda **given: scaled_mm(**given, activation="gelu", bias=bias),
    ]
    for call in calls:  # as torch._scaled_mm: the forward pass runs
        y = call(**given)
        assert y.requires_grad
        with pytest.raises(NotImplementedError, match=message):
            y.sum().backward()
    assert bias.grad is None
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda t: scaled_mm(**given | {name: t}).sum())(given[name].detach())
    with torch.no_grad():
        y = scaled_mm(**given)
        assert torch.equal(
            y, torch.compile(scaled_mm, backend="aot_eager", fullgraph=True)(**given)
        )
        assert not y.requires_grad
    given[name].requires_grad_(False)
    bias = torch.ones(6).requires_grad_()
    loss = lambda bias: scaled_mm(**given, bias=bias, out_dtype=torch.float32).square().sum()  # noqa: E731
    for transform in (
        lambda: torch.func.jvp(loss, (bias,), (bias,)),
        lambda: torch.func.hessian(loss)(bias),
    ):
        with pytest.raises(ValueError, match="bias carries a forward-mode gradient"):
            transform()
