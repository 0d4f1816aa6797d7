"""What stands for CuTe DSL while the kernels' source runs on `machine`: plain Python, one agent at a time.

Tensors know where they lie and which part of which matrix they are, registers hold the products that were summed in
them. `load` executes modules of `hopper/` over these, and may change their source first, to plant a fault.
"""

import builtins
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import outblas.hopper
from outblas.hopper import config as real_config

from .machine import InFlight, Machine, NamedBarrier, ProtocolFault, Store, Write

FOLDER = Path(outblas.hopper.__file__).parent
LANES_OF_ELEMENT = 4  # registers a thread has in the model, of each part of K of a cluster
PLAIN = {"config", "schedule", "placement", "host", "gemm_host", "rules", "copies", "cycles", "space", "gemm_space"}

machine: Machine
cluster_k = 1


def use(on: Machine) -> None:
    """The machine of the launches to come."""
    global machine, cluster_k
    machine, cluster_k = on, on.config.cluster_k


# ---- values
class Opaque:
    """What makes no difference to a protocol: whatever is asked of it is another one."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Opaque()

    def __call__(self, *_, **__):
        return Opaque()

    def __getitem__(self, _):
        return Opaque()


class Numeric:
    """A type of numbers: a call is its value."""

    def __init__(self, name, width):
        self.name, self.width = name, width

    def __call__(self, value=0):
        return value if isinstance(value, float) else int(value)

    def __or__(self, other):
        return self  # in annotations

    def __repr__(self):
        return self.name


WIDTHS = {
    "Int8": 8, "Uint8": 8, "Int16": 16, "Int32": 32, "Uint32": 32, "Int64": 64, "Float32": 32, "BFloat16": 16,
    "Float16": 16, "Float8E4M3FN": 8, "Float8E5M2": 8,
}  # fmt: skip
NUMERICS = {name: Numeric(name, width) for name, width in WIDTHS.items()}


class Sum:
    """An accumulator: the products that it is made of, in the order in which they were added. `part`: which part of
    the tile's columns its thread has it of.
    """

    def __init__(self, products, part):
        self.products, self.part = products, part

    def __add__(self, other):
        if not isinstance(other, Sum):
            return self
        if other.part != self.part:
            raise ProtocolFault("wrong result", f"sums of parts {self.part} and {other.part} of the columns are added")
        return Sum(self.products + other.products, self.part)

    def __eq__(self, other):
        return isinstance(other, Sum) and (self.products, self.part) == (other.products, other.part)

    def __hash__(self):
        return hash((self.products, self.part))

    def __repr__(self):
        return f"Sum({self.products}, {self.part})"


class Registers:
    """Registers of a thread, or a view of some."""

    def __init__(self, values, start=0, count=None, owner=None):
        self.values, self.start = values, start
        self.count = len(values) - start if count is None else count
        self.owner = owner or self
        if owner is None:
            self.running = 0  # wgmma that add to it

    @property
    def iterator(self):
        return RegisterPointer(self, 0)

    @property
    def layout(self):
        return self.count

    @property
    def shape(self):
        return self.count

    element_type = NUMERICS["Float32"]

    def _settled(self):
        if self.owner.running:
            raise ProtocolFault("early read", f"{machine.agent.name} uses accumulators while wgmma adds to them")

    def __getitem__(self, i):
        self._settled()
        return self.values[self.start + i]

    def __setitem__(self, i, value):
        self._settled()
        self.values[self.start + i] = value

    def fill(self, _):
        for i in range(self.count):
            self[i] = Sum((), i // LANES_OF_ELEMENT)

    def multiplied(self, tags, overwrite):
        self.owner.running -= 1
        for i in range(self.count):
            before = () if overwrite else self.values[i].products
            self.values[i] = Sum((*before, tuple(tags)), i // LANES_OF_ELEMENT)

    def load(self):
        return Vector([self[i] for i in range(self.count)])

    def store(self, vector):
        for i in range(self.count):
            self[i] = vector.values[i]


class Vector:
    def __init__(self, values):
        self.values = values

    def to(self, _):
        return self


class RegisterPointer:
    def __init__(self, registers, offset):
        self.registers, self.offset = registers, offset

    def __add__(self, count):
        return RegisterPointer(self.registers, self.offset + count)


# ---- memory
class Pointer:
    """An address in a CTA's shared memory."""

    memspace = "shared"

    def __init__(self, address, size):
        self.address, self.size = address, size

    def __add__(self, count):
        return Pointer(self.address + int(count) * self.size, self.size)

    def toint(self):
        return self


