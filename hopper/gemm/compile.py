"""Compiles a variant of `hopper.gemm`, with or without a GPU."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from outblas.hopper.gemm import epilogue_store, epilogue_tile
from outblas.hopper.gemm.canonical import view_of_caller
from outblas.hopper.gemm.variant import EPILOGUE_TENSORS, Variant
from outblas.hopper.parts import compile
from outblas.hopper.parts.config import SUBTILE_BYTES, stage_scales


def compile_variant(gemm: Any, variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    arguments = _GemmArguments.of(variant)
    tensors = [arguments.operand("a"), arguments.operand("b"), arguments.output(arguments.N)]
    table = compile.compact(cutlass.Int32, 1) if variant.traits.ordered else None
    epilogue = [arguments.epilogue_tensor(name) for name in EPILOGUE_TENSORS]
    split = variant.config.split
    sums = compile.compact(cutlass.Float32, 1) if split else None
    counters = compile.compact(cutlass.Int32, 1) if split else None
    # Split-K partitions, clusters, alpha, beta.
    scalars = cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1.0), cutlass.Float32(0.0)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    gemm.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel = gemm(variant.config, variant.traits)
    with compile.target_arch():
        return cute.compile(
            kernel,
            *tensors,
            table,
            *epilogue,
            sums,
            counters,
            *scalars,
            stream,
            options=f"{compile.OPTIONS} {options}",
        )


@dataclass(frozen=True)
class _GemmArguments:
    """The tensors that a variant is compiled for, with symbolic sizes and strides.

    M, N, K, L: the extents of C, of the sum, and of the batch. `columns` is the number of B's
    columns: N, or a separate extent where the epilogue is gated.
    """

    variant: Variant
    M: Any
    N: Any
    K: Any
    L: Any
    columns: Any

    @staticmethod
    def of(variant: Variant) -> "_GemmArguments":
        M, K, L = (cute.sym_int() for _ in range(3))
        traits = variant.traits
        granule = traits.granule(variant.layout, variant.out_dtype.itemsize)
        N = cute.sym_int(divisibility=granule)
        return _GemmArguments(variant, M, N, K, L, cute.sym_int() if traits.gated else N)

    def operand(self, name: str) -> Any:
        """Returns A or B. TMA needs outer strides that are multiples of 16 bytes."""
        rows, columns = (self.M, self.K) if name == "a" else (self.K, self.columns)
        letter = self.variant.layout["ab".index(name)]
        outer = cute.sym_int64(divisibility=8)
        strides = (outer, 1) if letter == "n" else (1, outer)
        return self._matrix(self.variant.dtype, (rows, columns), strides, 8)

    def output(self, columns: Any) -> Any:
        """Returns C, or a tensor with the layout of C."""
        traits = self.variant.traits
        width = traits.width
        outer = cute.sym_int64(divisibility=width)
        strides: tuple[Any, Any] = (1, outer) if traits.by_columns else (outer, 1)
        if width == 1 and not traits.by_columns:
            strides = (outer, cute.sym_int64())
        return self._matrix(self.variant.out_dtype, (self.M, columns), strides, width)

    def epilogue_tensor(self, name: str) -> Any:
        """Returns a tensor of `EPILOGUE_TENSORS`, or None where the variant does not have it."""
        traits = self.variant.traits
        access = getattr(traits, name)
        is_wide = "scale" in name or traits.scale_out
        dtype = torch.float32 if is_wide else self.variant.out_dtype
        columns = self.N if name == "residual" else self.columns
        match access:
            case "":
                return None
            case "one":
                return self._unaligned(dtype, (1,), (1,))
            case "blocks":
                return self._any_matrix(dtype)
            case "staged":
                return self.output(columns)
            case "columns" | "pairs" | "rows":
                return self._unaligned(dtype, (self.M if access == "rows" else columns,), (1,))
        batch = (self.L,) if access == "batch" else ()
        pair = view_of_caller((self.M, columns), (0, 0), traits.transposed).shape
        shape = (*batch, *pair)
        return self._unaligned(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    def _matrix(
        self, dtype: torch.dtype, shape: tuple[Any, Any], strides: tuple[Any, Any], divisor: int
    ) -> Any:
        """Returns a matrix of a launch as the caller has it, or a batch of them. Its address and
        the stride of the batch are multiples of `divisor` elements.
        """
        traits = self.variant.traits
        given_shape, given_strides = view_of_caller(shape, strides, traits.transposed)
        if traits.batched:
            given_shape = (self.L, *given_shape)
            given_strides = (cute.sym_int64(divisibility=divisor), *given_strides)
        return make_fake_tensor(
            compile.NUMERIC[dtype],
            given_shape,
            given_strides,
            assumed_align=divisor * dtype.itemsize,
        )

    def _any_matrix(self, dtype: torch.dtype) -> Any:
        """Returns a matrix of any size and strides."""
        shape = tuple(cute.sym_int() for _ in range(2))
        return self._unaligned(dtype, shape, tuple(cute.sym_int64() for _ in range(2)))

    @staticmethod
    def _unaligned(dtype: torch.dtype, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        """Returns a tensor that is read element by element."""
        return make_fake_tensor(
            compile.NUMERIC[dtype], shape, strides, assumed_align=dtype.itemsize
        )


def shared_memory(gemm: Any, variant: Variant) -> int:
    """Returns the bytes of shared memory per CTA. These are the config's bytes minus those that the
    epilogue subtiles do not need, because they overlay the stages of the pipeline, are narrow, or
    do not exist.
    """
    config, traits, dtype = variant.config, variant.traits, compile.NUMERIC[variant.out_dtype]
    epilogue_config = gemm(config, traits).epilogue_config
    columns = epilogue_tile.subtile_columns(epilogue_config, dtype)
    subtile = 64 * columns * variant.out_dtype.itemsize
    apart = traits.staged and not epilogue_store.overlays_stages(epilogue_config, dtype, traits)
    unused = SUBTILE_BYTES - (subtile if apart else 0)
    scales = 0
    if traits.block_scaled:
        scales = 4 * config.stages * stage_scales(config, traits.block_b)
    subtiles = config.consumers * config.epilogue_stages
    return config.shared_memory_bytes + scales - subtiles * unused
