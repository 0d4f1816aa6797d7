"""Faults planted in copies of the Hopper kernels' sources, and whether tests catch each.

`python -m tests.mutation` (or `make mutation`) proves that the protocol model and the tests of
schedulers can fail. No file of the tree is written. Faults in host code are mutmut's (see
docs/mutation.md).
"""
