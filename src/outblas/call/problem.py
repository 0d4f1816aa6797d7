"""The only checker of shapes, dtypes, strides and devices. It turns the arguments of a call into a
`Problem`, or raises.

A `Problem` is the input of a kernel's plan: C[*batch, M, N] = A[*batch, M, K] B[*batch, K, N], with
strides in elements. 1-D operands have become matrices, broadcast batch dimensions have stride 0,
adjacent batch dimensions that a single stride can cover are merged, and where all batches share one
B, the batch is folded into M.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from outblas.base.compat.torch_private import FakeTensor
from outblas.call import epilogue, fp8
from outblas.call.epilogue import Epilogue, EpilogueArgs, View, glu_split
from outblas.call.errors import A, B, C, OperandError
from outblas.call.sizes import are_equal, broadcasts, holds, is_one
from outblas.call.tensor_memory import (
    LINE,
    address_range,
    alignment_class,
    overlaps_itself,
    share_memory,
)
from outblas.call.tensor_memory import alignment as alignment_of

Strides = tuple[int, ...]

WIDEST = 16  # bytes of the widest load or store

# A kernel's plan returns launch(a, b, c, out, alpha, beta), which takes the tensors of a call.
# Where its problem has an epilogue, bias, residual and aux follow; a tensor that the call lacks is
# None.
Launch = Callable[..., None]

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}  # operand dtypes that kernels compute with


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: torch.bfloat16 → "bfloat16"."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """One multiplication: sizes, strides in elements (batch dimensions first, then rows, columns),
    dtypes and device.

    c: the strides of addmm's addend; None without one, or with beta = 0.
    alignment: for a, b, out (and c), the largest power of two up to 16 that divides the address
        in bytes, or `LINE` where a or b begins at a multiple of a cache line.
    tf32: torch asks for tf32 in fp32 products.
    scaled: alpha is not 1, or there is an addend.
    batch_invariant: nothing that decides the bits of a row (tile, order of summation, split of K)
        may depend on M, on the batch, or on strides and addresses that change with M.
    epilogue: the operations after the product. A gated epilogue stores N columns; B and `c` then
        have 2 N.
    formats: of fp8 operands A and B, "e4m3 e5m2". Two fp8 values count as one element of `dtype`,
        so K is half of the operands' own K. "e4m3 e5m2 promoted" if the accumulators are added
        to fp32 sums after every 128 products. Where scales vary along K, two more words say how
        (`core.fp8`); the views of both scales have the strides of the caller's tensors then, in a
        transposed problem with rows and columns exchanged.
    weights_ready: no kernel that may still run writes B, so B may be loaded before they have ended.
    sm_carveout: the SMs that are left to other kernels.
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
    weights_ready: bool = False
    sm_carveout: int = 0

    @property
    def columns(self) -> int:
        """The number of columns of B: that of C, or twice that where the epilogue is gated."""
        return 2 * self.N if self.epilogue.gated else self.N

    def resized(self, **sizes: int) -> "Problem":
        """Returns the problem with another M or N, and the same strides."""
        problem = object.__new__(Problem)  # `replace` would take ten times as long
        vars(problem).update(vars(self), **sizes)
        return problem

    def vector(self, operand: str) -> int:
        """Returns the number of elements (a power of two, at most 16 bytes) that one load of
        operand "a" or "b" can move in every row.
        """
        strides, extents = (
            (self.a, (self.M, self.K)) if operand == "a" else (self.b, (self.K, self.N))
        )
        if 1 not in strides[-2:]:
            return 1
        unit = -1 if strides[-1] == 1 else -2
        others = [stride for i, stride in enumerate(strides, start=-len(strides)) if i != unit]
        alignment = min(self.alignment["ab".index(operand)], WIDEST) // self.dtype.itemsize
        return math.gcd(max(alignment, 1), extents[unit], *others)


def check_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, expected a torch.Tensor")
    return value


def check_activation(activation: object) -> str:
    return check_name("activation", activation, epilogue.ACTIVATIONS, " or None", "None or ")


