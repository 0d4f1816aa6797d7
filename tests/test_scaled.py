"""fp8: `scaled_mm` against float64, exactly where sums are small integers, its errors, what the kernel is made of."""

import pytest
import torch

from outblas import FallbackWarning, fallback, scaled_mm
from outblas.epilogue import ACTIVATIONS, GATED, apply

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = (128, 128, 128), (300, 264, 272), (1000, 1040, 1000), (16, 4096, 1024), (7, 9, 33), (256, 192, 4096)
gpu = [pytest.mark.gpu, pytest.mark.sm90]


def operands(M, N, K, a=E4M3, b=E4M3, device="cpu", most=0):
    """Normal values, or integers up to `most`; B as a transposed weight."""
    generator = torch.Generator(device).manual_seed(M + N + K)

    def made(rows, dtype):
        t = torch.randn(rows, K, generator=generator, device=device)
        return (t.round().clamp(-most, most) if most else t).to(dtype)

    return made(M, a), made(N, b).t()


def error(y, x):
    return float((y.double() - x).norm() / x.norm())


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_scales_and_epilogues(device):
    M, N, K = 96, 160, 256
    a, b = operands(M, N, K, E5M2, device=device, most=2)  # sums that the tensor cores hold
    x = a.double() @ b.double()
    rows, columns = torch.rand(M, 1, device=device) + 0.5, torch.rand(1, N, device=device) + 0.5
    for scale_a, scale_b in ((rows, columns), (rows[0], columns[0, 0]), (rows, columns[0, 0])):
        scaled = scale_a.double() * x * scale_b.double()
        for dtype, unit in ((torch.bfloat16, 2**-9), (torch.float16, 2**-12), (torch.float32, 2**-17)):
            bias, residual = torch.randn(N, device=device).to(dtype), torch.randn(M, N, device=device).to(dtype)
            assert error(scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype), scaled) < unit
            how = {"bias": bias, "activation": "gelu", "residual": residual, "out_dtype": dtype}
            want = apply(scaled + bias.double(), "gelu", residual.double())
            assert error(scaled_mm(a, b, scale_a, scale_b, **how), want) < unit


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(shape, fast, monkeypatch):
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
def test_precision_of_sums(K):
    """Promoted, the error does not grow with K; in the tensor cores it does, no faster than torch's."""
    a, b = operands(512, 512, K, device="cuda")
    one, x = torch.ones((), device="cuda"), a.double() @ b.double()

    def ours(fast):
        return error(scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast), x)

    theirs = error(torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=True), x)
    assert ours(False) < 1.5e-4
    assert ours(False) < ours(True) < 1.1 * theirs


def test_torch_takes_it_without_a_gpu_and_says_so():
    a, b = operands(4, 6, 8)
    one = torch.ones(())
    fallback._seen.discard("fp8 CPU tensors")
    with pytest.warns(FallbackWarning, match="fp8 CPU tensors"):
        scaled_mm(a, b, one, one)
    assert scaled_mm(a[:0], b, one, one).shape == (0, 6)
    bias = torch.ones(6).bfloat16()
    for given in ((a, b, one, one), (a, b, one, one, bias.requires_grad_(), None, False, "gelu", bias)):
        checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # its schema's has no fp8
        torch.library.opcheck(torch.ops.outblas.scaled_mm.default, given, test_utils=checks)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize(("change", "message"), [
    ({"a": torch.ones(4, 8)}, "a.dtype is torch.float32, expected one of torch.float8_e4m3fn"),
    ({"b": operands(4, 6, 16)[1]}, r"a.shape\[1\] is 8 but b.shape\[0\] is 16"),
    ({"scale_a": torch.ones(6, 1)}, r"scale_a.shape is \(6, 1\), expected one element or \(4, 1\)"),
    ({"scale_b": torch.ones((), dtype=torch.float16)}, "scale_b is torch.float16"),
    ({"out_dtype": torch.float64}, "out_dtype is torch.float64, expected one of torch.bfloat16"),
    ({"bias": torch.ones(6)}, "bias.dtype is torch.float32, expected torch.bfloat16"),
])  # fmt: skip
def test_bad_input_names_the_argument(change, message):
    a, b = operands(4, 6, 8)
    given = {"a": a, "b": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())} | change
    with pytest.raises(ValueError, match=message):
        scaled_mm(**given)


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
def test_bias_and_residual_have_gradients(activation, dtype, device):
    torch._dynamo.reset()
    ours, torchs, leaves = differentiated(activation, dtype, device)
    g = torch.randn(16, 6, device=device).to(dtype).t()
    want = torch.autograd.grad(torchs(*leaves), leaves, g)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.03}
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
def test_second_derivatives_and_transforms(activation):
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
def test_no_gradient_is_cut_in_silence(name):
    torch._dynamo.reset()
    a, b = operands(4, 6, 8)
    given = {"a": a, "b": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())}
    given[name].requires_grad_()
    message = f"{name} requires grad, expected a tensor that does not"
    for call in (scaled_mm, torch.ops.outblas.scaled_mm):
        with pytest.raises(ValueError, match=message):
            call(**given)
    with pytest.raises(Exception, match=message):
        torch.compile(scaled_mm, backend="aot_eager", fullgraph=True)(**given)
    with torch.no_grad():
        assert scaled_mm(**given).shape == (4, 6)
    given[name].requires_grad_(False)
    bias = torch.ones(6).requires_grad_()
    loss = lambda bias: scaled_mm(**given, bias=bias, out_dtype=torch.float32).square().sum()  # noqa: E731
    for transform in (lambda: torch.func.jvp(loss, (bias,), (bias,)), lambda: torch.func.hessian(loss)(bias)):
        with pytest.raises(ValueError, match="bias carries a forward-mode gradient"):
            transform()
