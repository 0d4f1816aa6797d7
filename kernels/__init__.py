"""Triton kernels: the portable one that runs everywhere."""
