"""A kernel and the call that it is compiled for, as described in a snapshot of machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..core import fp8, registry
from ..core.configs import from_text
from ..core.shapes import LAYOUTS
from .inspection import compilable

if TYPE_CHECKING:
    import torch

    from ..core.artifact import Artifact
    from ..core.problem import Problem

ACTIVATION_BACKWARD = "activation_backward"  # a kernel that is not on a ladder
_VECTORS = ("row", "column")
_MATRICES = ("rows", "columns")
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """What to compile. All fields except `kernel` and `arch` default to those of a plain call.

    `kernel` is a name of the registry, or "activation_backward". `arch` is 75, 80 or 90. `config`
    is the text of a config ("tile_m=128"), "" for the kernel's choice. `dtype`, `out_dtype` ("":
    the same as `dtype`), `layout` and `shape` (M, N, K) describe the product, `batch` holds the
    extents of leading dimensions, and `tf32` allows tf32 products.

    `out` is the layout of the output: by "rows", by "columns", or "strided", without a contiguous
    dimension. `alignment` holds bytes that divide the addresses of A, B and the output; if empty,
    these are whole cache lines, and 16 bytes.

    Epilogue: `scaled` means that alpha is not 1. `addend` is C of `addmm`, `bias`, `residual` and
    `aux` are tensors of the epilogue, and `activation` is one of `epilogue.ACTIVATIONS`. A tensor
    is "" for none, a "row" or a "column" that broadcasts, or a matrix by "rows" or by "columns";
    `aux`, which is written, is a matrix.

    `formats` are those of fp8 operands, "e4m3 e5m2" or "e4m3 e5m2 promoted". Their scales `scale_a`
    and `scale_b` are "one" for the whole tensor, or a "column" of A's rows and a "row" of B's
    columns; with formats such as "e4m3 e4m3 promoted 1x128 128x128" they vary along K. `dtype` is
    bfloat16 then. With formats `out_dtype` may be "float8_e4m3fn": the output has scales of 128
    columns of a row then, powers of two where `power_of_two`, and tensors of the epilogue are
    float32.
    """

    kernel: str
    arch: int
    config: str = ""
    dtype: str = "bfloat16"
    out_dtype: str = ""
    layout: str = "nt"
    shape: tuple[int, ...] = (4096, 4096, 4096)
    batch: tuple[int, ...] = ()
    tf32: bool = False
    out: str = "rows"
    alignment: tuple[int, ...] = ()
    scaled: bool = False
    addend: str = ""
    activation: str = ""
    bias: str = ""
    residual: str = ""
    aux: str = ""
    formats: str = ""
    scale_a: str = "one"
    scale_b: str = "one"
    power_of_two: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the fields that differ from a plain call's, as JSON values."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        changed = {name: value for name, (value, default) in values.items() if value != default}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in changed.items()
        }


def from_record(record: Mapping[str, Any]) -> KernelVariant:
    """Returns the variant that a JSON record describes. Raises ValueError for an invalid field or
    value.
    """
    known = {f.name: f for f in fields(KernelVariant)}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name not in known:
            raise ValueError(f"has the field {name!r}, expected one of: {', '.join(known)}")
        values[name] = tuple(value) if isinstance(value, list) else value
        kind = {"str": str, "int": int, "bool": bool}.get(str(known[name].type), tuple)
        if type(values[name]) is not kind:
            expected = "a list of numbers" if kind is tuple else kind.__name__
            raise ValueError(f"has {name} {value!r}, expected {expected}")
        if kind is tuple and not all(type(number) is int and number > 0 for number in values[name]):
            raise ValueError(f"has {name} {value!r}, expected a list of numbers, each at least 1")
    if missing := [name for name in ("kernel", "arch") if name not in values]:
        raise ValueError(f"lacks {' and '.join(missing)}")
    return _checked(KernelVariant(**values))


def _checked(variant: KernelVariant) -> KernelVariant:
    """Returns the variant if it is valid. Raises ValueError for an unknown kernel, architecture or
    word.
    """
    from ..core.epilogue import ACTIVATIONS

    archs = compilable(
        registry.find("portable" if variant.kernel == ACTIVATION_BACKWARD else variant.kernel)
    )
    if variant.arch not in archs:
        raise ValueError(
            f"arch is {variant.arch}, expected {' or '.join(map(str, archs))} for {variant.kernel}"
        )
    if len(variant.shape) != 3 or len(variant.alignment) not in (0, 3):
        raise ValueError(
            f"shape is {variant.shape} and alignment {variant.alignment}, expected three numbers"
        )
    if variant.batch and variant.addend:
        raise ValueError(
            "batch and addend were both given, expected one of them: addmm takes matrices"
        )
    dtypes = ("bfloat16", "float16", "float32")
    allowed: dict[str, tuple[str, ...]] = {
        "dtype": dtypes,
        "out_dtype": ("", *dtypes, *((FP8,) if variant.formats else ())),
        "layout": LAYOUTS,
        "out": (*_MATRICES, "strided"),
        "addend": ("", *_VECTORS, *_MATRICES),
        "activation": ("", *ACTIVATIONS),
        "bias": ("", *_VECTORS, *_MATRICES),
        "residual": ("", *_VECTORS, *_MATRICES),
        "aux": ("", *_MATRICES),
        "scale_a": ("one", "column"),
        "scale_b": ("one", "row"),
    }
    for name, words in allowed.items():
        if getattr(variant, name) not in words:
            expected = ", ".join(filter(None, words))
            raise ValueError(f"{name} is {getattr(variant, name)!r}, expected one of: {expected}")
    return variant


def compile_variant(variant: KernelVariant) -> Artifact:
    """Compiles the kernel, without a GPU.

    Raises ValueError for a config or a call that the kernel does not support, ImportError when its
    DSL is not installed.
    """
    if variant.kernel == ACTIVATION_BACKWARD:
        return _activation_backward(variant)
    module = registry.load(variant.kernel)
    config = from_text(module.Config, variant.config) if variant.config else None
    artifact: Artifact = module.artifact(
        config, arch=variant.arch, layout=variant.layout, problem=problem(variant)
    )
    return artifact


def problem(variant: KernelVariant) -> Problem:
    """Returns the call in normal form, with tensors on the meta device."""
    import torch

    from ..core import epilogue, quantization
    from ..core import problem as operands

    M, N, K = variant.shape
    dtype = getattr(torch, variant.dtype)
    out_dtype = getattr(torch, variant.out_dtype or variant.dtype)
    is_quantized = variant.out_dtype == FP8
    of_epilogue = torch.float32 if is_quantized else out_dtype
    columns = N * epilogue.glu_split(variant.activation)  # of B, C, bias and aux
    terms = K // 2 if variant.formats else K  # two fp8 values are one of 16 bits

    def matrix(rows: int, columns: int, how: str, kind: torch.dtype) -> torch.Tensor:
        return _matrix((*variant.batch, rows, columns), how, kind)

    def extra(how: str, columns: int) -> torch.Tensor | None:
        match how:
            case "":
                return None
            case "row":
                return torch.empty(columns, dtype=of_epilogue, device="meta")
            case "column":
                return torch.empty(M, 1, dtype=of_epilogue, device="meta")
        return matrix(M, columns, how, of_epilogue)

    scales: tuple[torch.Tensor, ...] | None = None
    if variant.formats:
        scales = _scales(variant, M, columns)
    if scales and is_quantized:
        scales += (quantization.empty_scales((M, N), "1x128", torch.device("meta")),)
    added = extra(variant.addend, columns)
    made = operands.problem(
        matrix(M, terms, "columns" if variant.layout[0] == "t" else "rows", dtype),
        matrix(terms, columns, "columns" if variant.layout[1] == "t" else "rows", dtype),
        matrix(M, N, variant.out, out_dtype),
        added,
        tf32=variant.tf32,
        scaled=variant.scaled or added is not None,
        extra=epilogue.EpilogueArgs(
            variant.activation,
            bias=extra(variant.bias, columns),
            residual=extra(variant.residual, N),
            aux=extra(variant.aux, columns),
        ),
        scales=scales,
        formats=variant.formats,
        power_of_two=variant.power_of_two,
    )
    return (
        replace(made, alignment=(*variant.alignment, *made.alignment[3:]))
        if variant.alignment
        else made
    )


def _scales(variant: KernelVariant, M: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales of fp8 operands on the meta device; in those that vary along K
    the blocks of A's rows are neighbours, and the blocks of K of B's columns.
    """
    import torch

    formats = fp8.formats(variant.formats)
    if formats.block_a:
        blocks = -(-variant.shape[2] // fp8.BLOCK)
        scale_a = torch.empty(blocks, -(-M // formats.block_a), device="meta").t()
        scale_b = torch.empty(-(-columns // formats.block_b), blocks, device="meta").t()
        return scale_a, scale_b
    one = torch.empty((), device="meta")
    return (
        one if variant.scale_a == "one" else torch.empty(M, 1, device="meta"),
        one if variant.scale_b == "one" else torch.empty(1, columns, device="meta"),
    )


def _matrix(shape: tuple[int, ...], how: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the meta device whose matrices lie by "rows", by "columns", or
    "strided".
    """
    import torch

    *batch, rows, columns = shape
    if how == "columns":
        return torch.empty(*batch, columns, rows, dtype=dtype, device="meta").mT
    if how == "strided":
        return torch.empty(*batch, rows, 2 * columns, dtype=dtype, device="meta")[..., ::2]
    return torch.empty(*batch, rows, columns, dtype=dtype, device="meta")


def _activation_backward(variant: KernelVariant) -> Artifact:
    """Compiles the gradient of an activation, for contiguous tensors."""
    import torch

    from ..core.artifact import Artifact, cta_threads
    from ..core.epilogue import GATED
    from ..device.launch import TYPES
    from ..kernels.activation import BLOCK, compile_for

    gated = variant.activation in GATED
    function = GATED.get(variant.activation, variant.activation)
    divisors = (
        16,
        16,
        16,
        16,
    )  # of the addresses of grad and x, the number of elements, and that of columns
    compiled = compile_for(
        (function, gated, False, TYPES[getattr(torch, variant.dtype)], divisors), variant.arch
    )
    ptx = compiled.asm["ptx"]
    return Artifact(
        kernel=variant.kernel,
        arch=f"sm_{variant.arch}",
        config="",
        dtype=variant.dtype,
        out_dtype=variant.dtype,
        layout=variant.layout,
        cubin=compiled.asm["cubin"],
        ptx=ptx,
        log="",
        threads=cta_threads(ptx),
        smem_bytes=compiled.metadata.shared,
        stages=1,
        tile=(1, BLOCK, 1),
    )
