"""Compiling and timing configs in processes of their own, one GPU to a measurement."""
