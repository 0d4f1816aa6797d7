"""The configuration of the Hopper rungs, from where users import it."""

from .parts.config import HopperConfig

__all__ = ["HopperConfig"]
