"""The portable kernel of grouped products, compiled without a GPU."""

from typing import Any

import triton

from outblas.base.compat.triton_private import ASTSource, CompiledKernel, GPUTarget
from outblas.call.epilogue import EPILOGUE_ARGS
from outblas.call.grouped import GroupedProblem, GroupedTensors
from outblas.device import language, launch
from outblas.kernels import grouped
from outblas.kernels.grouped_device import GroupedPointers


def compile_for(problem: GroupedProblem, tile: grouped.Block, arch: int) -> CompiledKernel:
    """Compiles the kernel of a product for an architecture (90 is sm_90), with 16-byte vectors.
    Needs no GPU, and loads nothing onto one.
    """
    kernel = grouped._KERNELS[problem.form]
    constants: dict[tuple[int, ...], Any] = {(4,): grouped.traits(problem, tile, "ieee", arch=arch)}
    divisors: dict[tuple[int, ...], Any] = {}
    types: list[Any] = []
    of_scales = GroupedTensors(scale_a="*fp32", scale_b="*fp32")  # type: ignore[arg-type]
    records = (
        _pointer_types(problem),
        grouped.sizes(problem),
        grouped.strides(problem),
        grouped.scales(problem, of_scales),
    )
    for i, record in enumerate(records):
        if record is None:
            constants[(i,)] = None
            types.append("constexpr")
            continue
        kinds: list[str] = []
        for j, value in enumerate(record):
            if value is None or value == 1:
                constants[i, j] = value
                kinds.append("constexpr")
                continue
            if isinstance(value, str) or value % 16 == 0:
                divisors[i, j] = [["tt.divisibility", 16]]
            kinds.append(value if isinstance(value, str) else "i32")
        types.append(type(record)(*kinds))
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    with language.lock:
        source = ASTSource(kernel, signature, constants, divisors)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _pointer_types(problem: GroupedProblem) -> GroupedPointers:
    """Returns the types of a product's tensors; None for those that it does not have."""
    dtype = "*u8" if problem.scales is not None else launch.TYPES[problem.dtype]
    out_dtype = launch.TYPES[problem.out_dtype]
    views = problem.epilogue.views
    bias, residual, aux = (out_dtype if name in views else None for name in EPILOGUE_ARGS)
    return GroupedPointers(
        a=dtype,
        b=dtype,
        out=out_dtype,
        offs="*i32",
        bias=bias,
        residual=residual,
        aux=aux,
        a_index="*i32" if problem.gathers else None,
        scatter_index="*i32" if problem.scatters else None,
        scatter_weights="*fp32" if problem.weighted else None,
    )
