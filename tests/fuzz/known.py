"""The differences from torch that are meant. docs/migrate.md says of each, under its name, why.

A difference is explained by the first entry whose predicate takes it; entries are narrow, so that
a fault which looks a little different is not.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .compare import Difference

Predicate = Callable[[dict, Difference], bool]
OURS, BOTH = ("only outblas raises",), ("only outblas raises", "another type of error")
TORCHS = ("only torch raises",)


@dataclass(frozen=True)
class Known:
    """`example` is the description of a call that shows the difference, and no other that is not
    listed.
    """

    name: str
    matches: Predicate
    example: dict


def explained(spec: dict, delta: Difference) -> Known | None:
    return next((entry for entry in KNOWN if entry.matches(spec, delta)), None)


def tensor(*shape: int, dtype: str = "float32", **how) -> dict:
    """The description of an ordinary tensor."""
    return {"shape": list(shape), "dtype": dtype, "layout": "contiguous", "seed": 1} | how


def call(name: str, tensors: dict, **how) -> dict:
    return {"call": name, "tensors": tensors} | how


def says(pattern: str, kinds: tuple[str, ...] = OURS, of: tuple[str, ...] = ("",)) -> Predicate:
    """Whether a difference is of some kinds, in calls whose names end so, and begins so."""
    return lambda spec, delta: (
        delta.kind in kinds
        and spec["call"].endswith(of)
        and re.match(pattern, delta.detail) is not None
    )


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
_SUMS = r"\w+: use_fast_accum is True, expected False with scales of blocks"


_REFUSED_BY_SCALED_MM = (
    r"\w+: (Invalid scaling configuration|expected scale_[ab]\.stride|Bias must be size"
    r"|Both scale_a and scale_b must be contiguous|self must be row_major|mat2 must be col_major"
    r"|Expected both dimensions of mat2 to be divisible|Expected self\.size\(1\) to be divisible"
    r"|mat2 shape \(|Expected trailing dimension of mat1|Only multiplication of row-major and "
    r"column-major"
    r"|\(scale_a\.numel\(\) == 1"  # of torch 2.11, on a CPU
    r"|For non-tensorwise scaling, scale tensors must be 2D"  # of fake tensors
    r"|Multiplication of two Float8_e5m2|Bias is not supported when out_dtype"
    r"|CUDA error: CUBLAS_STATUS_NOT_SUPPORTED)"
)


def _unmultiplied(spec: dict, delta: Difference) -> bool:
    no_values = [
        t.get("kind") == "sparse" and t.get("fill") == "zeros" for t in spec["tensors"].values()
    ]
    bools = "bias" in spec["tensors"] and spec["tensors"]["a"]["dtype"] == "bool"
    patterns = [_DTYPES, _SCALARS, *([r"RuntimeError: result type Long can't be"] if bools else [])]
    return (_empty(spec) or any(no_values)) and says("|".join(patterns))(spec, delta)


def _unchecked(spec: dict, delta: Difference) -> bool:
    is_fake = bool(_kinds(spec) & {"fake", "meta"})
    return is_fake and says(f"{_DTYPES}|{_SHAPES}|{_SCALARS}|{_SUMS}")(spec, delta)


def _scaled_more(spec: dict, delta: Difference) -> bool:
    residual = spec["tensors"].get("residual", {"kind": "None"}).get("kind")
    is_plain = "activation" not in spec and residual == "None"
    return is_plain and says(_REFUSED_BY_SCALED_MM, TORCHS, ("scaled_mm",))(spec, delta)


def _weight_of_one_dimension(spec: dict, delta: Difference) -> bool:
    t, refused = spec["tensors"], "mat2 must be a matrix|incorrect dims for mm|expand|b must be 2D"
    is_vector = "b" in t and len(t["b"]["shape"]) - ("in_dims" in spec) <= 1
    return is_vector and "bias" in t and says(f".*({refused})", TORCHS, ("linear",))(spec, delta)


def _mapped_addmm(spec: dict, delta: Difference) -> bool:
    if "vmap" not in spec.get("transform", ""):
        return False
    is_whole = spec["tensors"]["a"]["dtype"] in NUMBERS
    if "c" not in spec["tensors"]:  # where torch's linear of whole numbers is an addmm
        is_added = is_whole and "bias" in spec["tensors"]
        return spec["call"] == "linear" and is_added and delta.kind == "dtype"
    scalars = [spec.get(n, {"kind": "int", "value": 1}) for n in ("alpha", "beta")]
    is_nan = delta.kind == "values" and "torch: nan" in delta.detail
    blas = spec["tensors"]["a"]["dtype"] in ("complex64", "complex128")  # makes numbers of NaN
    is_read = is_nan and (scalars[1]["value"] == 0 or (blas and scalars[0]["kind"] == "nan"))
    promoted = r"\w+: (c|input)\.dtype is torch\.\w+ but |\w+: (c|input)\.shape is .* broadcasts to"
    if is_read or says(promoted)(spec, delta):
        return True
    is_odd = is_whole or any(s["kind"] in ("bool", "complex") for s in scalars)
    refused = ".*(expected a real number|not implemented for|expected a number that torch[.])"
    is_refused = says(refused)(spec, delta) or says(".*alpha", TORCHS)(spec, delta)
    return is_odd and (is_refused or delta.kind in ("dtype", "values"))


def _autocast(spec: dict, delta: Difference) -> bool:
    is_added = any(n in spec["tensors"] for n in ("c", "bias", "residual"))
    wider = "result's dtype is torch.bfloat16, torch: torch.float32"
    fp8 = "RuntimeError: Promotion for Float8 Types is not supported"
    differs = says(wider, ("dtype",))(spec, delta) or says(fp8, TORCHS)(spec, delta)
    return spec.get("setting") == "autocast" and is_added and differs


def _alpha_zero(spec: dict, delta: Difference) -> bool:
    alpha = spec.get("alpha", {})
    is_zero = alpha.get("value") == 0 and alpha.get("kind") not in ("nan", "inf", "None", "complex")
    narrow = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    is_narrow = spec["tensors"]["a"]["dtype"] in narrow and not _on_a_gpu(spec)
    backward = delta.detail.startswith(("gradient of", "second gradient of")) or "transform" in spec
    is_nan = delta.kind == "values" and "torch: nan" in delta.detail
    unread = (is_zero or _empty(spec)) and "c" in spec["tensors"]
    is_minus_zero = delta.detail.endswith("the signs of zeros")
    return (is_nan or is_minus_zero) and unread and (backward or is_narrow)


def _strided_out(spec: dict, delta: Difference) -> bool:
    t = spec["tensors"]
    has_gaps = t.get("out", {}).get("layout", "contiguous") not in ("contiguous", "offset")
    is_batched = max(len(t[name]["shape"]) for name in ("a", "b") if name in t) > 2
    unfolded = ".*(The size of tensor a|doesn't match the broadcast shape)"
    return has_gaps and is_batched and "c" not in t and says(unfolded, TORCHS)(spec, delta)


def _enlarging(spec: dict, delta: Difference) -> bool:
    """Of a gated activation, torch's halves may be those of the bias that enlarges the product."""
    columns = (spec["tensors"].get("bias", {}).get("shape") or [1])[-1]
    is_paired = columns > 1 and columns % 2 == 0
    pairs = r"\w+: activation '\w+' pairs|" if is_paired else ""
    return says(pairs + r"\w+: (bias|residual)\.shape is ")(spec, delta)


