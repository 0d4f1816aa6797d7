"""What stands for CuTe DSL while the kernels' source runs on `machine`: plain Python, one agent at
a time.

`Modules` executes those of `hopper/` over it, and may change their source first, to plant a fault.
"""

import builtins
import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import outblas.hopper

from . import state
from .arch import ARCH, WarpgroupOps
from .fault import ProtocolFault
from .machine import Store
from .memory import InFlight, Write
from .scale_memory import ScaleTensor
from .tensors import (
    Allocator,
    GlobalTensor,
    GlobalWords,
    Matrix,
    Pointer,
    Rows,
    Shared,
    SharedLayout,
    Table,
    make_tensor,
)
from .values import LANES_OF_ELEMENT, NUMERICS, Numeric, Opaque, Registers, empty_sums

if TYPE_CHECKING:
    from .launch import Launch

__all__ = ["GlobalTensor", "Matrix", "Modules", "Numeric", "Table", "content", "use"]

FOLDER = Path(outblas.hopper.__file__).parent
# Modules that the kernels import as they are: configs and the host's side.
PLAIN = {"gemm.config", "parts.config", "parts.entry"}


def use(on: "Launch") -> None:
    """The machine of the launches to come."""
    state.machine = on


# ---- cute
def make_rmem_tensor(shape, dtype):
    count = shape if isinstance(shape, int) else math.prod(shape)
    return Registers(list(empty_sums(count)))


def size(x, mode=None):
    if isinstance(x, Shared | Rows):
        return 1  # k-blocks of a stage
    return 1 if mode else x.count


def local_tile(tensor, box, at):
    return tensor if isinstance(tensor, Opaque) else tensor.tile(box, at)


def domain_offset(coordinates, tensor):
    if isinstance(tensor, ScaleTensor):
        return tensor.moved(coordinates)
    offset = [x + y for x, y in zip(tensor.offset, coordinates, strict=True)]
    return Matrix(tensor.name, tensor.shape, offset, tensor.rest)


def make_layout(shape, stride=None):
    return SimpleNamespace(shape=shape, stride=stride) if isinstance(shape, tuple) else shape


def tile_to_shape(dtype, shape, order):
    return SharedLayout(shape[:2], dtype, shape[2] if len(shape) > 2 else 1)


def tma_partition(atom, rank, parts, shared, matrix):
    return shared.part(rank, parts), matrix


def copy(atom, source, target, tma_bar_ptr=None, mcast_mask=None):
    agent = state.machine.agent
    kinds = type(source), type(target)
    if kinds == (Matrix, Shared):
        tma_load(agent, source, target, tma_bar_ptr, mcast_mask)
    elif kinds in COPIES:
        COPIES[kinds](agent, source, target)
    else:
        raise TypeError(f"copy of {source!r} to {target!r}")


def read_buffer(agent, source, target):
    agent.pause()
    low, high = source.range()
    target.fetched = content(agent.cta.memory.read(low, high, agent.name))


def content(regions):
    """What a range holds, if all of it holds the same; of gated pairs there are two halves."""
    if len(regions) == 1:
        return regions[0].tag
    tags = list(dict.fromkeys(region.tag for region in regions))
    return tags[0] if len(tags) == 1 else tuple(tags)


def tma_load(agent, source, target, pointer, mask):
    agent.pause("issue")
    low, high = target.range()
    tag = source.tag
    operand = source.name.split("@")[0]
    kind = f"load {operand}"
    if operand != state.machine.weights:
        state.machine.previous.check_ended(f"{operand} is loaded")
    mask = 1 << agent.cta.rank if mask is None else int(mask)
    for rank in range(state.machine.cluster):
        if not mask >> rank & 1:
            continue
        cta = state.machine.peer(agent.cta, rank)
        cta.check_present(f"a load of {agent.name}")
        cta.memory.write(low, high, InFlight(tag))

        def land(cta=cta):
            cta.check_present(f"a load of {agent.name}")
            for found in cta.memory.in_range(low, high):
                if type(found) is not InFlight or found.tag != tag:
                    raise ProtocolFault("overwritten", f"{cta.name}: {tag} lands where {found} is")
            cta.memory.write(low, high, tag)
            state.machine.fetched(tag)
            cta.barrier(pointer.address).landed(high - low)

        state.machine.after(state.machine.timing.delay(kind, cta.name), land)


