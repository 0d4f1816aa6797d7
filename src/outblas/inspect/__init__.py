"""What the assembler made of a kernel, read without a GPU."""

from .machine_code import MachineCode, read_cubin, tool

__all__ = ["MachineCode", "read_cubin", "tool"]
