"""Builds packs: the kernels that a list of products needs, compiled ahead into one file."""