def _sparse_row(spec: dict, delta: Difference) -> bool:
    t = spec["tensors"]
    is_row = "out" in t and len(t["a"]["shape"]) == 1 and t["b"].get("kind") == "sparse"
    return is_row and says(".*expand is unsupported for Sparse", TORCHS)(spec, delta)


def _addend_of_sparse(spec: dict, delta: Difference) -> bool:
    is_sparse = "out" in spec["tensors"] and spec["tensors"]["a"].get("kind") == "sparse"
    return is_sparse and says(r"\w+: (c|input)\.dtype is ")(spec, delta)


def _on_a_gpu(spec: dict) -> bool:
    return spec.get("device", "cpu") != "cpu"


def _unread_addend(spec: dict, delta: Difference) -> bool:
    is_unread = _on_a_gpu(spec) and spec.get("beta", {"value": 1})["value"] == 0
    return is_unread and says(r"\w+: (c|input)\.shape is .* broadcasts to")(spec, delta)


def _refused_by_cublas(spec: dict, delta: Difference) -> bool:
    is_line = _on_a_gpu(spec) and 1 in spec["tensors"].get("out", {"shape": []})["shape"]
    refused = "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE"
    return is_line and says(refused, TORCHS, ("addmm", "addmm_out"))(spec, delta)


def _operators(spec: dict, delta: Difference) -> bool:
    is_other = spec["call"].startswith("op.") and bool(_kinds(spec) & {"sparse", "nested"})
    return is_other and says("NotImplementedError", BOTH)(spec, delta)