def check_name(name: str, value: object, names: Sequence[str], kind: str, either: str = "") -> str:
    """Returns `value`, which must be one of `names`; "" for None. Raises TypeError or ValueError,
    whose messages add `kind` or `either` to the expectation.
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
    torch.matmul defines it.
    """
    for name, t in ((A, a), (B, b)):
        if t.dim() == 0:
            raise OperandError(f"{name} has 0 dimensions, expected at least 1")
    check_alike(a, b)
    inner_b = b.dim() - 2 if b.dim() > 1 else 0
    if not holds(a.shape[-1] == b.shape[inner_b]):
        raise OperandError(
            f"{A}.shape[{a.dim() - 1}] is {a.shape[-1]} but {B}.shape[{inner_b}] is "
            f"{b.shape[inner_b]}"
        )
    batch_a, batch_b = a.shape[:-2], b.shape[:-2]
    if not all(
        is_one(x) or is_one(y) or holds(x == y)
        for x, y in zip(batch_a[::-1], batch_b[::-1], strict=False)
    ):
        raise OperandError(
            f"{A}.shape[:-2] is {tuple(batch_a)} but {B}.shape[:-2] is {tuple(batch_b)}, "
            "expected batches that broadcast"
        )
    rows = (a.shape[-2],) if a.dim() > 1 else ()
    columns = (b.shape[-1],) if b.dim() > 1 else ()
    return (*_broadcast_shapes(batch_a, batch_b), *rows, *columns)