def tma_store(agent, source, target):
    if agent.lane != 0:
        return
    agent.pause("issue")
    low, high = source.range()
    memory = agent.cta.memory
    regions = memory.read(low, high, f"a TMA store of {agent.name}")
    for region in regions:
        if region.write is not None and not region.write.fenced:
            raise ProtocolFault(
                "early read", f"a TMA store reads what {region.write.agent} has not fenced"
            )
    number, store = memory.begin_read(low, high, f"a TMA store of {agent.name}"), Store()
    agent.storing.append(store)
    state.machine.stored(agent, target.tag, [region.tag for region in regions])

    def end():
        memory.end_read(number)
        store.reading = False
        agent.reads_done.changed()

    state.machine.after(state.machine.timing.delay("store", agent.cta.name), end)


def write_buffer(agent, source, target):
    """Each agent of a consumer writes its part of a buffer."""
    agent.pause()
    consumer = agent.tidx // 128 - 1
    low, high = (
        target.part(consumer, target.shape[0] // 64) if target.shape[0] > 64 else target
    ).range()
    number, of = agent.ordinal
    step = (high - low) // of
    end = high if number == of - 1 else low + (number + 1) * step
    write = Write(agent.name)
    agent.cta.memory.write(low + number * step, end, ("C", source[0]), write)
    agent.unfenced.append(write)


def write_workspace(agent, source, target):
    """Visible to others some time, or when a thread fences that knows of it."""
    state.machine.previous.check_ended(f"{agent.name} writes partial sums")
    values = [source[i] for i in range(target.count)]
    memory, index = target.pointer.memory, target.pointer.index
    memory.check(index)
    memory.check(index + target.count - 1)
    done: list[bool] = []

    def land():
        if not done:
            done.append(True)
            for i, value in enumerate(values):
                memory.values[index + i] = value

    state.machine.after(state.machine.timing.delay("global write", agent.name), land)
    agent.observed.add(land)


def read_workspace(agent, source, target):
    agent.pause("global read")
    state.machine.previous.check_ended(f"{agent.name} reads partial sums")
    for i in range(source.count):
        value = source.pointer.memory.values.get(source.pointer.index + i)
        if value is None:
            raise ProtocolFault(
                "early read", f"{agent.name} reads partial sums that nobody has written"
            )
        target[i] = value


COPIES = {
    (Shared, Matrix): tma_store,
    (Shared, Registers): read_buffer,
    (Registers, Shared): write_buffer,
    (Registers, GlobalWords): write_workspace,
    (GlobalWords, Registers): read_workspace,
}


def autovec_copy(source, target):
    state.machine.agent.pause()
    for i in range(source.count):
        target[i] = source[i]


def gemm(mma, acc, a, b, c):
    agent = state.machine.agent
    agent.pause()
    agent.warpgroup.issue(
        agent, agent.multiplied, acc.owner, (a.ranges(), b.ranges()), not mma.accumulates
    )
    agent.multiplied += 1


class Mma:
    """wgmma of so many warpgroups, each of which multiplies its own rows of A. Other views of a
    thread's part of a tensor are the tensor.
    """

    accumulates = True

    def __init__(self, warpgroups=1, warpgroup=0):
        self.warpgroups, self.warpgroup = warpgroups, warpgroup

    def set(self, field, value):
        self.accumulates = value

    def get_slice(self, thread):
        return Mma(self.warpgroups, int(thread) // 128 % self.warpgroups)

    def partition_A(self, tensor):
        return Rows(tensor, self.warpgroup, self.warpgroups)

    def partition_B(self, tensor):
        return tensor

    partition_C = partition_D = partition_S = make_fragment_A = make_fragment_B = retile = (
        partition_B
    )

    def partition_shape_C(self, shape):
        return LANES_OF_ELEMENT * max(
            1, state.machine.config.cluster_k * shape[1] // state.machine.config.tile_n
        )


class Prepared:
    """A kernel and its arguments."""

    def __init__(self, body):
        self.body = body

    def launch(self, grid, block, cluster=(1, 1, 1), **_):
        state.machine.run_kernel(self.body, grid[0], block[0] // 128, cluster[0])


def kernel(function):
    return lambda self, *given: Prepared(lambda: function(self, *given))


WARPGROUP_OPS = WarpgroupOps()
HELPERS = SimpleNamespace(
    make_smem_layout_a=lambda major, tile, dtype, stages: SharedLayout(
        (tile[0], tile[2]), dtype, stages
    ),
    make_smem_layout_b=lambda major, tile, dtype, stages: SharedLayout(
        (tile[1], tile[2]), dtype, stages
    ),
    get_smem_layout_atom=Opaque(),
    make_trivial_tiled_mma=lambda *given: Mma(given[5][0]),
)
CPASYNC = SimpleNamespace(
    CopyBulkTensorTileG2SOp=Opaque,
    CopyBulkTensorTileG2SMulticastOp=Opaque,
    CopyBulkTensorTileS2GOp=Opaque,
    make_tiled_tma_atom=lambda op, tensor, layout, box, num_multicast=1: (Opaque(), tensor),
    prefetch_descriptor=Opaque(),
    tma_partition=tma_partition,
)


class TiledCopy(Mma):
    """How threads write a buffer of C, or read one."""


def tuple_of(x):
    return (1, 1, 1, x.count)


CUTE = SimpleNamespace(
    append_ones=lambda tensor, up_to_rank: tensor,
    arch=ARCH,
    jit=lambda function: function,
    kernel=kernel,
    Tensor=object,
    CopyAtom=object,
    ComposedLayout=object,
    TiledMma=object,
    Pointer=object,
    nvgpu=Opaque(),
    autovec_copy=autovec_copy,
    ceil_div=lambda x, y: -(-x // y),
    copy=copy,
    domain_offset=domain_offset,
    fast_divmod_create_divisor_v2=int,
    gemm=gemm,
    group_modes=lambda tensor, *_: tensor,
    local_tile=local_tile,
    make_copy_atom=Opaque(),
    make_identity_tensor=lambda shape: Matrix("coordinates", shape),
    make_layout=make_layout,
    make_ptr=lambda dtype, pointer, space, assumed_align: pointer,
    make_rmem_tensor=make_rmem_tensor,
    make_tensor=make_tensor,
    make_tiled_copy_C_atom=Opaque(),
    make_tiled_copy_S=lambda *_: TiledCopy(),
    rank=lambda tensor: len(tensor.shape),
    recast_ptr=lambda pointer, swizzle=None, dtype=None: Pointer(pointer.address, dtype.width // 8),
    recast_tensor=lambda tensor, dtype: tensor,
    select=lambda layout, mode: SimpleNamespace(
        shape=tuple(layout.shape[i] for i in mode), stride=tuple(layout.stride[i] for i in mode)
    ),
    shape=tuple_of,
    size=size,
    size_in_bytes=lambda dtype, layout: layout.unit * layout.count,
    slice_=lambda layout, _: SharedLayout(layout.shape, layout.dtype, 1),
    tile_to_shape=tile_to_shape,
)
CUTLASS = SimpleNamespace(
    Constexpr=object,
    cute=CUTE,
    const_expr=bool,
    max=max,
    min=min,
    range=lambda *bounds, **_: range(*bounds),
    range_constexpr=range,
    **NUMERICS,
)
MODULES = {
    "cutlass": CUTLASS,
    "cutlass.cute": CUTE,
    "cutlass.cute.nvgpu": SimpleNamespace(
        CopyG2ROp=Opaque,
        CopyR2GOp=Opaque,
        LoadCacheMode=Opaque(),
        StoreCacheMode=Opaque(),
        cpasync=CPASYNC,
        warp=Opaque(),
        warpgroup=WARPGROUP_OPS,
        OperandMajorMode=Opaque(),
    ),
    "cutlass.memory": SimpleNamespace(SmemAllocator=Allocator),
    "cutlass.tensor_utils": SimpleNamespace(LayoutEnum=Opaque()),
    "cutlass.utils": SimpleNamespace(hopper_helpers=HELPERS),
}


# ---- what follows the product, of which a protocol sees only when it asks for the source
@dataclass(frozen=True)
class EpilogueTile:
    epilogue: object
    consumer: object
    work: object
    acc: Registers
    width: int

    def registers(self, *_):
        return None

    def values(self, _):
        return Registers([self.acc[0], self.acc[self.acc.count - 1]])


class EpilogueOps:
    def __init__(self, tile):
        self.tile = tile

    def compute_outputs(self, end=None):
        pass

    def compute_x(self, half, end=None):
        pass


def add_source(epilogue, values, load_source):
    if epilogue.traits.source:
        values[0] = (values[0], load_source().fetched)


def output_registers(operations, width):
    acc = operations.tile.acc
    return Registers([acc[i] for i in range(acc.count)])


EPILOGUE_MATH = SimpleNamespace(
    EpilogueOps=EpilogueOps,
    EpilogueTile=EpilogueTile,
    add_source=add_source,
    output_registers=output_registers,
    prefetch_bias=lambda cta, work: None,
    store_aux=lambda operations: operations.tile.acc[0],
)


def store_fragment(consumer, fragments, gC, cC, shape, width, cache):
    """Registers straight to C."""
    agent, config = state.machine.agent, state.machine.config
    warpgroup = getattr(consumer, "warpgroup_in_tile", consumer.index)
    if agent.tidx % 128 == 0:
        for i in range(config.tile_m // (64 * config.warpgroups_per_tile)):
            row = gC.offset[0] + (i * config.warpgroups_per_tile + warpgroup) * 64
            stored, target = [("C", fragments.acc[0])], ("C", (row, *gC.offset[1:]))
            state.machine.stored(agent, target, stored, gC.box[1], end_row=shape[0])


# ---- the kernels' modules
class Modules:
    """The modules of `hopper/` over this DSL, by their path in it ("gemm.kernel"), made as they are
    asked for. `patches`: of a module's source, pairs of what to replace, all of it, and by what.
    Modules that see nothing of a patch are those of `intact`.
    """

    def __init__(self, patches=None, intact: "Modules | None" = None):
        self.patches, self.intact = patches or {}, intact
        self.made: dict[str, ModuleType] = {}
        self.imports: dict[str, set[str]] = {}  # of each module, others of `hopper/`

    def find(self, name):
        if name == "gemm.epilogue_math":
            return EPILOGUE_MATH
        if name in PLAIN:
            return importlib.import_module(f"outblas.hopper.{name}")
        if self.intact is not None and not self._sees_a_patch(name):
            return self.intact.find(name)
        if name not in self.made:
            self._make(name)
        return self.made[name]

    def _sees_a_patch(self, name):
        self.intact.find(name)
        others = self.intact.imports.get(name, ())
        return name in self.patches or any(self._sees_a_patch(other) for other in others)

    def _make(self, name):
        module = self.made[name] = ModuleType(f"outblas.hopper.{name}")
        self.imports[name] = set()
        path = FOLDER / f"{name.replace('.', '/')}.py"
        source = path.read_text(encoding="utf-8")
        for old, new in self.patches.get(name, ()):
            assert old in source, f"{name} has no {old!r}"
            source = source.replace(old, new)
        module.__package__ = module.__name__.rpartition(".")[0]
        module.__file__ = str(path)
        module.__dict__["__builtins__"] = vars(builtins) | {
            "__import__": partial(self._imported, self.imports[name])
        }
        exec(compiled(source, str(path)), module.__dict__)
        adapt(name, module)

    def _imported(self, imports, name, scope=None, local=None, wanted=(), level=0):
        """What stands for `__import__` in a module that imports so many others."""
        if name.split(".")[0] == "cutlass":
            return MODULES[name] if wanted else CUTLASS
        inside = name.removeprefix("outblas.hopper").removeprefix(".")
        if not name.startswith("outblas.hopper"):
            return builtins.__import__(name, scope, local, wanted, level)
        if (FOLDER / inside.replace(".", "/")).is_dir():
            names = {each: f"{inside}.{each}".strip(".") for each in wanted}
            imports.update(names.values())
            return SimpleNamespace(**{each: self.find(names[each]) for each in wanted})
        imports.add(inside)
        return self.find(inside)


@lru_cache(maxsize=256)
def compiled(source, path):
    """The code of a module, which most planted faults leave as it is."""
    return compile(source, path, "exec")


def adapt(name, module):
    """Puts the model's functions in place of some of a module that was made."""
    match name:
        case "parts.pipeline":
            # It compares what one trace has of all roles.
            module.Pipeline.check_arrival_counts = lambda self: None
        case "parts.roles":
            module.store_fragment = store_fragment
        case "parts.epilogue_store":
            module.round_subtile = lambda consumer, *_: Registers([consumer.fragments.acc[0]])
        case "gemm.subtiles":
            # Every thread asks for every tile; a trace asks once.
            module.buffer_count = lru_cache(maxsize=256)(module.buffer_count)
        case "gemm.row_stores":
            module.store_rows = _of_grouped("store_rows")
        case "gemm.block_scales":
            module.RowGroup.registers = module.RowGroup.partial_registers = lambda *_: [0] * 4
            for name in ("in_order", "add_pair"):
                setattr(module, name, _of("scales", name))
            for name in ("row_scales", "add_by_blocks", "add_by_columns"):
                setattr(module, name, partial(_of("scales", name), getattr(module, name)))
        case "gemm.scale_loads":
            for name in ("row_addresses", "column_addresses", "copy_stage"):
                setattr(module, name, partial(_of("scales", name), getattr(module, name)))
            pipeline = module.ScaledPipeline
            release, own = _of("scales", "consumer_release"), pipeline.consumer_release
            pipeline.consumer_release = lambda self, index: release(own, self, index)
        case "gemm.promotion":
            module.add_unscaled = _of("scales", "add_unscaled")
        case "gemm.term_mask":
            module.clear_terms = _of_grouped("clear_terms")
        case "gemm.gather":
            for name in ("row_offsets", "copy_k_tile"):
                setattr(module, name, _of_grouped(name))
        case "gemm.group_scheduler":
            for name in ("make_tile_counts", "find_group", "make_order"):
                setattr(module, name, _of_grouped(name))


def _of(module, name):
    """A function of a module here, which may import this one."""
    return getattr(importlib.import_module(f".{module}", __package__), name)


_of_grouped = partial(_of, "grouped")
