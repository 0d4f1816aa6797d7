"""The Hopper ladder: CuTe DSL kernels for sm_90 that use TMA, wgmma and mbarriers.

Figures in the rungs' docstrings were measured on an H100 80GB HBM3 with bf16 operands and B stored
N×K. Ratios are to cuBLAS of CUDA 13.0 in the same rounds of bursts, cycles are by clock64, and L2
hits by ncu, at 4096³ where no size is given. `results/h100_*.json` hold them.
"""
