"""Reads the result of compiling a kernel, without a GPU: machine code, resources, occupancy,
roofline, gates.
"""

from .gates import GateError
from .inspection import Inspection, inspect, read
from .machine_code import MachineCode, read_cubin, tool
from .occupancy import Occupancy, occupancy

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
