"""Reads the result of compiling a kernel, without a GPU: machine code, resources, occupancy,
roofline, gates.
"""

from outblas.inspect.inspection import GateError, Inspection, inspect, read
from outblas.inspect.machine_code import MachineCode, read_cubin, tool
from outblas.inspect.occupancy import Occupancy, occupancy

__all__ = [
    "GateError",
    "Inspection",
    "MachineCode",
    "Occupancy",
    "inspect",
    "occupancy",
    "read",
    "read_cubin",
    "tool",
]
