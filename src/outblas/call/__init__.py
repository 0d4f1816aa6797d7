"""One GEMM call: what describes it (operands, epilogue, scales, groups), its checks, the choice of
a kernel, plans, and what torch computes in the place of kernels.

It imports `base` alone, and loads kernels by their names.
"""
