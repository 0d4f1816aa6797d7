"""The configuration of the Hopper rungs, from where users import it."""

from .core.config import HopperConfig

__all__ = ["HopperConfig"]
