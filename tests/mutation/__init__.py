"""Faults planted in copies of the sources, and whether the tests that stand for each catch it.

`python -m tests.mutation` (or `make mutation`) proves that the oracles, the protocol model and the
tests of schedulers, caches, cost model and gradients can fail. No file of the tree is written.
"""
