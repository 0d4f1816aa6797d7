"""Oracles: checks that a kernel wrote the right product, all of it, and nothing else."""