KNOWN = [
    Known(
        "out of another shape",
        says(r"\w+: (out|aux)\.shape is "),
        call("matmul", {"a": A, "b": B, "out": tensor(2, 2, fill="nan")}),
    ),
    Known(
        "out in the memory of an operand",
        says(r"\w+: (out|aux) overlaps \w+ in memory", BOTH),
        call("matmul", {"a": tensor(4, 4), "b": tensor(4, 4), "out": tensor(4, 4, alias="a")}),
    ),
    Known(
        "out that overlaps itself",
        says(
            r"\w+: (out|aux) has strides .*(elements share memory|elements apart)"
            r"|RuntimeError: unsupported operation: more than one element of the written-to tensor",
            BOTH,
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
        says(r"\w+: (out|aux) is a view that negates or conjugates", BOTH),
        call(
            "matmul",
            {"a": A, "b": B, "bias": tensor(5), "out": tensor(3, 5, lazy="neg", fill="nan")},
        ),
    ),
    Known(
        "out that torch cannot fold",
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
        _sparse_row,
        call(
            "matmul",
            {"a": tensor(4), "b": tensor(4, 5) | {"kind": "sparse"}, "out": tensor(5, fill="nan")},
        ),
    ),
    Known(
        "out of one row on a GPU",
        _refused_by_cublas,
        call(
            "addmm",
            {
                "a": tensor(1, 192, dtype="bfloat16", layout="offset", seed=1006349666),
                "b": tensor(192, 3, dtype="bfloat16", layout="steps", seed=1815354716),
                "c": tensor(
                    3, dtype="bfloat16", layout="transposed", seed=136126495, fill="integers"
                ),
                "out": tensor(
                    1, 3, dtype="bfloat16", layout="transposed", seed=1288700388, fill="nan"
                ),
            },
            device="cuda",
        ),
    ),
    Known(
        "batch_invariant where torch computes",
        says(
            r"\w+: batch_invariant is True, and (torch would take this call|scaled_mm does not)",
            BOTH,
        ),
        call("matmul", {"a": A, "b": B}, setting="batch_invariant"),
    ),
    Known(
        "a named kernel",
        says(r"\w+: kernel '[\w.]+'(:| needs | has no | takes no | does not )", BOTH),
        call(
            "matmul",
            {"a": tensor(3, 4, dtype="float64"), "b": tensor(4, 5, dtype="float64")},
            kernel="portable",
        ),
    ),
    Known(
        "dtypes of an epilogue",
        says(r"\w+: (bias|residual|aux)\.dtype is ", BOTH),
        call("matmul", {"a": A, "b": B, "residual": tensor(3, 5, dtype="float64")}),
    ),
    Known(
        "shapes of an epilogue",
        _enlarging,
        call("matmul", {"a": A, "b": B, "residual": tensor(2, 3, 5)}),
    ),
    Known(
        "a weight of one dimension with a bias",
        _weight_of_one_dimension,
        call("linear", {"a": A, "b": tensor(4), "bias": tensor(1)}),
    ),
    Known(
        "dtypes of empty products",
        _unmultiplied,
        call("matmul", {"a": tensor(2, 3, 0), "b": tensor(2, 0, 4, dtype="float64")}),
    ),
    Known(
        "an addend of another dtype, with a sparse matrix",
        _addend_of_sparse,
        call(
            "addmm",
            {
                "a": A | {"kind": "sparse"},
                "b": B,
                "c": tensor(3, 5, dtype="float64"),
                "out": tensor(3, 5, fill="nan"),
            },
        ),
    ),
    Known(
        "an addend that nobody reads, on a GPU",
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
        _unchecked,
        call(
            "matmul", {"a": A | {"kind": "fake"}, "b": tensor(4, 5, dtype="float64", kind="fake")}
        ),
    ),
    Known(
        "meta tensors beside others",
        says(_DEVICES),
        call("matmul", {"a": A | {"kind": "meta"}, "b": B}),
    ),
    Known(
        "autocast and what is added",
        _autocast,
        call("matmul", {"a": A, "b": B, "residual": C}, setting="autocast"),
    ),
    Known(
        "alpha of 0",
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
        says(r"\w+ is copy-on-write: False, torch: True$", ("fact",)),
        call("matmul", {"a": A | {"kind": "cow"}, "b": B}, kernel="portable"),
    ),
    Known(
        "operators and sparse or nested tensors",
        _operators,
        call("op.matmul", {"a": A | {"kind": "sparse"}, "b": B}),
    ),
    Known(
        "scaled_mm takes more",
        _scaled_more,
        call("scaled_mm", FP8 | {"scale_a": tensor(16, 1, fill="positive")}, out_dtype="bfloat16"),
    ),
    Known(
        "gradients of scaled_mm",
        says(".*derivative for aten::_scaled_mm", ("only torch backward raises",), ("scaled_mm",)),
        call(
            "scaled_mm",
            FP8 | {"bias": tensor(16, dtype="bfloat16")},
            out_dtype="bfloat16",
            gradients={"of": ["bias"], "layout": "contiguous", "seed": 1},
        ),
    ),
    Known(
        "dtypes of scaled_mm",
        says(r"\w+: output_dtype is torch\.\w+, expected one of", BOTH, ("scaled_mm",)),
        call("scaled_mm", FP8, out_dtype="float8_e4m3fn"),
    ),
]