def check_epilogue_args(
    extra: EpilogueArgs, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Checks the tensors of an epilogue against the shape and dtype of x; returns the output's
    shape.
    """
    result = epilogue.check_columns(extra.activation, shape)
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
        elif not broadcasts(t.shape, wanted):
            raise OperandError(
                f"{name}.shape is {tuple(t.shape)}, expected a shape that broadcasts to "
                f"{tuple(wanted)}"
            )
    return result


def check_addend(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Checks the operands of addmm (2-D a and b, c broadcastable to the product); returns the
    product's shape.
    """
    for name, t in ((A, a), (B, b)):
        if t.dim() != 2:
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2")
    M, N = check_pair(a, b)
    check_alike(a, c, C)
    if not broadcasts(c.shape, (M, N)):
        raise OperandError(
            f"{C}.shape is {tuple(c.shape)}, expected a shape that broadcasts to {(M, N)}"
        )
    return M, N


def check_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> tuple[int, ...]:
    """Checks the operands with `check_pair`, or with `check_addend` where there is a c; returns the
    shape of the product.
    """
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
    if not are_equal(out.shape, shape):
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
    has_known_layout = all(type(n) is int for n in (*out.shape, *out.stride()))
    if has_known_layout and overlaps_itself(out):  # else a run tells
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
    """Returns the dtype of the product: the operands' dtype by default, or float32 if requested for
    16-bit floating operands. Raises for any other dtype.
    """
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
    """Raises OperandError when `out`, which messages call `written`, shares memory with an input.
    Interleaved column slices of one buffer share none.
    """
    if not out.numel() or isinstance(out, FakeTensor):
        return
    out.data_ptr()  # gives a lazy clone its own memory
    start, end = address_range(out)
    for name, t in inputs.items():
        if t is None:
            continue
        low, high = address_range(t)
        if start < high and low < end and share_memory(out, t):
            name = {"a": A, "b": B, "c": C}.get(name, name)
            raise OperandError(f"{written} overlaps {name} in memory, expected separate memory")


def problem(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    scaled: bool = False,
    batch_invariant: bool = False,
    extra: EpilogueArgs | None = None,
    scales: tuple[torch.Tensor, ...] | None = None,
    formats: str = "",
    weights_ready: bool = False,
    power_of_two: bool = False,
) -> Problem:
    """Returns the normal form of a checked call; `c` is the addend of addmm. `scales`: those of A
    and of B, and of an output in fp8.
    """
    extra = extra or EpilogueArgs()
    split = glu_split(extra.activation)
    M, K = (1, a.shape[0]) if a.dim() == 1 else tuple(a.shape[-2:])
    N = 1 if b.dim() == 1 else b.shape[-1] // split
    batch = _broadcast_shapes(a.shape[:-2], b.shape[:-2])
    vectors = a.dim() == 1, b.dim() == 1
    views = [
        _broadcast([0, *a.stride()] if vectors[0] else list(a.stride()), a.shape[:-2], batch),
        _broadcast([*b.stride(), 0] if vectors[1] else list(b.stride()), b.shape[:-2], batch),
        _output_strides(out, out.shape, len(batch), vectors),
    ]
    if c is not None:
        views.append(_strides_over(c, (M, N * split)))
    of_epilogue = _epilogue_tensors(extra, scales, out.shape, formats)
    views += [_output_strides(t, shape, len(batch), vectors) for t, shape in of_epilogue.values()]
    M, batch, strides = _fold_batch(M, *_merge(batch, views) if batch else (batch, views))
    operands = [t for t in (a, b, out, c) if t is not None]
    epilogue_strides = strides[len(operands) :]
    epilogue_views = {
        name: View(of, alignment_of(t))
        for (name, (t, _)), of in zip(of_epilogue.items(), epilogue_strides, strict=True)
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
        alignment=(
            *(alignment_of(t) if alignment_class(t) else LINE for t in (a, b)),
            *map(alignment_of, operands[2:]),
        ),
        tf32=tf32,
        scaled=scaled,
        batch_invariant=batch_invariant,
        weights_ready=weights_ready,
        epilogue=Epilogue(function, split > 1, **epilogue_views, power_of_two=power_of_two),
        formats=formats,
    )


def _output_strides(
    t: torch.Tensor, shape: Sequence[int], batch_dims: int, vectors: tuple[bool, bool]
) -> list[int]:
    """Returns the strides over batch, rows and columns of a tensor that has, or broadcasts to, the
    shape of the output. `vectors` says whether A and B are 1-D, so that the output has no rows or
    no columns.
    """
    strides = _strides_over(t, shape)
    if vectors[0]:
        strides.insert(batch_dims, 0)
    if vectors[1]:
        strides.append(0)
    return strides


def _strides_over(t: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Returns the strides with which a tensor broadcasts to a shape. They are 0 along all but the
    last dimension where it has one element, or no dimension, so that they hold for any number of
    rows; a tensor that has the rows of the shape keeps its strides, even if there is one row.
    """
    strides = list(t.expand(shape).stride())
    added = len(shape) - t.dim()
    if t.dim() > 1 and t.shape[:-1] == tuple(shape[:-1]):
        return strides
    return [
        0 if i < len(shape) - 1 and (i < added or t.shape[i - added] == 1) else stride
        for i, stride in enumerate(strides)
    ]


def _epilogue_tensors(
    extra: EpilogueArgs,
    scales: tuple[torch.Tensor, ...] | None,
    out_shape: Sequence[int],
    formats: str,
) -> dict[str, tuple[torch.Tensor, Sequence[int]]]:
    """Returns the tensors of a call's epilogue by name, each with the shape that it broadcasts to:
    its own, for scales that vary along K.
    """
    split = glu_split(extra.activation)
    x_shape = (*out_shape[:-1], out_shape[-1] * split) if split > 1 else out_shape
    scale_a, scale_b, scale_out = (*(scales or ()), None, None, None)[:3]
    of_a, of_b = x_shape, x_shape
    if scales is not None and fp8.formats(formats).block_a:
        of_a, of_b = (scale.shape for scale in scales[:2])
    known: dict[str, tuple[torch.Tensor | None, Sequence[int]]] = {
        "bias": (extra.bias, x_shape),
        "residual": (extra.residual, out_shape),
        "aux": (extra.aux, x_shape),
        "scale_a": (scale_a, of_a),
        "scale_b": (scale_b, of_b),
        "scale_out": (scale_out, () if scale_out is None else scale_out.shape),
    }
    return {name: (t, shape) for name, (t, shape) in known.items() if t is not None}


def layout_of(problem: Problem) -> str:
    """Returns how A and B are stored, such as "nt". An operand without a unit stride has no
    letter.
    """
    return "".join(
        "n" if column == 1 else "t" if row == 1 else ""
        for row, column in (problem.a[-2:], problem.b[-2:])
    )


def with_row_major_output(problem: Problem) -> tuple[Problem, bool]:
    """Returns a problem whose C is row-major, and whether it is the transposed problem C^T = B^T
    A^T.

    A problem is transposed if its C is column-major. It is returned unchanged if it is gated, or if
    neither the rows nor the columns of C are contiguous.
    """
    stored_by_columns = problem.out[-2] == 1 or problem.M == 1
    swap = not has_row_major_output(problem) and stored_by_columns and not problem.epilogue.gated
    return (transposed(problem) if swap else problem), swap


def transposed(problem: Problem) -> Problem:
    """Returns the problem C^T = B^T A^T. A gated problem cannot be transposed, because its halves
    are columns of B.
    """
    assert not problem.epilogue.gated, "a gated product has no transpose"
    a, b, *others = problem.alignment
    formats = str(fp8.formats(problem.formats).transposed()) if problem.formats else ""
    return replace(
        problem,
        M=problem.N,
        N=problem.M,
        a=transposed_strides(problem.b),
        b=transposed_strides(problem.a),
        c=None if problem.c is None else transposed_strides(problem.c),
        out=transposed_strides(problem.out),
        alignment=(b, a, *others),
        epilogue=problem.epilogue.transposed(),
        formats=formats,
    )


def transposed_strides(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape, or strides, with rows and columns exchanged."""
    return (*extents[:-2], extents[-1], extents[-2])


def has_row_major_output(problem: Problem) -> bool:
    """Returns whether C's rows are contiguous."""
    return problem.out[-1] == 1 or problem.N == 1


def _broadcast_shapes(x: Sequence[int], y: Sequence[int]) -> list[int]:
    """Returns the result of torch.broadcast_shapes, whose first call takes seconds because it
    imports sympy.
    """
    pairs = itertools.zip_longest(x[::-1], y[::-1], fillvalue=1)
    return [n if is_one(m) else m for m, n in pairs][::-1]


def _broadcast(strides: list[int], shape: Sequence[int], batch: list[int]) -> list[int]:
    """Returns the strides of `shape` after broadcasting its batch dimensions to `batch`: batch
    dimensions, rows, columns.
    """
    lead = [0] * (len(batch) - len(shape))
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=False)]
    return lead + own + strides[-2:]


