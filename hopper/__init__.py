"""The Hopper ladder: CuTe DSL kernels on TMA, wgmma and mbarriers, for sm_90.

Figures in the rungs' docstrings: an H100 80GB HBM3, bf16, B stored N×K, ratios to cuBLAS of CUDA
13.0 in the same rounds of bursts; cycles by clock64 and L2 hits by ncu, at 4096³ where no size is
given. `results/h100_*.json` hold them.
"""
