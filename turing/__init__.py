"""The tensor-core ladder on mma.sync, in Gluon: Turing's m16n8k8, and m16n8k16 from Ampere on.

Triton's own `tl.dot` has no tensor cores for sm_75; these rungs reach them. Code for an older
architecture runs on a newer GPU too: a config's `arch`.
"""
