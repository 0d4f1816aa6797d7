"""The memory cost of the layouts of a CUDA-core rung, predicted without a GPU and without
compiling.

For shared memory it is the wavefronts of one warp per k-block, for global memory the transactions
and sectors of one request of a warp. The figures hold for products of aligned, row-major or
transposed matrices without partial tiles; 16-bit operands are widened in shared memory.
"""

from dataclasses import dataclass

from outblas.call.problem import Problem
from outblas.device import access
from outblas.device.access import Shared
from outblas.device.mapping import Mapping, by_rows
from outblas.kernels.simt_config import SimtConfig
from outblas.kernels.simt_maps import maps


@dataclass(frozen=True)
class SimtRequest:
    """One request of a warp to global memory: the bytes that a lane requests, the 128-byte lines
    and the 32-byte sectors that the request touches, and the number of such requests that move the
    warp's part of a tile.
    """

    bytes: int
    transactions: int
    sectors: int
    count: int

    @property
    def efficiency(self) -> float:
        """Bytes that lanes request divided by bytes of the touched lines; above 1 where lanes
        request the same bytes.
        """
        return access.WARP * self.bytes / (self.transactions * access.LINE)


def in_shared(config: SimtConfig, problem: Problem) -> dict[str, Shared]:
    """Returns the cost by access: "A store", "B store", "A load", "B load"; {} for a rung that does
    not stage operands in shared memory.
    """
    c, layouts = config, maps(config, problem)
    if c.block_k == 1:
        return {}

    def of_a(m: int, k: int) -> int:
        return k * (c.block_m + c.pad) + m if c.transpose_a else m * (c.block_k + c.pad) + k

    def of_b(k: int, n: int) -> int:
        return k * (c.block_n + c.pad_b) + n

    return {
        "A store": access.shared(layouts.a, of_a),
        "B store": access.shared(layouts.b, of_b),
        "A load": access.shared(
            access.k_block_reads(layouts.outputs, c.block_k, 0), lambda k, m: of_a(m, k)
        ),
        "B load": access.shared(access.k_block_reads(layouts.outputs, c.block_k, 1), of_b),
    }


def in_global(config: SimtConfig, problem: Problem) -> dict[str, SimtRequest]:
    """Returns the requests by access: "A load", "B load", "out store"."""
    layouts, size = maps(config, problem), problem.dtype.itemsize
    direct = config.block_k == 1
    a, b = (layouts.outputs, layouts.outputs) if direct else (layouts.a, layouts.b)
    rows, columns = problem.a[-2:]

    def of_a(m: int, k: int) -> int:
        return (m * rows + (0 if direct else k) * columns) * size

    def of_b(k: int, n: int) -> int:
        return ((0 if direct else k) * problem.b[-2] + n * problem.b[-1]) * size

    def of_out(m: int, n: int) -> int:
        return (m * problem.out[-2] + n * problem.out[-1]) * problem.out_dtype.itemsize

    return {
        "A load": _request(a, of_a, size, config.vector),
        "B load": _request(b, of_b, size, config.vector),
        "out store": _request(by_rows(layouts.outputs), of_out, problem.out_dtype.itemsize, 4),
    }


def passes(config: SimtConfig, problem: Problem) -> dict[str, float]:
    """Returns the cost of one k-block over all warps of a CTA: transactions of its loads under
    "l1", wavefronts of all its accesses under "shared" (absent for a rung that does not stage
    operands).
    """
    loads = [
        request for access, request in in_global(config, problem).items() if access != "out store"
    ]
    staged = in_shared(config, problem).values()
    warp = {
        "l1": sum(of.count * of.transactions for of in loads),
        "shared": sum(of.wavefronts for of in staged),
    }
    return {level: float(each * config.num_warps) for level, each in warp.items() if each}


def _request(mapping: Mapping, byte: access.Address, size: int, most: int) -> SimtRequest:
    """Returns the request of a warp when one load moves consecutive elements, at most `most` of
    them.
    """
    steps = [step for basis in mapping.registers if (step := byte(*basis) - byte(0, 0))]
    width = size
    while width in steps and width < most * size:
        width *= 2
    lines, sectors = (
        access.touched(mapping, byte, width, unit) for unit in (access.LINE, access.SECTOR)
    )
    return SimtRequest(width, lines, sectors, 2 ** len(steps) * size // width)
