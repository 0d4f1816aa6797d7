"""The only checker of shapes, dtypes, strides and devices: turns call arguments into a `Problem`,
or raises.

A `Problem` is what kernels plan for: C[*batch, M, N] = A[*batch, M, K] B[*batch, K, N], with
strides in elements. 1-D operands have become matrices, broadcast batch dimensions have stride 0,
adjacent batch dimensions that one stride can walk are merged, and a batch of rows times one shared
B has been folded into M.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import epilogue
from .epilogue import Epilogue, Extra, View

Strides = tuple[int, ...]

LINE = 128  # bytes of a cache line

# launch(a, b, c, out, alpha, beta): what a kernel's plan returns; takes the raw tensors of a call.
# Where its problem has an epilogue, bias, residual and aux follow, None for those that it has not.
Launch = Callable[..., None]

# The address of a tensor that is only read: `data_ptr` would copy the memory of a lazy clone.
read_address: Callable[[torch.Tensor], int] = getattr(
    torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr
)

# How messages name operands: `OperandError` replaces them by the parameters of the function that
# was called.
A, B, C = "{a}", "{b}", "{c}"

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}  # that kernels compute with


class OperandError(ValueError, RuntimeError):
    """The tensors or numbers of a call do not fit together: shapes, dtypes, devices, layouts,
    memory or gradients.

    It is a ValueError, and a RuntimeError too, because that is what torch raises for such calls.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        super().__init__()
        self.rename({"a": "a", "b": "b", "c": "c"})

    def rename(self, names: Mapping[str, str]) -> None:
        """Names the operands as the function that was called does."""
        message = self._message
        for operand, name in names.items():
            message = message.replace(f"{{{operand}}}", name)
        self.args = (message,)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """One multiplication: sizes, strides in elements (batch dimensions first, then rows, columns),
    dtypes, device.

    `c` holds the strides of the addend of addmm, None without one (or with beta = 0). `alignment`
    holds, for a, b, out (and c), the largest power of two up to 16 that divides the address in
    bytes, or `LINE` where a or b begins at a whole line. `tf32`: torch asks for tf32 in fp32
    products. `scaled`: alpha is not 1, or there is an addend. `batch_invariant`: nothing that
    decides the bits of a row (tile, order of sums, split of K) may depend on M, the batch, or what
    of strides and addresses follows M. `epilogue`: what follows the product; where it is gated, N
    columns are stored, and B and `c` have 2 N. `formats`: of fp8 operands A and B, "e4m3 e5m2", two
    of which are one of `dtype`, so that K is half of theirs; "e4m3 e5m2 promoted" if sums of 128
    products are added up in fp32.
    """

    M: int
    N: int
    K: int
    batch: tuple[int, ...]
    a: Strides
    b: Strides
    c: Strides | None
    out: Strides
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    alignment: tuple[int, ...]
    tf32: bool = False
    scaled: bool = False
    batch_invariant: bool = False
    epilogue: Epilogue = epilogue.NONE
    formats: str = ""

    @property
    def columns(self) -> int:
        """Of B."""
        return 2 * self.N if self.epilogue.gated else self.N


def check_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, expected a torch.Tensor")
    return value


def check_activation(activation: object) -> str:
    return check_name("activation", activation, epilogue.ACTIVATIONS, " or None", "None or ")


def check_name(name: str, value: object, names: Sequence[str], kind: str, either: str = "") -> str:
    """One of `names`, "" for None. Raises TypeError or ValueError that say `kind` and `either` of
    what is expected.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected a str{kind}")
    if value not in names:
        raise ValueError(f"{name} is {value!r}, expected {either}one of {', '.join(names)}")
    return value


def check_alike(a: torch.Tensor, t: torch.Tensor, name: str = B) -> None:
    """Checks that operand `t` has the device and dtype of `a`."""
    if t.device != a.device:
        raise OperandError(f"{name} is on {t.device} but {A} is on {a.device}")
    if t.dtype != a.dtype:
        raise OperandError(f"{name}.dtype is {t.dtype} but {A}.dtype is {a.dtype}")


def check_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Checks dimensions, dtype and device of two operands; returns the shape of their product, as
    torch.matmul.
    """
    for name, t in ((A, a), (B, b)):
        if t.dim() == 0:
            raise OperandError(f"{name} has 0 dimensions, expected at least 1")
    check_alike(a, b)
    inner_b = b.dim() - 2 if b.dim() > 1 else 0
    if a.shape[-1] != b.shape[inner_b]:
        raise OperandError(
            f"{A}.shape[{a.dim() - 1}] is {a.shape[-1]} but {B}.shape[{inner_b}] is "
            f"{b.shape[inner_b]}"
        )
    batch_a, batch_b = a.shape[:-2], b.shape[:-2]
    if not all(x == y or 1 in (x, y) for x, y in zip(batch_a[::-1], batch_b[::-1], strict=False)):
        raise OperandError(
            f"{A}.shape[:-2] is {tuple(batch_a)} but {B}.shape[:-2] is {tuple(batch_b)}, "
            "expected batches that broadcast"
        )
    rows = (a.shape[-2],) if a.dim() > 1 else ()
    columns = (b.shape[-1],) if b.dim() > 1 else ()
    return (*_broadcast_shapes(batch_a, batch_b), *rows, *columns)


