"""Timing of GEMMs against cuBLAS."""

from .burst import Timing, burst
from .environment import driver, environment

__all__ = ["Timing", "burst", "driver", "environment"]
