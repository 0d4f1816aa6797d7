"""The table of GPUs, from `outblas.machines`: kernels read it too, and import nothing above them."""

from ..machines import MACHINES, Machine, find, of_arch, of_device, reference

__all__ = ["MACHINES", "Machine", "find", "of_arch", "of_device", "reference"]
