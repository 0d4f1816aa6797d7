"""Timing of GEMMs against cuBLAS."""
