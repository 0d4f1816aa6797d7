"""The config of `hopper.gemm`, and which values of it can be built."""

from outblas.base import registry
from outblas.hopper.parts import config_limits
from outblas.hopper.parts.config import MAX_STAGES, HopperConfig

BESIDE = 4  # as many stages' barriers as split-K's words and barriers take

# Fields that have no meaning where groups divide a product.
_OF_WHOLE_PRODUCTS = ("variable_tile_n", "pingpong", "split_k", "stream_k", "cluster_k", "pdl")

Config = registry.config_type(HopperConfig, "hopper.gemm")


def invalid_reason(config: HopperConfig) -> str | None:
    """Returns why the kernel cannot be built from this config, or None."""
    if config.phases:
        return "phases is True, expected False: a rung of the ladder counts cycles"
    if config.stages > MAX_STAGES - BESIDE:
        return (
            f"stages is {config.stages}, expected at most {MAX_STAGES - BESIDE}: the memory of the "
            "barriers also holds split-K's"
        )
    return config_limits.invalid_reason(config)


def grouped_reason(config: HopperConfig) -> str | None:
    """Returns why no kernel of groups can be built from a config, or None."""
    for name in _OF_WHOLE_PRODUCTS:
        value, default = getattr(config, name), getattr(HopperConfig(), name)
        if value != default:
            return f"{name} is {value}, expected {default} where groups are divided"
    if config.epilogue_stages == 0:
        return "epilogue_stages is 0, expected at least 1: rows of a group are stored from there"
    return invalid_reason(config)
