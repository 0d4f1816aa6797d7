"""The CUDA-core ladder in Gluon (simt), and the portable kernel, plain tl.dot in Triton.

Figures in the simt rungs' docstrings: an H100 80GB HBM3, fp32 IEEE, A and B stored by rows, 4096³
where no size is given, ratios to cuBLAS of CUDA 13.0 in the same rounds of bursts, with triton 3.6.
`results/h100_simt*.json` hold them.
"""
