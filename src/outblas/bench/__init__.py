"""Timing of GEMMs against cuBLAS."""

from .burst import Timing, burst

__all__ = ["Timing", "burst"]
