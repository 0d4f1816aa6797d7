"""The configuration of the Hopper rungs, from where users import it."""

from outblas.hopper.parts.config import HopperConfig

__all__ = ["HopperConfig"]
