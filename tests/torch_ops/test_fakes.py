"""The fake of every operator beside the operator itself: shapes, strides and dtypes of the results
for random sizes and layouts, and whether a call is refused.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import outblas
from outblas.core.epilogue import ACTIVATIONS, GATED
from outblas.torch_ops.schema import ARGUMENTS

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
CALLS_OF_AN_OPERATOR = 24
REGISTERED = outblas.moe_mlp, outblas.scaled_mm  # their modules define operators on import


class Draw(random.Random):
    """What a random call is made of."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.dtype = self.choice([torch.float32, torch.bfloat16, torch.float16])
        self.M, self.N, self.K, self.E = (self.choice([0, 1, 2, 3, 5, 8, 17]) for _ in range(4))
        self.E = self.choice([1, 2, 3])
        self.wide = self.choice([None, torch.float32])
        self.out_dtype = self.wide or self.dtype
        self.activation = self.choice(["", *ACTIVATIONS])
        self.columns = 2 * self.N if self.activation in GATED else self.N  # those of x

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of any layout, of the dtype of the call unless another is given."""
        t = torch.randn(shape).to(dtype or self.dtype)
        layout = self.choice(["rows", "rows", "columns", "gaps", "repeated"])
        if layout == "columns" and t.dim() > 1:
            return t.mT.contiguous().mT
        if layout == "gaps" and t.dim():
            return torch.stack((t, t), -1)[..., 0]
        if layout == "repeated" and t.numel() and t.dim():
            return t[:1].expand(t.shape)
        return t

    def fp8(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(FP8)

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.out_dtype)

    def maybe(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(*shape, dtype=dtype or self.out_dtype) if self.random() < 0.5 else None

    def offs(self, end: int) -> Tensor:
        ends = sorted(self.randrange(end + 1) for _ in range(self.E))
        return torch.tensor(ends, dtype=torch.int32)

    def scale(self, *shape: int) -> Tensor:
        return torch.ones(shape)


def product(draw: Draw) -> tuple[Any, ...]:
    """A, B, bias and residual, and the shapes of the output and of x."""
    batch = self_batch = [draw.choice([0, 1, 2])] if draw.random() < 0.5 else []
    if draw.random() < 0.5:
        self_batch = []
    a, b = draw.tensor(*batch, draw.M, draw.K), draw.tensor(*self_batch, draw.K, draw.columns)
    x, out = (*batch, draw.M, draw.columns), (*batch, draw.M, draw.N)
    return a, b, draw.maybe(draw.columns), draw.maybe(*out), out, x


def gemm(draw: Draw) -> tuple[Any, ...]:
    a, b, bias, residual, *_ = product(draw)
    return a, b, None, bias, residual, 1, 1, draw.activation, draw.wide


def gemm_out(draw: Draw) -> tuple[Any, ...]:
    a, b, bias, residual, out, x = product(draw)
    aux = draw.out(*x) if draw.random() < 0.5 else None
    given = a, b, None, bias, residual, 1, 1, draw.activation, draw.wide
    return draw.out(*out), aux, *given


def matmul(draw: Draw) -> tuple[Any, ...]:
    a, b, *_ = product(draw)
    vector = draw.choice(["", "", "a", "b"])
    a = draw.tensor(draw.K) if vector == "a" else a
    return a, draw.tensor(draw.K) if vector == "b" else b, draw.wide


def matmul_out(draw: Draw) -> tuple[Any, ...]:
    a, b, wide = matmul(draw)
    return a, b, draw.out(*torch.matmul(a, b).shape), wide


def addmm(draw: Draw) -> tuple[Any, ...]:
    shape = draw.choice([(), (draw.N,), (draw.M, draw.N), (draw.M, 1), (1, 1)])
    a, b = draw.tensor(draw.M, draw.K), draw.tensor(draw.K, draw.N)
    return draw.tensor(*shape), a, b, draw.choice([0, 1, 2.5]), draw.choice([0, 1, 0.5])


def addmm_out(draw: Draw) -> tuple[Any, ...]:
    c, a, b, *factors = addmm(draw)
    return c, a, b, draw.out(draw.M, draw.N, dtype=draw.dtype), *factors


def groups(draw: Draw, forms: str = "mnkb") -> tuple[str, tuple[Any, ...]]:
    M, N, K, E = draw.M, draw.columns, draw.K, draw.E
    form = draw.choice(forms)
    operands: dict[str, Callable[[], tuple[Any, ...]]] = {
        "m": lambda: (draw.tensor(M, K), draw.tensor(E, K, N), draw.offs(M)),
        "n": lambda: (draw.tensor(E, M, K), draw.tensor(K, N), draw.offs(N)),
        "k": lambda: (draw.tensor(M, K), draw.tensor(K, N), draw.offs(K)),
        "b": lambda: (draw.tensor(E, M, K), draw.tensor(E, K, N), None),
    }
    return form, operands[form]()


def grouped_mm(draw: Draw) -> tuple[Any, ...]:
    form, operands = groups(draw)
    bias = None if form == "n" else draw.maybe(draw.E, draw.columns)
    return *operands, bias, draw.wide


def grouped_gemm(draw: Draw, forms: str = "mkb") -> tuple[Any, ...]:
    form, (mat_a, mat_b, offs) = groups(draw, forms)
    bias = draw.maybe(draw.E, draw.columns)
    result = (draw.M, draw.N) if form == "m" else (draw.E, draw.M, draw.N)
    residual = draw.maybe(*result)
    rows: tuple[Tensor | None, ...] = (None, None, None)
    if form == "m" and draw.random() < 0.5:
        index, places = torch.randint(0, max(draw.M, 1), (draw.M,)), torch.randperm(draw.M)
        rows = index, places.int(), draw.maybe(draw.M, dtype=torch.float32)
    return mat_a, mat_b, offs, bias, residual, *rows, draw.activation, draw.wide


def grouped_gemm_to_aux(draw: Draw) -> tuple[Any, ...]:
    return draw.out(draw.M, draw.columns), *grouped_gemm(draw, "m")


def scaled_mm(draw: Draw) -> tuple[Any, ...]:
    a, b = draw.fp8(draw.M, draw.K), draw.fp8(draw.columns, draw.K).t()
    scales = draw.choice(
        [
            (draw.scale(), draw.scale(1)),
            (draw.scale(draw.M, 1), draw.scale(1, draw.columns)),
        ]
    )
    bias, residual = (
        draw.maybe(*shape, dtype=torch.bfloat16) for shape in ((draw.columns,), (draw.M, draw.N))
    )
    return a, b, *scales, bias, torch.bfloat16, draw.random() < 0.5, draw.activation, residual


def scaled_mm_quantized(draw: Draw) -> tuple[Any, ...]:
    a, b, *scales, _, _, _, activation, _ = scaled_mm(draw)
    bias = draw.maybe(draw.columns, dtype=torch.float32)
    return a, b, *scales, "1x128", bias, draw.random() < 0.5, False, activation


def scaled_grouped_mm(draw: Draw) -> tuple[Any, ...]:
    K, N, E = 130, draw.columns, draw.E
    operands = draw.fp8(draw.M, K), draw.fp8(E, N, K).mT
    scales = draw.scale(draw.M, 2), draw.scale(E, 2, -(-N // 128))
    rest = None, None, None, None, None, None, draw.activation, torch.bfloat16
    return *operands, *scales, draw.offs(draw.M), *rest


def quantize(draw: Draw) -> tuple[Any, ...]:
    shape = [draw.choice([0, 1, 2, 3])] * draw.choice([0, 1])
    shape += [draw.choice([0, 1, 5, 129]), draw.choice([0, 1, 5, 128, 300])]
    recipe = draw.choice(["tensorwise", "rowwise", "1x128", "128x128"])
    return draw.tensor(*shape), recipe, FP8, draw.random() < 0.5


def activation_backward(draw: Draw) -> tuple[Any, ...]:
    draw.activation = draw.activation or "relu"
    columns = 2 * draw.N if draw.activation in GATED else draw.N
    return draw.tensor(draw.M, draw.N), draw.tensor(draw.M, columns), draw.activation


def moe_mlp(draw: Draw) -> tuple[Any, ...]:
    T, k = draw.choice([0, 1, 5]), draw.choice([0, 1, 2])
    activation = draw.activation or "swiglu"
    inner = draw.choice([1, 4])
    width = 2 * inner if activation in GATED else inner
    index = torch.randint(-1, draw.E + 1, (T, k))
    layer = draw.tensor(T, 8), draw.tensor(draw.E, 8, width), draw.tensor(draw.E, inner, 8)
    biases = draw.maybe(draw.E, width, dtype=draw.dtype), draw.maybe(draw.E, 8, dtype=draw.dtype)
    return *layer, index, draw.tensor(T, k), activation, *biases


def moe_mlp_backward(draw: Draw) -> tuple[Any, ...]:
    layer = moe_mlp(draw)
    out, *kept = torch.ops.outblas.moe_mlp_forward(*layer)
    has_biases = [t is not None for t in layer[-2:]]
    needs = [draw.random() < 0.6 for _ in range(4)]
    needs += [is_there and draw.random() < 0.6 for is_there in has_biases]
    return draw.tensor(*out.shape, dtype=out.dtype), *kept, needs, *layer


CASES: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    "matmul": matmul,
    "matmul_out": matmul_out,
    "addmm": addmm,
    "addmm_out": addmm_out,
    "gemm": gemm,
    "gemm_aux": gemm,
    "gemm_out": gemm_out,
    "grouped_mm": grouped_mm,
    "grouped_gemm": grouped_gemm,
    "grouped_gemm_aux": grouped_gemm,
    "grouped_gemm_to_aux": grouped_gemm_to_aux,
    "scaled_mm": scaled_mm,
    "scaled_mm_quantized": scaled_mm_quantized,
    "scaled_grouped_mm": scaled_grouped_mm,
    "quantize": quantize,
    "activation_backward": activation_backward,
    "moe_mlp": moe_mlp,
    "moe_mlp_forward": moe_mlp,
    "moe_mlp_backward": moe_mlp_backward,
}


def test_every_operator_is_drawn() -> None:
    assert set(CASES) == set(ARGUMENTS)


def spoiled(draw: Draw, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, of which a tensor may have another size, dtype or number of dimensions."""
    places = [i for i, t in enumerate(arguments) if isinstance(t, Tensor)]
    place = draw.choice(places)
    t = arguments[place]
    changes: list[Callable[[], Tensor]] = [
        lambda: t.unsqueeze(0),
        lambda: t.double(),
        lambda: torch.cat((t, t), -1) if t.dim() else t,
        lambda: t[..., :-1] if t.dim() else t,
        lambda: t[1:] if t.dim() else t,
        lambda: t.flatten()[0] if t.numel() else t,
    ]
    return *arguments[:place], draw.choice(changes)(), *arguments[place + 1 :]


def traits(result: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype, and strides where they matter, of each tensor of a result."""
    tensors = result if isinstance(result, tuple | list) else () if result is None else (result,)
    return [
        (
            tuple(t.shape),
            t.dtype,
            [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
            if t.numel()
            else None,
        )
        for t in tensors
    ]


def outcome(operator: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return traits(operator(*arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_a_fake_is_like_the_result(name: str) -> None:
    operator = getattr(torch.ops.outblas, name).default
    for seed in range(CALLS_OF_AN_OPERATOR):
        draw = Draw(f"{name} {seed}")
        arguments = CASES[name](draw)
        is_spoiled = seed % 4 == 3 and name != "moe_mlp_backward"  # which checks no kept rows
        if is_spoiled:
            arguments = spoiled(draw, arguments)
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in arguments]

        real = outcome(operator, arguments)

        with mode:
            assert outcome(operator, tuple(fakes)) == real, f"call {seed}"
        assert is_spoiled or isinstance(real, list), f"call {seed}: {real}"
