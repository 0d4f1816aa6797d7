"""Compiles a variant of hopper.gemm, with or without a GPU."""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..core import compile
from ..core.config import (
    SLAB_BYTES,
)
from . import (
    epilogue_store,
    epilogue_tile,
)
from .canonical import _given
from .variant import _ADDED, Variant


def compile_variant(gemm: Any, variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    form = variant.form
    M, K, L = (cute.sym_int() for _ in range(3))
    N = cute.sym_int(divisibility=form.granule(variant.layout, variant.out_dtype.itemsize))
    columns = cute.sym_int() if form.gated else N  # of B

    def tensor(
        dtype: torch.dtype, rows: Any, columns: Any, pair: tuple[Any, Any], divisor: int
    ) -> Any:
        shape, strides = _given((rows, columns), form.transposed), _given(pair, form.transposed)
        if form.batched:
            shape, strides = (L, *shape), (cute.sym_int64(divisibility=divisor), *strides)
        align = divisor * dtype.itemsize
        return make_fake_tensor(compile.NUMERIC[dtype], shape, strides, assumed_align=align)

    def operand(rows: Any, columns: Any, letter: str) -> Any:
        outer = cute.sym_int64(divisibility=8)
        return tensor(variant.dtype, rows, columns, (outer, 1) if letter == "n" else (1, outer), 8)

    a, b = operand(M, K, variant.layout[0]), operand(K, columns, variant.layout[1])

    def like_c(columns: Any, width: int) -> Any:
        """A matrix, or batch of them, of which so many elements of a row or column can be had at
        once.
        """
        outer = cute.sym_int64(divisibility=width)
        pair = (1, outer) if form.by_columns else (outer, 1)
        if width == 1 and not form.by_columns:
            pair = (outer, cute.sym_int64())
        return tensor(variant.out_dtype, M, columns, pair, width)

    def one_by_one(dtype: torch.dtype, shape: tuple[Any, ...], strides: Any) -> Any:
        return make_fake_tensor(
            compile.NUMERIC[dtype], shape, strides, assumed_align=dtype.itemsize
        )

    def added(kind: str, columns: Any, dtype: torch.dtype) -> Any:
        match kind:
            case "":
                return None
            case "one":
                return one_by_one(dtype, (1,), (1,))
            case "staged":
                return like_c(columns, form.width)
            case "columns" | "pairs" | "rows":
                return one_by_one(dtype, (M if kind == "rows" else columns,), (1,))
        lead = (L,) * (kind == "batch")
        shape = (*lead, *_given((M, columns), form.transposed))
        return one_by_one(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    c = like_c(N, form.width)
    dtypes = [torch.float32 if "scale" in name else variant.out_dtype for name in _ADDED]
    extra = [
        added(getattr(form, name), N if name == "residual" else columns, dtype)
        for name, dtype in zip(_ADDED, dtypes, strict=True)
    ]
    table = compile.compact(cutlass.Int32, 1) if form.ordered else None
    split = variant.config.split
    sums = compile.compact(cutlass.Float32, 1) if split else None
    counters = compile.compact(cutlass.Int32, 1) if split else None
    scalars = cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1.0), cutlass.Float32(0.0)
    gemm.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    built = gemm(variant.config, form)
    with compile.target_arch():
        return cute.compile(
            built,
            a,
            b,
            c,
            table,
            *extra,
            sums,
            counters,
            *scalars,
            stream,
            options=f"{compile.OPTIONS} {options}",
        )


def shared_memory(gemm: Any, variant: Variant) -> int:
    """Bytes of one CTA: of slabs of C only those that do not lie over the ring, narrow ones as they
    are.
    """
    config, form, dtype = variant.config, variant.form, compile.NUMERIC[variant.out_dtype]
    stored = gemm(config, form).stored
    slab = 64 * epilogue_tile.slab_columns(stored, dtype) * variant.out_dtype.itemsize
    own = slab if form.staged and not epilogue_store.over_ring(stored, dtype, form) else 0
    return config.shared_memory_bytes - config.consumers * config.store_buffers * (SLAB_BYTES - own)
