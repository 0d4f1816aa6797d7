"""What imports the DSL, where a variant must be compiled: planning and launching do not."""

from typing import Any

from outblas.hopper.gemm.variant import Variant


def compile_variant(variant: Variant, options: str = "") -> Any:
    """As `compile.compile_variant`."""
    from outblas.hopper.gemm import compile

    return compile.compile_variant(variant, options)


def shared_memory(variant: Variant) -> int:
    """As `compile.shared_memory`."""
    from outblas.hopper.gemm import compile

    return compile.shared_memory(variant)