def check_extra(
    extra: Extra, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Checks the tensors of an epilogue against the shape and dtype of x; returns the output's
    shape.
    """
    result = check_columns(extra.activation, shape)
    wanted_of = {
        "bias": (extra.bias, shape),
        "residual": (extra.residual, result),
        "aux": (extra.aux, shape),
    }
    for name, (t, wanted) in wanted_of.items():
        if t is None:
            continue
        if t.device != device:
            raise OperandError(f"{name} is on {t.device} but {A} is on {device}")
        if t.dtype != dtype:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected {dtype}, the dtype of the product"
            )
        if name == "aux":
            check_out(t, shape, dtype, device, "aux")
        elif t.dim() > len(wanted) or any(
            have not in (1, want) for have, want in zip(t.shape[::-1], wanted[::-1], strict=False)
        ):
            raise OperandError(
                f"{name}.shape is {tuple(t.shape)}, expected a shape that broadcasts to "
                f"{tuple(wanted)}"
            )
    return result


def check_columns(activation: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Checks that an activation can pair the columns of a product of this shape; returns the
    output's shape.
    """
    if epilogue.halves(activation) == 1:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise OperandError(
            f"activation {activation!r} pairs the columns of the product, expected an even number "
            "of them, "
            f"got shape {tuple(shape)}"
        )
    return (*shape[:-1], shape[-1] // 2)


def check_addend(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Checks the operands of addmm (2-D a and b, c broadcastable to the product); returns the
    product's shape.
    """
    for name, t in ((A, a), (B, b)):
        if t.dim() != 2:
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2")
    M, N = check_pair(a, b)
    check_alike(a, c, C)
    if c.dim() > 2 or any(
        have not in (1, want) for have, want in zip(c.shape[::-1], (N, M), strict=False)
    ):
        raise OperandError(
            f"{C}.shape is {tuple(c.shape)}, expected a shape that broadcasts to {(M, N)}"
        )
    return M, N


def check_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> tuple[int, ...]:
    """As `check_pair`, or as `check_addend` where there is a c."""
    return check_pair(a, b) if c is None else check_addend(c, a, b)


def check_out(
    out: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    name: str = "out",
) -> None:
    """Checks that `out`, called `name`, can hold the product and that no two of its elements share
    memory.
    """
    if tuple(out.shape) != tuple(shape):
        raise OperandError(f"{name}.shape is {tuple(out.shape)}, expected {tuple(shape)}")
    if out.dtype != dtype:
        raise OperandError(f"{name}.dtype is {out.dtype}, expected {dtype}")
    if out.device != device:
        raise OperandError(f"{name} is on {out.device} but {A} is on {device}")
    if out.layout is not torch.strided:
        raise OperandError(f"{name}.layout is {out.layout}, expected {torch.strided}")
    check_writable(out, name)
    if out.requires_grad and torch.is_grad_enabled():
        raise OperandError(
            f"{name} requires grad, expected a tensor that does not (or torch.no_grad())"
        )
    if _overlaps_itself(out):
        raise OperandError(
            f"{name} has strides {out.stride()} for shape {tuple(out.shape)}: its elements share "
            "memory"
        )


def check_writable(out: torch.Tensor, name: str) -> None:
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise OperandError(
            f"{name} is an inference tensor, expected a normal one outside torch.inference_mode()"
        )


def check_out_dtype(out_dtype: object, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the product: that of the operands, or float32 for 16-bit floating operands."""
    if out_dtype is None:
        return dtype
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is {type(out_dtype).__name__}, expected a torch.dtype")
    if out_dtype != dtype and not (
        out_dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)
    ):
        wider = " or torch.float32" if dtype in (torch.float16, torch.bfloat16) else ""
        raise OperandError(
            f"out_dtype is {out_dtype}, expected {dtype}{wider} for operands of {dtype}"
        )
    return out_dtype


def check_overlap(
    out: torch.Tensor, written: str = "out", /, **inputs: torch.Tensor | None
) -> None:
    """Raises when `out`, called `written`, shares memory with an input. Column slices of one buffer
    that interleave do not.
    """
    if not out.numel() or isinstance(out, FakeTensor):
        return
    out.data_ptr()  # memory of its own, if it is a lazy clone
    start, end = address_range(out)
    for name, t in inputs.items():
        if t is None:
            continue
        low, high = address_range(t)
        if start < high and low < end and _share_memory(out, t):
            name = {"a": A, "b": B, "c": C}.get(name, name)
            raise OperandError(f"{written} overlaps {name} in memory, expected separate memory")


def place(operand: torch.Tensor) -> int:
    """What of A's or B's address decides how a call runs: 0 at a whole line, 16 at other multiples
    of 16 bytes.
    """
    address = read_address(operand)
    return address % LINE and (address % 16 or 16)


def address_range(t: torch.Tensor) -> tuple[int, int]:
    """First byte, and one past the last."""
    start = read_address(t)
    return start, start + span_bytes(t)


def span_bytes(t: torch.Tensor) -> int:
    """Bytes from the first to one past the last that a tensor touches."""
    return span(t.shape, t.stride()) * t.element_size()


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to one past the last that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _overlaps_itself(t: torch.Tensor) -> bool:
    """True unless each dimension steps past all that the smaller ones reach (exotic disjoint views
    count as True).
    """
    if t.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Exact test of two strided views, numpy's, on addresses alone; a test too hard to finish
    counts as sharing.
    """
    import numpy as np

    patience: Any = 100_000  # numpy's stubs know two of the values it takes

    class View:
        def __init__(self, t: torch.Tensor) -> None:
            size = t.element_size()
            self.__array_interface__ = {
                "version": 3,
                "typestr": f"|V{size}",
                "shape": tuple(t.shape),
                "strides": tuple(stride * size for stride in t.stride()),
                "data": (read_address(t), True),
            }

    try:
        return bool(np.shares_memory(np.asarray(View(x)), np.asarray(View(y)), max_work=patience))
    except np.exceptions.TooHardError:
        return True


def problem(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    scaled: bool = False,
    batch_invariant: bool = False,
    extra: Extra | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    formats: str = "",
) -> Problem:
    """The normal form of a checked call; `c` is the addend of addmm."""
    extra = extra or Extra()
    halves = epilogue.halves(extra.activation)
    M, K = (1, a.shape[0]) if a.dim() == 1 else tuple(a.shape[-2:])
    N = 1 if b.dim() == 1 else b.shape[-1] // halves
    batch = _broadcast_shapes(a.shape[:-2], b.shape[:-2])

    sa, sb = list(a.stride()), list(b.stride())
    sa = [0, *sa] if a.dim() == 1 else sa
    sb = [*sb, 0] if b.dim() == 1 else sb
    x_shape = (*out.shape[:-1], out.shape[-1] * halves) if halves > 1 else out.shape

    def stored(t: torch.Tensor, shape: Sequence[int]) -> list[int]:
        """Strides over rows and columns of what has, or broadcasts to, the shape of the product."""
        strides = list(t.expand(shape).stride())
        if a.dim() == 1:
            strides.insert(len(batch), 0)
        if b.dim() == 1:
            strides.append(0)
        return strides

    views = [
        _broadcast(sa, a.shape[:-2], batch),
        _broadcast(sb, b.shape[:-2], batch),
        stored(out, out.shape),
    ]
    if c is not None:
        views.append(list(c.expand(M, N * halves).stride()))
    added = {
        "bias": (extra.bias, x_shape),
        "residual": (extra.residual, out.shape),
        "aux": (extra.aux, x_shape),
    }
    if scales is not None:
        added |= {"scale_a": (scales[0], x_shape), "scale_b": (scales[1], x_shape)}
    present = {name: (t, shape) for name, (t, shape) in added.items() if t is not None}
    views += [stored(t, shape) for t, shape in present.values()]

    batch, views = _merge(batch, views)
    while batch and _folds(views, len(batch) - 1, M):
        views = [_fold(v, len(batch) - 1, M, shared=i == 1) for i, v in enumerate(views)]
        M *= batch.pop()
    strides = [tuple(v) for v in views]
    tensors = [t for t in (a, b, out, c) if t is not None]
    own = {
        name: View(own_strides, math.gcd(read_address(t), 16))
        for (name, (t, _)), own_strides in zip(
            present.items(), strides[len(tensors) :], strict=True
        )
    }
    function = epilogue.GATED.get(extra.activation, extra.activation)
    return Problem(
        M=M,
        N=N,
        K=K,
        batch=tuple(batch),
        a=strides[0],
        b=strides[1],
        c=strides[3] if c is not None else None,
        out=strides[2],
        dtype=a.dtype,
        out_dtype=out.dtype,
        device=a.device,
        alignment=tuple(
            LINE if i < 2 and not place(t) else math.gcd(read_address(t), 16)
            for i, t in enumerate(tensors)
        ),
        tf32=tf32,
        scaled=scaled,
        batch_invariant=batch_invariant,
        epilogue=Epilogue(function, halves > 1, **own),
        formats=formats,
    )


def oriented(problem: Problem) -> tuple[Problem, bool]:
    """The product, or where C is stored by columns its transpose, and whether it is that."""
    swapped = (
        not by_rows(problem)
        and (problem.out[-2] == 1 or problem.M == 1)
        and not problem.epilogue.gated
    )
    return (transposed(problem) if swapped else problem), swapped


def transposed(problem: Problem) -> Problem:
    """C^T = B^T A^T. Of a gated product that is none: its halves are columns of B."""
    assert not problem.epilogue.gated, "a gated product has no transpose"
    a, b, *others = problem.alignment

    def turned(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (*strides[:-2], strides[-1], strides[-2])

    return replace(
        problem,
        M=problem.N,
        N=problem.M,
        a=turned(problem.b),
        b=turned(problem.a),
        c=None if problem.c is None else turned(problem.c),
        out=turned(problem.out),
        alignment=(b, a, *others),
        epilogue=problem.epilogue.transposed(),
        formats=" ".join([*problem.formats.split()[1::-1], *problem.formats.split()[2:]]),
    )


def by_rows(problem: Problem) -> bool:
    """Whether C's rows are contiguous."""
    return problem.out[-1] == 1 or problem.N == 1


def _broadcast_shapes(x: Sequence[int], y: Sequence[int]) -> list[int]:
    """As torch.broadcast_shapes, whose first call imports sympy: seconds."""
    return [n if m == 1 else m for m, n in itertools.zip_longest(x[::-1], y[::-1], fillvalue=1)][
        ::-1
    ]


def _broadcast(strides: list[int], shape: Sequence[int], batch: list[int]) -> list[int]:
    """Strides of the batch dimensions of `shape` once broadcast to `batch`, then rows and
    columns.
    """
    lead = [0] * (len(batch) - len(shape))
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=False)]
    return lead + own + strides[-2:]


def _merge(batch: list[int], views: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Drops batch dimensions of size 1 and merges neighbours that every operand walks with one
    stride.
    """
    keep = [i for i, size in enumerate(batch) if size != 1]
    sizes, steps = [batch[i] for i in keep], [[v[i] for i in keep] for v in views]
    for i in range(len(sizes) - 2, -1, -1):
        if all(s[i] == s[i + 1] * sizes[i + 1] for s in steps):
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
            for s in steps:
                del s[i]
    return sizes, [s + v[-2:] for s, v in zip(steps, views, strict=True)]


def _folds(views: list[list[int]], dim: int, M: int) -> bool:
    """Whether batch dimension `dim` shares one B and stacks the rows of the others (one row stacks
    at any stride).
    """
    a, b, *others = views
    return b[dim] == 0 and all(M == 1 or v[dim] == v[dim + 1] * M for v in (a, *others))


def _fold(view: list[int], dim: int, M: int, *, shared: bool) -> list[int]:
    return [*view[:dim], view[dim] if M == 1 and not shared else view[dim + 1], view[-1]]
