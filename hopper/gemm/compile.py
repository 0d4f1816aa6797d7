"""Compiles a variant of `hopper.gemm` or of `hopper.grouped`, with or without a GPU."""

from dataclasses import dataclass
from typing import Any, Self

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from outblas.hopper.gemm import block_scales, subtiles
from outblas.hopper.gemm.canonical import view_of_caller
from outblas.hopper.gemm.group_kernel import GroupedTiles
from outblas.hopper.gemm.kernel import Gemm
from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.gemm.variant import EPILOGUE_TENSORS, Variant
from outblas.hopper.parts import build
from outblas.hopper.parts.config import SUBTILE_BYTES, HopperConfig


def compile_variant(variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    kernel = kernel_of(variant.config, variant.traits)
    return build.compiled(kernel, variant.name, _Arguments.of(variant).all(), options)


def kernel_of(config: HopperConfig, traits: KernelTraits) -> Gemm:
    """Returns the kernel of a variant, with the scheduler and the loader of groups where they
    divide the product. Raises ValueError for a config that cannot be built.
    """
    return Gemm(config, traits, GroupedTiles(config, traits) if traits.form else None)


@dataclass(frozen=True)
class _Arguments:
    """The arguments that a variant is compiled for, with symbolic sizes and strides.

    M, N, K, count: the extents of C, of the sum, and of the batch or the groups. `columns` is the
    number of B's columns: N, or a separate extent where the epilogue is gated.
    """

    variant: Variant
    M: Any
    N: Any
    K: Any
    count: Any
    columns: Any

    @classmethod
    def of(cls, variant: Variant) -> Self:
        M, K, count = (cute.sym_int() for _ in range(3))
        traits = variant.traits
        granule = traits.granule(variant.layout, variant.out_dtype.itemsize)
        N = cute.sym_int(divisibility=granule)
        return cls(variant, M, N, K, count, cute.sym_int() if traits.gated else N)

    def all(self) -> list[Any]:
        """Returns the arguments of `Gemm.__call__` before the stream."""
        traits = self.variant.traits
        rows = cute.sym_int() if traits.gathers else self.M
        sums, counters = (
            build.compact(dtype, 1) if self.variant.config.split else None
            for dtype in (cutlass.Float32, cutlass.Int32)
        )
        table = build.compact(cutlass.Int32, 1) if traits.ordered else None
        return [
            self.operand("a", (rows, self.K), traits.batched and not traits.form),
            self.operand("b", (self.K, self.columns), traits.batched != bool(traits.form)),
            self.output(self.N),
            self._vector(cutlass.Int32, self.count) if traits.form else table,
            *(self.epilogue_tensor(name) for name in EPILOGUE_TENSORS),
            # scatter_index, scatter_weights, a_index
            self._vector(cutlass.Int32, self.M) if traits.scatters else None,
            self._vector(cutlass.Float32, self.M) if traits.weighted else None,
            self._vector(cutlass.Int32, self.M) if traits.gathers else None,
            sums,
            counters,
            # Split-K partitions, clusters, alpha, beta.
            *(cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1.0), cutlass.Float32(0.0)),
        ]

    def operand(self, name: str, shape: tuple[Any, Any], counted: bool) -> Any:
        """Returns A or B. TMA needs outer strides that are multiples of 16 bytes."""
        letter = self.variant.layout["ab".index(name)]
        outer = cute.sym_int64(divisibility=8)
        strides = (outer, 1) if letter == "n" else (1, outer)
        return self._matrix(self.variant.dtype, shape, strides, 8, counted)

    def output(self, columns: Any) -> Any:
        """Returns C, or a tensor with the layout of C."""
        traits = self.variant.traits
        width = traits.width
        outer = cute.sym_int64(divisibility=width)
        strides: tuple[Any, Any] = (1, outer) if traits.by_columns else (outer, 1)
        if width == 1 and not traits.by_columns:
            strides = (outer, cute.sym_int64())
        dtype = self.variant.out_dtype
        return self._matrix(dtype, (self.M, columns), strides, width, traits.batched)

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
                has_groups = {"scale_a": traits.masked, "scale_b": traits.form == "ragged_m"}
                lead = (self.count,) if has_groups.get(name) else ()
                return self._strided(dtype, *lead, cute.sym_int(), cute.sym_int())
            case "columns" | "pairs" if name == "bias" and traits.form:
                return self._group_vectors(dtype, access)
            case "staged":
                return self.output(columns)
            case "columns" | "pairs" | "rows":
                return self._unaligned(dtype, (self.M if access == "rows" else columns,), (1,))
        batch = (self.count,) if access == "batch" else ()
        return self._strided(
            dtype, *batch, *view_of_caller((self.M, columns), (0, 0), traits.transposed).shape
        )

    def _group_vectors(self, dtype: torch.dtype, access: str) -> Any:
        """Returns a vector of columns for each group."""
        strides: tuple[Any, Any] = (cute.sym_int64(divisibility=2), 1)
        if access == "columns":
            strides = cute.sym_int64(), cute.sym_int64()
        return self._unaligned(dtype, (self.count, self.columns), strides)

    def _matrix(
        self,
        dtype: torch.dtype,
        shape: tuple[Any, Any],
        strides: tuple[Any, Any],
        divisor: int,
        counted: bool,
    ) -> Any:
        """Returns a matrix of a launch as the caller has it, or `count` of them. Its address and
        the stride of the batch are multiples of `divisor` elements.
        """
        given_shape, given_strides = view_of_caller(shape, strides, self.variant.traits.transposed)
        if counted:
            given_shape = (self.count, *given_shape)
            given_strides = (cute.sym_int64(divisibility=divisor), *given_strides)
        return make_fake_tensor(
            build.NUMERIC[dtype],
            given_shape,
            given_strides,
            assumed_align=divisor * dtype.itemsize,
        )

    def _strided(self, dtype: torch.dtype, *shape: Any) -> Any:
        """Returns a tensor of any strides."""
        return self._unaligned(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    @staticmethod
    def _vector(dtype: Any, extent: Any) -> Any:
        """Returns a contiguous vector."""
        return make_fake_tensor(dtype, (extent,), (1,), assumed_align=4)

    @staticmethod
    def _unaligned(dtype: torch.dtype, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        """Returns a tensor that is read element by element."""
        return make_fake_tensor(build.NUMERIC[dtype], shape, strides, assumed_align=dtype.itemsize)


def shared_memory(variant: Variant) -> int:
    """Returns the bytes of shared memory per CTA. These are the config's bytes minus those that the
    epilogue subtiles do not need, because they overlay the stages of the pipeline, are narrow, or
    do not exist.
    """
    config, traits, size = variant.config, variant.traits, variant.out_dtype.itemsize
    stored = config.epilogue_config(traits.gated)
    apart = traits.staged and not subtiles.overlays_stages(stored, size, traits)
    subtile = subtiles.subtile_bytes(stored, size)
    unused = SUBTILE_BYTES - (subtile if apart else 0)
    schedule = 4 * traits.capacity
    scales = 0
    if traits.block_scaled:
        scales = 4 * config.stages * block_scales.stage_scales(config, traits)
    buffers = config.consumers * config.epilogue_stages
    return config.shared_memory_bytes + scales + schedule - buffers * unused
