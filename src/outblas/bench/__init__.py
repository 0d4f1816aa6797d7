"""Timing of GEMMs against cuBLAS."""

from .environment import driver, environment

__all__ = ["driver", "environment"]
