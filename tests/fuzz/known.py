"""The differences from torch that are meant. docs/migrate.md has the same list, for people.

A difference is explained by the first entry whose predicate takes it; entries are narrow, so that
a fault which looks a little different is not.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .calls import Outcome, described
from .compare import Difference

Predicate = Callable[[dict, Outcome, Outcome, Difference], bool]


@dataclass(frozen=True)
class Known:
    """`example` is the description of a call that shows the difference, and no other that is not
    listed.
    """

    name: str
    reason: str
    matches: Predicate
    example: dict


def explained(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> Known | None:
    return next((entry for entry in KNOWN if entry.matches(spec, ours, theirs, found)), None)


def tensor(*shape: int, dtype: str = "float32", **how) -> dict:
    """The description of an ordinary tensor."""
    return {"shape": list(shape), "dtype": dtype, "layout": "contiguous", "seed": 1} | how


def call(name: str, tensors: dict, **how) -> dict:
    return {"call": name, "tensors": tensors} | how


def raises(pattern: str, *, torch_too: bool = False) -> Predicate:
    """outblas alone raises this, or with `torch_too` torch raises something else, of
    another type.
    """
    kinds = (
        ("only outblas raises", "another type of error") if torch_too else ("only outblas raises",)
    )

    def matches(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
        return found.kind in kinds and bool(re.match(pattern, described(ours.error)))

    return matches


A, B, C = tensor(3, 4), tensor(4, 5), tensor(3, 5)
F8A = tensor(16, 32, dtype="float8_e4m3fn")
F8B = tensor(32, 16, dtype="float8_e4m3fn", layout="transposed")
ONE = tensor(1, fill="positive")
FP8 = {"a": F8A, "b": F8B, "scale_a": ONE, "scale_b": ONE}
NUMBERS = "int64", "int32", "int8", "uint8", "bool"


def _kinds(spec: dict) -> set[str]:
    return {t.get("kind", "") for t in spec["tensors"].values()}


def _empty(spec: dict) -> bool:
    return any(0 in t["shape"] for t in spec["tensors"].values())


# Operands are called by the names of their functions.
_DTYPES = r"\w+: \w+\.dtype is torch\.\w+ but \w+\.dtype|\w+: \w+ is torch\.\w+ on [\w:]+, expected"
_DEVICES = (
    r"\w+: \w+ is on (meta but \w+ is on (cpu|cuda:\d)|(cpu|cuda:\d) but \w+ is on meta)"
    r"|\w+: \w+ is torch\.\w+ on (meta|cpu|cuda:\d), expected"
)
_SCALARS = (
    r"\w+: (alpha|beta) is .*, expected (a real number for operands of|a number that "
    r"float32 can hold)"
)
_SHAPES = r"\w+: (c|input)\.shape is |\w+: (a|input|mat1)\.shape\[1\] is "


_REFUSED_BY_SCALED_MM = (
    r"\w+: (Invalid scaling configuration|expected scale_[ab]\.stride|Bias must be size"
    r"|Both scale_a and scale_b must be contiguous|self must be row_major|mat2 must be col_major"
    r"|Expected both dimensions of mat2 to be divisible|Expected self\.size\(1\) to be divisible"
    r"|mat2 shape \(|Expected trailing dimension of mat1|Only multiplication of row-major and "
    r"column-major"
    r"|\(scale_a\.numel\(\) == 1"  # of torch 2.11, on a CPU
    r"|Multiplication of two Float8_e5m2|Bias is not supported when out_dtype"
    r"|CUDA error: CUBLAS_STATUS_NOT_SUPPORTED)"
)


def _unmultiplied(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    nothing = any(
        t.get("kind") == "sparse" and t.get("fill") == "zeros" for t in spec["tensors"].values()
    )
    return (_empty(spec) or nothing) and raises(f"{_DTYPES}|{_SCALARS}")(spec, ours, theirs, found)


def _unchecked(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    fake = bool(_kinds(spec) & {"fake", "meta"})
    return fake and raises(f"{_DTYPES}|{_SHAPES}|{_SCALARS}")(spec, ours, theirs, found)


def _scaled(spec: dict, kind: str, pattern: str, found: Difference) -> bool:
    return (
        spec["call"].endswith("scaled_mm")
        and found.kind == kind
        and bool(re.match(pattern, found.detail))
    )


def _mapped_addmm(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    if "vmap" not in spec.get("transform", ""):
        return False
    if (
        "c" not in spec["tensors"]
    ):  # torch's linear of numbers that are not floating-point is an addmm there
        whole = spec["tensors"]["a"]["dtype"] in NUMBERS and "bias" in spec["tensors"]
        return spec["call"] == "linear" and whole and found.kind == "dtype"
    scalars = [spec.get(n, {"kind": "int", "value": 1}) for n in ("alpha", "beta")]
    odd = spec["tensors"]["a"]["dtype"] in NUMBERS or any(
        s["kind"] in ("bool", "complex") for s in scalars
    )
    refused = found.kind == "only torch raises" and "alpha" in found.detail
    refused = refused or (
        found.kind == "only outblas raises" and "expected a real number" in found.detail
    )
    refused = refused or (
        found.kind == "only outblas raises" and "not implemented for" in found.detail
    )
    refused = refused or (
        found.kind == "only outblas raises" and "expected a number that torch." in found.detail
    )
    read = found.kind == "values" and scalars[1]["value"] == 0 and "torch: nan" in found.detail
    promoted = r"\w+: (c|input)\.dtype is torch\.\w+ but |\w+: (c|input)\.shape is .* broadcasts to"
    return (
        read
        or raises(promoted)(spec, ours, theirs, found)
        or (odd and (refused or found.kind in ("dtype", "values")))
    )


def _autocast(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    added = any(n in spec["tensors"] for n in ("c", "bias", "residual"))
    wider = found.detail.startswith("result's dtype is torch.bfloat16, torch: torch.float32")
    return spec.get("setting") == "autocast" and added and found.kind == "dtype" and wider


def _alpha_zero(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    alpha = spec.get("alpha", {})
    none = alpha.get("value") == 0 and alpha.get("kind") not in ("nan", "inf", "None", "complex")
    backward = found.detail.startswith(("gradient of", "second gradient of")) or "transform" in spec
    narrow = spec["tensors"]["a"]["dtype"] in ("bfloat16", "float16")
    return (
        (backward or (narrow and spec.get("device", "cpu") == "cpu"))
        and (none or _empty(spec))
        and "c" in spec["tensors"]
        and found.kind == "values"
        and "torch: nan" in found.detail
    )


def _strided_out(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    out = spec["tensors"].get("out", {})
    gaps = out.get("layout", "contiguous") not in ("contiguous", "offset")
    batched = max(len(t["shape"]) for name, t in spec["tensors"].items() if name in ("a", "b")) > 2
    return (
        gaps
        and batched
        and "c" not in spec["tensors"]
        and found.kind == "only torch raises"
        and bool(re.search("The size of tensor a|doesn't match the broadcast shape", found.detail))
    )


def _enlarging(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    """Of a gated activation, torch's halves may be those of the bias that enlarges the product."""
    columns = (spec["tensors"].get("bias", {}).get("shape") or [1])[-1]
    paired = (
        columns > 1
        and columns % 2 == 0
        and raises(r"\w+: activation '\w+' pairs")(spec, ours, theirs, found)
    )
    return paired or raises(r"\w+: (bias|residual)\.shape is ")(spec, ours, theirs, found)