class GlobalPointer:
    memspace = "global"

    def __init__(self, memory, index):
        self.memory, self.index = memory, index

    def __add__(self, count):
        return GlobalPointer(self.memory, self.index + int(count))

    def toint(self):
        return self


class GlobalTensor:
    """Words of the workspace."""

    def __init__(self, memory):
        self.memory = memory

    @property
    def iterator(self):
        return GlobalPointer(self.memory, 0)

    def __setitem__(self, index, value):
        self.memory.values[index] = value


class SharedLayout:
    """`count` stages, or buffers, of `shape`."""

    inner = Opaque()

    def __init__(self, shape, dtype, count):
        self.shape, self.dtype, self.count = tuple(shape), dtype, count

    @property
    def outer(self):
        return self

    @property
    def unit(self):
        return math.prod(self.shape) * self.dtype.width // 8


class Shared:
    """Parts of equal size in shared memory: stages of an operand, or buffers of C."""

    def __init__(self, base, stride, size, count, shape, offset=0):
        self.base, self.stride, self.size, self.count = base, stride, size, count
        self.shape, self.offset = shape, offset

    def range(self):
        if self.count != 1:
            raise AssertionError("a stage has to be named")
        return self.base + self.offset, self.base + self.offset + self.size

    def __getitem__(self, index):
        at = index[-1]
        if at is None:
            return self
        if not 0 <= at < self.count:
            raise ProtocolFault("wrong result", f"stage {at} of {self.count}")
        return Shared(self.base + at * self.stride, self.stride, self.size, 1, self.shape, self.offset)

    def part(self, number, parts):
        size = self.size // parts
        return Shared(self.base, self.stride, size, self.count, self.shape, self.offset + int(number) * size)

    def tile(self, box, at):
        found = self
        for extent, rows, number in zip(self.shape, box[:2], at[:2], strict=True):
            found = found.part(number, extent // rows)
        first, count = (at[2] * box[2], box[2]) if len(box) == 3 else (0, self.count)
        return Shared(found.base + first * self.stride, self.stride, found.size, count, box[:2], found.offset)


class SharedWords:
    def __init__(self, address, count):
        self.address, self.count = address, count

    def __getitem__(self, i):
        words = machine.agent.cta.memory.words
        if self.address + 4 * i not in words:
            raise ProtocolFault("early read", f"{machine.agent.name} reads a word that nobody has written")
        return words[self.address + 4 * i]

    def __setitem__(self, i, value):
        machine.agent.cta.memory.words[self.address + 4 * i] = value


class GlobalWords:
    def __init__(self, pointer, count):
        self.pointer, self.count = pointer, count


class Matrix:
    """A matrix in global memory, or a part of it. `offset`: coordinates of its first element; `rest`: modes that are
    still to be chosen, and their steps.
    """

    def __init__(self, name, shape, offset=None, rest=()):
        self.name, self.shape = name, tuple(shape)
        self.offset = tuple(offset or (0,) * len(self.shape))
        self.rest = tuple(rest)

    @property
    def element_type(self):
        return machine.types.get(self.name.split("@")[0], NUMERICS["BFloat16"])

    @property
    def iterator(self):
        return self.name

    @property
    def layout(self):
        return SimpleNamespace(shape=self.shape, stride=tuple(1 for _ in self.shape))

    def tile(self, box, at):
        steps = (*box, *(1 for _ in self.shape))
        offset, rest = list(self.offset), []
        for mode, number in enumerate(at):
            if number is None:
                rest.append((mode, steps[mode]))
            else:
                offset[mode] += number * steps[mode]
        return Matrix(self.name, self.shape, offset, rest)

    def __getitem__(self, index):
        offset, rest = list(self.offset), []
        for (mode, step), number in zip(self.rest, index[1:], strict=True):
            if number is None:
                rest.append((mode, step))
            else:
                offset[mode] += number * step
        return Matrix(self.name, self.shape, offset, rest)

    @property
    def tag(self):
        assert not self.rest, "all coordinates are chosen"
        return self.name, self.offset


class Table:
    """The order of tiles: one list, or for the rungs of the ladder one of each step."""

    def __init__(self, tiles):
        self.tiles = tiles

    @property
    def shape(self):
        return len(self.tiles), len(self.tiles[0])

    def __getitem__(self, index):
        return self.tiles[index[0]][index[1]] if isinstance(index, tuple) else self.tiles[index]


class Allocator:
    """Gives every agent of a CTA the same addresses, for all ask for the same."""

    def allocate(self, size, alignment=16):
        agent = machine.agent
        agent.allocated = -(-agent.allocated // alignment) * alignment
        address, agent.allocated = agent.allocated, agent.allocated + size
        return Pointer(address, 1)

    def allocate_array(self, dtype, count):
        return Pointer(self.allocate(count * dtype.width // 8).address, dtype.width // 8)

    def allocate_tensor(self, dtype, layout, alignment, swizzle=None):
        return make_tensor(self.allocate(layout.unit * layout.count, alignment), layout)


# ---- cute
def make_tensor(iterator, layout):
    match iterator:
        case Pointer():
            if isinstance(layout, int):
                return SharedWords(iterator.address, layout)
            return Shared(iterator.address, layout.unit, layout.unit, layout.count, layout.shape)
        case GlobalPointer():
            return GlobalWords(iterator, layout)
        case RegisterPointer(registers=registers, offset=offset):
            count = layout if isinstance(layout, int) else registers.count
            return Registers(registers.values, registers.start + offset, count, registers.owner)
    return Matrix(iterator, layout.shape)


def make_rmem_tensor(shape, dtype):
    count = shape if isinstance(shape, int) else math.prod(shape)
    return Registers([Sum((), i // LANES_OF_ELEMENT) for i in range(count)])


def size(x, mode=None):
    if isinstance(x, Shared):
        return 1  # k-blocks of a stage
    return 1 if mode else x.count


def local_tile(tensor, box, at):
    return tensor if isinstance(tensor, Opaque) else tensor.tile(box, at)


def domain_offset(coordinates, tensor):
    offset = [x + y for x, y in zip(tensor.offset, coordinates, strict=True)]
    return Matrix(tensor.name, tensor.shape, offset, tensor.rest)


def make_layout(shape, stride=None):
    return SimpleNamespace(shape=shape, stride=stride) if isinstance(shape, tuple) else shape


def tile_to_shape(dtype, shape, order):
    return SharedLayout(shape[:2], dtype, shape[2] if len(shape) > 2 else 1)


def tma_partition(atom, rank, parts, shared, matrix):
    return shared.part(rank, parts), matrix


def copy(atom, source, target, tma_bar_ptr=None, mcast_mask=None):
    agent = machine.agent
    match source, target:
        case Matrix(), Shared():
            tma_load(agent, source, target, tma_bar_ptr, mcast_mask)
        case Shared(), Matrix():
            if agent.lane == 0:
                tma_store(agent, source, target)
        case Shared(), Registers():
            agent.pause()
            low, high = source.range()
            regions = agent.cta.memory.read(low, high, agent.name)
            target.fetched = content(regions)
        case Registers(), Shared():
            write_buffer(agent, source, target)
        case Registers(), GlobalWords():
            write_workspace(agent, source, target)
        case GlobalWords(), Registers():
            read_workspace(agent, source, target)
        case _:
            raise TypeError(f"copy of {source!r} to {target!r}")


def content(regions):
    """What a range holds, if all of it holds the same; of gated pairs there are two halves."""
    tags = list(dict.fromkeys(region.tag for region in regions))
    return tags[0] if len(tags) == 1 else tuple(tags)


def tma_load(agent, source, target, pointer, mask):
    agent.pause("issue")
    low, high = target.range()
    mask = 1 << agent.cta.rank if mask is None else int(mask)
    for rank in range(machine.cluster):
        if not mask >> rank & 1:
            continue
        cta = machine.peer(agent.cta, rank)
        cta.check_present(f"a load of {agent.name}")
        cta.memory.write(low, high, InFlight(source.tag))

        def land(cta=cta):
            cta.check_present(f"a load of {agent.name}")
            for tag in cta.memory.in_range(low, high):
                if tag != InFlight(source.tag):
                    raise ProtocolFault("overwritten", f"{cta.name}: {source.tag} lands where {tag} is")
            cta.memory.write(low, high, source.tag)
            machine.fetched(source.tag)
            cta.barrier(pointer.address).landed(high - low)

        machine.after(machine.timing.delay(f"load {source.name.split('@')[0]}", cta.name), land)


def tma_store(agent, source, target):
    agent.pause("issue")
    low, high = source.range()
    memory = agent.cta.memory
    regions = memory.read(low, high, f"a TMA store of {agent.name}")
    for region in regions:
        if region.write is not None and not region.write.fenced:
            raise ProtocolFault("early read", f"a TMA store reads what {region.write.agent} has not fenced")
    number, store = memory.begin_read(low, high, f"a TMA store of {agent.name}"), Store()
    agent.storing.append(store)
    machine.stored(agent, target.tag, [region.tag for region in regions])

    def end():
        memory.end_read(number)
        store.reading = False
        agent.reads_done.changed()

    machine.after(machine.timing.delay("store", agent.cta.name), end)


def write_buffer(agent, source, target):
    """Each agent of a consumer writes its part of a buffer."""
    agent.pause()
    consumer = agent.tidx // 128 - 1
    low, high = (target.part(consumer, target.shape[0] // 64) if target.shape[0] > 64 else target).range()
    number, of = agent.ordinal
    step = (high - low) // of
    end = high if number == of - 1 else low + (number + 1) * step
    write = Write(agent.name)
    agent.cta.memory.write(low + number * step, end, ("C", source[0]), write)
    agent.unfenced.append(write)


def write_workspace(agent, source, target):
    """Visible to others some time, or when a thread fences that knows of it."""
    values = [source[i] for i in range(target.count)]
    memory, index = target.pointer.memory, target.pointer.index
    memory.check(index)
    memory.check(index + target.count - 1)
    done = []

    def land():
        if not done:
            done.append(True)
            for i, value in enumerate(values):
                memory.values[index + i] = value

    machine.after(machine.timing.delay("global write", agent.name), land)
    agent.observed.add(land)


def read_workspace(agent, source, target):
    agent.pause("global read")
    for i in range(source.count):
        value = source.pointer.memory.values.get(source.pointer.index + i)
        if value is None:
            raise ProtocolFault("early read", f"{agent.name} reads partial sums that nobody has written")
        target[i] = value


def autovec_copy(source, target):
    machine.agent.pause()
    for i in range(source.count):
        target[i] = source[i]


def gemm(mma, acc, a, b, c):
    agent = machine.agent
    agent.pause()
    agent.warpgroup.issue(agent, agent.multiplied, acc.owner, (a.range(), b.range()), not mma.accumulates)
    agent.multiplied += 1


class Mma:
    """A wgmma; views of a warpgroup's part of an operand are the operand."""

    accumulates = True

    def set(self, field, value):
        self.accumulates = value

    def get_slice(self, _):
        return self

    def partition_A(self, tensor):
        return tensor

    partition_B = partition_C = partition_D = partition_S = make_fragment_A = make_fragment_B = retile = partition_A

    def partition_shape_C(self, shape):
        return LANES_OF_ELEMENT * max(1, cluster_k * shape[1] // machine.config.tile_n)


# ---- cute.arch
class Arch(Opaque):
    def thread_idx(self):
        return machine.agent.tidx, 0, 0

    def block_idx(self):
        return machine.agent.cta.index, 0, 0

    def block_idx_in_cluster(self):
        return machine.agent.cta.rank

    def warp_idx(self):
        return machine.agent.warp

    def make_warp_uniform(self, value):
        return value

    def elect_one(self):
        return machine.agent.alone()

    def mbarrier_init(self, pointer, count):
        machine.agent.cta.barrier(pointer.address).init(count)

    def mbarrier_wait(self, pointer, parity):
        agent = machine.agent
        agent.pause()
        barrier = agent.cta.barrier(pointer.address)
        barrier.wait(
            agent, lambda: barrier.passes(parity), lambda: f"{barrier.name}, parity {parity} in phase {barrier.phase}"
        )

    def mbarrier_arrive(self, pointer, rank=None):
        agent = machine.agent
        agent.pause()
        count = agent.threads
        if rank is None or int(rank) == agent.cta.rank:
            agent.cta.barrier(pointer.address).arrive(count)
            return
        cta = machine.peer(agent.cta, rank)

        agent.sent += 1

        def arrive():
            cta.check_present(f"an arrival of {agent.name}")
            cta.barrier(pointer.address).arrive(count)
            agent.sent -= 1
            agent.sent_performed.changed()

        machine.after(machine.timing.delay("remote arrival", agent.name), arrive)

    def mbarrier_arrive_and_expect_tx(self, pointer, count):
        agent = machine.agent
        agent.pause()
        agent.cta.barrier(pointer.address).arrive(agent.threads, int(count))

    def barrier(self, barrier_id, number_of_threads):
        agent = machine.agent
        agent.pause()
        barrier = agent.cta.named.setdefault(int(barrier_id), NamedBarrier())
        turn = barrier.arrive(agent, number_of_threads)
        barrier.wait(agent, lambda: barrier.turn > turn, lambda: f"named barrier {barrier_id}")

    def barrier_arrive(self, barrier_id, number_of_threads):
        agent = machine.agent
        agent.pause()
        agent.cta.named.setdefault(int(barrier_id), NamedBarrier()).arrive(agent, number_of_threads)

    def sync_threads(self):
        self.barrier(0, sum(agent.threads for agent in machine.agent.cta.agents))

    def cluster_arrive(self):
        """Releases: what the agent has sent is performed before."""
        agent = machine.agent
        agent.sent_performed.wait(agent, lambda: agent.sent == 0, lambda: "its arrivals to be performed")
        self.cluster_arrive_relaxed()

    def cluster_arrive_relaxed(self):
        agent = machine.agent
        agent.pause()
        first = agent.cta.index - agent.cta.rank
        barrier = machine.cluster_barriers.setdefault(first, NamedBarrier())
        threads = sum(a.threads for cta in machine.ctas[first : first + machine.cluster] for a in cta.agents)
        agent.cluster_turn = barrier.arrive(agent, threads)

    def cluster_wait(self):
        agent = machine.agent
        barrier = machine.cluster_barriers[agent.cta.index - agent.cta.rank]
        barrier.wait(agent, lambda: barrier.turn > agent.cluster_turn, lambda: "the cluster's barrier")

    def fence_proxy(self, *_, **__):
        agent = machine.agent
        for write in agent.unfenced:
            write.fenced = True
        agent.unfenced = []

    def fence_acq_rel_gpu(self):
        """What this agent has written, and what it learned of by barriers, is visible to all."""
        agent = machine.agent
        agent.pause("fence")
        for land in agent.observed:
            land()
        agent.observed = set()

    def atomic_add(self, pointer, value, sem, scope):
        if sem == "acq_rel":
            self.fence_acq_rel_gpu()
        machine.agent.pause("atomic")
        pointer.memory.check(pointer.index)
        before = pointer.memory.values.get(pointer.index, 0)
        pointer.memory.values[pointer.index] = before + value
        return before

    def cp_async_bulk_commit_group(self):
        agent = machine.agent
        agent.stores.append(agent.storing)
        agent.storing = []

    def cp_async_bulk_wait_group(self, count, read):
        agent = machine.agent
        agent.pause()

        def done():
            groups = agent.stores[: len(agent.stores) - count]
            return not any(store.reading for group in groups for store in group)

        agent.reads_done.wait(agent, done, lambda: "its TMA stores")

    def store_async_dsmem(self, pointer, vector, barrier, rank):
        agent = machine.agent
        agent.pause()
        cta, threads, values = machine.peer(agent.cta, rank), agent.threads, list(vector)

        def land():
            cta.check_present(f"a sum of {agent.name}")
            for i, value in enumerate(values):
                cta.memory.words[pointer.address + 4 * i] = value
            cta.barrier(barrier.address).landed(4 * len(values) * threads)

        machine.after(machine.timing.delay("dsmem", agent.name), land)

    def inline_ptx(self, text, *, write_only_types=(), read_only_args=()):
        return read_only_args[0] if write_only_types else None


class WarpgroupOps(Opaque):
    Field = SimpleNamespace(ACCUMULATE="accumulate")

    def make_smem_layout_atom(self, kind, dtype):
        return dtype

    def commit_group(self):
        agent = machine.agent
        agent.groups.append(agent.multiplied)

    def wait_group(self, count):
        agent = machine.agent
        agent.pause()
        if len(agent.groups) > count:
            wanted, group = agent.groups[len(agent.groups) - 1 - count], agent.warpgroup
            group.wait(agent, lambda: group.ended >= wanted, lambda: "its wgmma")


class Prepared:
    """A kernel and its arguments."""

    def __init__(self, body):
        self.body = body

    def launch(self, grid, block, cluster=(1, 1, 1), **_):
        machine.run_kernel(self.body, grid[0], block[0] // 128, cluster[0])


def kernel(function):
    return lambda self, *given: Prepared(lambda: function(self, *given))


ARCH = Arch()
WARPGROUP_OPS = WarpgroupOps()
HELPERS = SimpleNamespace(
    make_smem_layout_a=lambda major, tile, dtype, stages: SharedLayout((tile[0], tile[2]), dtype, stages),
    make_smem_layout_b=lambda major, tile, dtype, stages: SharedLayout((tile[1], tile[2]), dtype, stages),
    get_smem_layout_atom=Opaque(),
    make_trivial_tiled_mma=lambda *_: Mma(),
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
    arch=ARCH,
    jit=lambda function: function,
    kernel=kernel,
    Tensor=object, CopyAtom=object, ComposedLayout=object, TiledMma=object, Pointer=object,
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
    select=lambda layout, mode: SimpleNamespace(shape=tuple(layout.shape[i] for i in mode)),
    shape=tuple_of,
    size=size,
    size_in_bytes=lambda dtype, layout: layout.unit * layout.count,
    slice_=lambda layout, _: SharedLayout(layout.shape, layout.dtype, 1),
    tile_to_shape=tile_to_shape,
)  # fmt: skip
CUTLASS = SimpleNamespace(
    Constexpr=object, cute=CUTE, const_expr=bool, max=max, min=min,
    range=lambda *bounds, **_: range(*bounds), range_constexpr=range, **NUMERICS,
)  # fmt: skip
MODULES = {
    "cutlass": CUTLASS,
    "cutlass.cute": CUTE,
    "cutlass.cute.nvgpu": SimpleNamespace(
        CopyG2ROp=Opaque, CopyR2GOp=Opaque, LoadCacheMode=Opaque(), StoreCacheMode=Opaque(), cpasync=CPASYNC,
        warp=Opaque(), warpgroup=WARPGROUP_OPS, OperandMajorMode=Opaque(),
    ),
    "cutlass.memory": SimpleNamespace(SmemAllocator=Allocator),
    "cutlass.tensor_utils": SimpleNamespace(LayoutEnum=Opaque()),
    "cutlass.utils": SimpleNamespace(hopper_helpers=HELPERS),
}  # fmt: skip


# ---- what follows the product, of which a protocol sees only when it asks for what was fetched
class Steps:
    def __init__(self, k, config, work, width):
        pass

    def outputs(self, end=None):
        pass

    def x(self, half, end=None):
        pass


def values_of(k, which):
    return Registers([k.acc[0], k.acc[k.acc.count - 1]])


def finished(k, values, come):
    if k.form.fetched:
        values[0] = (values[0], come().fetched)


def in_registers(k, config, width, steps):
    return Registers([k.acc[i] for i in range(k.acc.count)])


TRANSFORM = SimpleNamespace(
    Steps=Steps, finished=finished, in_registers=in_registers, registers=lambda *_: None,
    store_sums=lambda k, config, work, steps: k.acc[0], values_of=values_of, warm=lambda k, work: None,
)  # fmt: skip


def store_pieces(k, gC, cC, shape, width, cache):
    """Registers straight to C."""
    agent, config = machine.agent, machine.config
    share, columns = getattr(k, "share", k.consumer), getattr(k, "width", config.tile_n)
    if agent.tidx % 128 == 0:
        for i in range(config.tile_m // (64 * config.sharing)):
            row = gC.offset[0] + (i * config.sharing + share) * 64
            machine.stored(agent, ("C", (row, *gC.offset[1:])), [("C", k.acc[0])], columns)


# ---- the kernels' modules
def load(patches=None):
    """The modules of `hopper/` over this DSL, by name, made as they are asked for. `patches`: of a module's source,
    pairs of what to replace, all of it, and by what.
    """
    patches = patches or {}
    made: dict[str, ModuleType] = {}

    def find(name):
        if name == "transform":
            return TRANSFORM
        if name in PLAIN:
            return __import__(f"outblas.hopper.{name}", fromlist=["_"])
        if name not in made:
            module = made[name] = ModuleType(f"outblas.hopper.{name}")
            path = FOLDER / f"{name}.py"
            source = path.read_text(encoding="utf-8")
            for old, new in patches.get(name, ()):
                assert old in source, f"{name}.py has no {old!r}"
                source = source.replace(old, new)
            module.__package__ = "outblas.hopper"
            module.__file__ = str(path)
            module.__dict__["__builtins__"] = vars(builtins) | {"__import__": imported}
            exec(compile(source, str(path), "exec"), module.__dict__)
            after(name, module)
        return made[name]

    def after(name, module):
        if name == "sync":
            module.Ring.settle = lambda self: None  # compares what one trace has of all roles
        if name == "roles":
            module.store_pieces = store_pieces
        if name == "staging":
            module.rounded = lambda k, config, i, j: Registers([k.acc[0]])

    def imported(name, scope=None, local=None, wanted=(), level=0):
        if level == 0 and name.split(".")[0] == "cutlass":
            return MODULES[name] if wanted else CUTLASS
        if level == 1 and not name:
            return SimpleNamespace(**{each: find(each) for each in wanted})
        if level == 1:
            return find(name)
        return builtins.__import__(name, scope, local, wanted, level)

    return find


assert real_config.WARPGROUP == 128
