"""Sweeps over kernels and workloads, on one machine or several."""
