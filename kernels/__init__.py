"""The CUDA-core ladder in Gluon (simt), and the portable kernel, which uses plain tl.dot in Triton.

Figures in the simt rungs' docstrings were measured on an H100 80GB HBM3 with IEEE fp32, A and B
stored by rows, triton 3.6, at 4096³ where no size is given. Ratios are to cuBLAS of CUDA 13.0 in
the same rounds of bursts. `results/h100_simt*.json` hold them.
"""