def _sparse_row(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    t = spec["tensors"]
    row = "out" in t and len(t["a"]["shape"]) == 1 and t["b"].get("kind") == "sparse"
    return (
        row
        and found.kind == "only torch raises"
        and "expand is unsupported for Sparse" in found.detail
    )


def _on_a_gpu(spec: dict) -> bool:
    return spec.get("device", "cpu") != "cpu"


def _unread_addend(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    unread = spec.get("beta", {"value": 1})["value"] == 0
    return (
        _on_a_gpu(spec)
        and unread
        and raises(r"\w+: (c|input)\.shape is .* broadcasts to")(spec, ours, theirs, found)
    )


def _refused_by_cublas(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    return (
        _on_a_gpu(spec)
        and spec["call"].endswith(("addmm", "addmm_out"))
        and 1 in spec["tensors"].get("out", {"shape": []})["shape"]
        and found.kind == "only torch raises"
        and found.detail.startswith("RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE")
    )


def _operators(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
    other = spec["call"].startswith("op.") and _kinds(spec) & {"sparse", "nested"}
    return bool(other) and raises("NotImplementedError", torch_too=True)(spec, ours, theirs, found)


KNOWN = [
    Known(
        "out of another shape",
        "torch resizes an out of the wrong shape, and warns that it will stop doing so. outblas "
        "refuses it.",
        raises(r"\w+: (out|aux)\.shape is "),
        call("matmul", {"a": A, "b": B, "out": tensor(2, 2, fill="nan")}),
    ),
    Known(
        "out in the memory of an operand",
        "torch writes to an out that shares memory with a tensor that it still reads, and the "
        "result is undefined. outblas refuses it, with one exception: addmm(c, a, b, out=c).",
        raises(r"\w+: (out|aux) overlaps \w+ in memory", torch_too=True),
        call("matmul", {"a": tensor(4, 4), "b": tensor(4, 4), "out": tensor(4, 4, alias="a")}),
    ),
    Known(
        "out that overlaps itself",
        "torch refuses some outputs in which two elements share memory, and accepts others: "
        "empty products, and results that it computes elsewhere first. outblas refuses them all.",
        raises(
            r"\w+: (out|aux) has strides .*(elements share memory|elements apart)"
            r"|RuntimeError: unsupported operation: more than one element of the written-to tensor",
            torch_too=True,
        ),
        call(
            "matmul",
            {
                "a": tensor(2, 3, 0),
                "b": tensor(0, 5),
                "out": tensor(2, 3, 5, layout="expanded", seed=7),
            },
        ),
    ),
    Known(
        "out that negates or conjugates, with an epilogue",
        "matmul and addmm write to a view made by torch.conj or torch._neg_view. Together with "
        "bias, activation, residual or aux, outblas refuses such a view.",
        raises(r"\w+: (out|aux) is a view that negates or conjugates", torch_too=True),
        call(
            "matmul",
            {"a": A, "b": B, "bias": tensor(5), "out": tensor(3, 5, lazy="neg", fill="nan")},
        ),
    ),
    Known(
        "out that torch cannot fold",
        "torch.matmul folds a batch times one matrix into a two-dimensional product, and fails "
        "if the strides of out do not allow the same folding. outblas writes to any strides.",
        _strided_out,
        call(
            "matmul",
            {
                "a": tensor(5, 2, 0),
                "b": tensor(0, 8),
                "out": tensor(5, 2, 8, layout="steps", seed=1451584461),
            },
        ),
    ),
    Known(
        "out of a vector times a sparse matrix",
        "torch.matmul multiplies a vector by a sparse matrix, but fails if it is given an out. "
        "outblas writes the result to it.",
        _sparse_row,
        call(
            "matmul",
            {"a": tensor(4), "b": tensor(4, 5) | {"kind": "sparse"}, "out": tensor(5, fill="nan")},
        ),
    ),
    Known(
        "out of one row on a GPU",
        "torch.addmm hands the strides of an out of one row or column to cuBLAS as they are, and "
        "cuBLAS refuses some of them (torch 2.11). outblas writes to any strides.",
        _refused_by_cublas,
        call(
            "addmm",
            {
                "a": tensor(1, 192, layout="offset", seed=1006349666),
                "b": tensor(192, 3, layout="steps", seed=1815354716),
                "c": tensor(3, layout="transposed", seed=136126495, fill="integers"),
                "out": tensor(1, 3, layout="transposed", seed=1288700388, fill="nan"),
            },
            device="cuda",
        ),
    ),
    Known(
        "batch_invariant where torch computes",
        "torch makes no such promise. A call that asks for batch invariance raises where outblas "
        "would hand it to torch, and scaled_mm raises within outblas.batch_invariant(), so that "
        "nobody relies on the promise in vain.",
        raises(
            r"\w+: batch_invariant is True, and (torch would take this call|scaled_mm does not)",
            torch_too=True,
        ),
        call("matmul", {"a": A, "b": B}, setting="batch_invariant"),
    ),
    Known(
        "a named kernel",
        "A call that names a kernel never falls back to torch: it raises an error that says what "
        "the kernel needs.",
        raises(r"\w+: kernel '[\w.]+'(:| needs | has no | takes no | does not )", torch_too=True),
        call(
            "matmul",
            {"a": tensor(3, 4, dtype="float64"), "b": tensor(4, 5, dtype="float64")},
            kernel="portable",
        ),
    ),
    Known(
        "dtypes of an epilogue",
        "bias, residual and aux have the dtype of the product, because they are added before it "
        "is rounded. torch would promote the sum to the wider dtype.",
        raises(r"\w+: (bias|residual|aux)\.dtype is ", torch_too=True),
        call("matmul", {"a": A, "b": B, "residual": tensor(3, 5, dtype="float64")}),
    ),
    Known(
        "shapes of an epilogue",
        "bias and residual broadcast to the product and never enlarge it, as in torch.addmm. A "
        "sum of two torch tensors broadcasts both ways.",
        _enlarging,
        call("matmul", {"a": A, "b": B, "residual": tensor(2, 3, 5)}),
    ),
    Known(
        "a weight of one dimension with a bias",
        "torch.nn.functional.linear accepts a weight of shape (K) only without a bias. "
        "outblas.linear accepts it with any epilogue.",
        lambda spec, ours, theirs, found: (
            spec["call"] == "linear"
            and len(spec["tensors"]["b"]["shape"]) - ("in_dims" in spec) <= 1
            and "bias" in spec["tensors"]
            and found.kind == "only torch raises"
            and bool(
                re.search(
                    "mat2 must be a matrix|incorrect dims for mm|expand|b must be 2D", found.detail
                )
            )
        ),
        call("linear", {"a": A, "b": tensor(4), "bias": tensor(1)}),
    ),
    Known(
        "dtypes of empty products",
        "torch compares dtypes when it multiplies. It therefore accepts operands of different "
        "dtypes if there is nothing to multiply (a sparse matrix without elements included), and "
        "an alpha or beta that the dtype cannot hold. outblas always refuses them.",
        _unmultiplied,
        call("matmul", {"a": tensor(2, 3, 0), "b": tensor(2, 0, 4, dtype="float64")}),
    ),
    Known(
        "an addend that nobody reads, on a GPU",
        "With beta = 0, torch does not look at the shape of the addend of addmm on a GPU, although "
        "it does on a CPU. outblas checks it on both.",
        _unread_addend,
        call(
            "addmm",
            {"a": A, "b": B, "c": tensor(2, 2)},
            beta={"kind": "zero", "value": 0},
            device="cuda",
        ),
    ),
    Known(
        "checks of fake and meta tensors",
        "torch checks less of fake and meta tensors than of real ones: it does not compare "
        "dtypes, the shape of the addend of addmm, or the inner sizes of _scaled_mm. outblas "
        "makes the same checks for all tensors.",
        _unchecked,
        call(
            "matmul", {"a": A | {"kind": "fake"}, "b": tensor(4, 5, dtype="float64", kind="fake")}
        ),
    ),
    Known(
        "meta tensors beside others",
        "torch multiplies a meta tensor with a tensor that has memory. outblas requires all "
        "operands on one device.",
        raises(_DEVICES),
        call("matmul", {"a": A | {"kind": "meta"}, "b": B}),
    ),
    Known(
        "autocast and what is added",
        "Under autocast outblas casts the addend of addmm, bias and residual to the dtype of the "
        "product, which is the dtype of the result. torch adds a float32 tensor to a bfloat16 "
        "product in float32.",
        _autocast,
        call("matmul", {"a": A, "b": B, "residual": C}, setting="autocast"),
    ),
    Known(
        "alpha of 0",
        "With alpha = 0, or if there is nothing to multiply, outblas does not compute the "
        "product, and the gradients of its operands are 0. torch multiplies by alpha in the "
        "backward pass, and on a CPU in products of 16-bit operands, which lets NaN and infinity "
        "through.",
        _alpha_zero,
        call(
            "addmm",
            {"a": A, "b": B, "c": C},
            alpha={"kind": "zero", "value": 0},
            beta={"kind": "nan", "value": 0},
            transform="grad",
            of=["a"],
        ),
    ),
    Known(
        "vmap of addmm",
        "Under torch.func.vmap torch computes addmm, and linear with a bias, by other operators. "
        "These promote integers and an addend of another dtype, let the addend enlarge the "
        "product, refuse float or bool values of alpha and beta that torch.addmm accepts, and "
        "read the addend even if beta = 0. In outblas vmap changes none of this.",
        _mapped_addmm,
        call(
            "addmm",
            {
                "a": tensor(2, 3, 4, dtype="int32"),
                "b": tensor(4, 5, dtype="int32"),
                "c": tensor(5, dtype="int32"),
            },
            beta={"kind": "float", "value": 2.0},
            transform="vmap",
            in_dims={"a": 0, "b": None, "c": None},
        ),
    ),
    Known(
        "operands that are lazy clones",
        "A kernel takes the address of its operands, and a lazy clone (torch._lazy_clone) gets "
        "its own memory when its address is taken. torch's products leave operands shared that "
        "they only read. The values are the same; the copy costs time.",
        lambda spec, ours, theirs, found: (
            found.kind == "fact"
            and bool(re.fullmatch(r"\w+ is copy-on-write: False, torch: True", found.detail))
            and ours.error is None
        ),
        call("matmul", {"a": A | {"kind": "cow"}, "b": B}, kernel="portable"),
    ),
    Known(
        "operators and sparse or nested tensors",
        "The operators torch.ops.outblas.* accept strided tensors only. The functions of outblas "
        "hand sparse and nested tensors to torch.",
        _operators,
        call("op.matmul", {"a": A | {"kind": "sparse"}, "b": B}),
    ),
    Known(
        "scaled_mm takes more",
        "torch._scaled_mm requires sizes in multiples of 16, contiguous scales and one layout of "
        "each operand; torch 2.11 on a CPU also requires a single scale for each operand. "
        "outblas.scaled_mm copies operands of other layouts, and accepts any size and any bias "
        "that broadcasts. It accepts scales of 128x128 for both operands, which torch does not, "
        "and computes scales of blocks on every device; use_fast_accum=True is an error with them.",
        lambda spec, ours, theirs, found: (
            _scaled(spec, "only torch raises", _REFUSED_BY_SCALED_MM, found)
            and not (
                "activation" in spec
                or spec["tensors"].get("residual", {"kind": "None"}).get("kind") != "None"
            )
        ),
        call("scaled_mm", FP8 | {"scale_a": tensor(16, 1, fill="positive")}, out_dtype="bfloat16"),
    ),
    Known(
        "gradients of scaled_mm",
        "torch._scaled_mm has no gradients, and its backward pass raises. outblas.scaled_mm has "
        "gradients of bias and residual.",
        lambda spec, ours, theirs, found: _scaled(
            spec, "only torch backward raises", ".*derivative for aten::_scaled_mm", found
        ),
        call(
            "scaled_mm",
            FP8 | {"bias": tensor(16, dtype="bfloat16")},
            out_dtype="bfloat16",
            gradients={"of": ["bias"], "layout": "contiguous", "seed": 1},
        ),
    ),
    Known(
        "dtypes of scaled_mm",
        "outblas.scaled_mm returns bfloat16 (the default), float16 or float32. torch._scaled_mm "
        "also returns fp8, which is its default.",
        lambda spec, ours, theirs, found: (
            spec["call"].endswith("scaled_mm")
            and raises(r"\w+: out_dtype is torch\.\w+, expected one of", torch_too=True)(
                spec, ours, theirs, found
            )
        ),
        call("scaled_mm", FP8, out_dtype="float8_e4m3fn"),
    ),
]