def _merge(batch: list[int], views: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Drops batch dimensions of size 1, and merges adjacent ones that every operand can cover with
    a single stride.
    """
    keep = [i for i, size in enumerate(batch) if size != 1]
    sizes, steps = [batch[i] for i in keep], [[v[i] for i in keep] for v in views]
    for i in range(len(sizes) - 2, -1, -1):
        if all(s[i] == s[i + 1] * sizes[i + 1] for s in steps):
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
            for s in steps:
                del s[i]
    return sizes, [s + v[-2:] for s, v in zip(steps, views, strict=True)]


def _fold_batch(
    M: int, batch: list[int], views: list[list[int]]
) -> tuple[int, list[int], list[tuple[int, ...]]]:
    """Folds batch dimensions that share one B into rows. Returns the new M, the remaining batch
    dimensions, and the strides of each view.
    """
    batch = list(batch)
    while batch and _folds(views, len(batch) - 1, M):
        dim = len(batch) - 1
        rows = [v[dim if M == 1 and i != 1 else dim + 1] for i, v in enumerate(views)]
        views = [[*v[:dim], row, v[-1]] for v, row in zip(views, rows, strict=True)]
        M *= batch.pop()
    return M, batch, [tuple(v) for v in views]


def _folds(views: list[list[int]], dim: int, M: int) -> bool:
    """Returns whether batch dimension `dim` shares one B and continues the rows of the other
    tensors at the same stride (a single row fits any stride).
    """
    a, b, *others = views
    return b[dim] == 0 and all(M == 1 or v[dim] == v[dim + 1] * M for v in (a, *others))
