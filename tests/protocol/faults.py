"""Faults to plant in the kernels' source, which the model has to find.

Each says what goes wrong, the schedule in which it does, and what to change: the module, its text,
and what to put in its place.
"""

from typing import NamedTuple


class Change(NamedTuple):
    module: str
    old: str
    new: str


class Fault(NamedTuple):
    what: str
    schedule: str
    changes: tuple[Change, ...]


# As they were shipped.
FETCH_ALONE = (
    Change(
        "fetched",
        "        if cutlass.const_expr(issues):\n            ring.await_empty(slot)\n",
        "        ring.await_empty(slot)\n        if cutlass.const_expr(issues):\n",
    ),
    Change("fetched", '    cute.arch.inline_ptx(f"barrier.sync {LOADERS}, {2 * 32};")\n', ""),
)
TURN_EARLY = (
    Change(
        "gemm",
        "            fetched.await_full(k, config, self.stored, ring, slot)\n",
        "            pass\n",
    ),
)

FAULTS = (
    Fault("the turn passes before the addend has landed", "pingpong, addend fetched", TURN_EARLY),
    Fault(
        "the turn passes before the addend has landed, as was shipped",
        "pingpong, addend fetched",
        TURN_EARLY + FETCH_ALONE,
    ),
    Fault(
        "a warp waits for stages that nothing of it holds",
        "staggered turns, residual fetched",
        FETCH_ALONE,
    ),
    Fault(
        "a warp skips stages that it does not know to be empty",
        "pingpong, one k tile",
        FETCH_ALONE[1:],
    ),
    Fault(
        "the turn passes before the products",
        "pingpong",
        (
            Change(
                "gemm",
                "        part, own = width // config.cluster_k, mine\n",
                "        part, own = width // config.cluster_k, mine\n"
                "        if config.pingpong:\n"
                "            other = TURN + 1 - k.consumer\n"
                "            cute.arch.barrier_arrive(barrier_id=other, number_of_threads=2 * "
                "WARPGROUP)\n",
            ),
            Change(
                "gemm",
                "if cutlass.const_expr(config.pingpong or self.form.in_turn):\n            "
                "cute.arch.barrier_arrive(",
                "if cutlass.const_expr(self.form.in_turn):\n            cute.arch.barrier_arrive(",
            ),
        ),
    ),
    Fault(
        "nobody gives the first turn",
        "pingpong",
        (Change("gemm", "            self.give_first_turn(k)\n", "            pass\n"),),
    ),
    Fault(
        "consumers skip one stage too few",
        "pingpong",
        (
            Change(
                "gemm",
                "slot = ring.skip(slot, k.slots_a_tile)",
                "slot = ring.skip(slot, k.slots_a_tile - 1)",
            ),
        ),
    ),
    Fault(
        "phases do not turn over in a skip",
        "pingpong",
        (Change("sync", "slot.phase ^ (turns & 1))", "slot.phase)"),),
    ),
    Fault(
        "consumers do not wait for a stage",
        "cooperative",
        (
            Change(
                "roles",
                "    for _ in cutlass.range(rest, unroll=1):\n        ring.wait(slot)\n",
                "    for _ in cutlass.range(rest, unroll=1):\n",
            ),
        ),
    ),
    Fault(
        "the loading warp of B does not wait for a stage",
        "cooperative",
        (
            Change(
                "loads",
                "        ring.await_empty(slot)\n",
                "        if announces:\n            ring.await_empty(slot)\n",
            ),
        ),
    ),
    Fault(
        "consumers wait for the other phase",
        "cooperative",
        (
            Change(
                "sync",
                "mbarrier_wait(self.full + slot.index, slot.phase)",
                "mbarrier_wait(self.full + slot.index, slot.phase ^ 1)",
            ),
        ),
    ),
    Fault(
        "loading warps wait for the other phase",
        "cooperative",
        (
            Change(
                "group_ring",
                "        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)\n"
                "\n"
                "    @cute.jit\n"
                "    def release",
                "        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase)\n"
                "\n"
                "    @cute.jit\n"
                "    def release",
            ),
        ),
    ),
    Fault(
        "phases do not turn over",
        "cooperative",
        (Change("sync", "(slot.phase ^ 1) if wrapped else slot.phase", "slot.phase"),),
    ),
    Fault(
        "a stage is released before its products are done",
        "cooperative",
        (
            Change(
                "roles",
                "        ring.release(previous if cutlass.const_expr(in_flight > 0) else "
                "slot.index)",
                "        ring.release(slot.index)",
            ),
        ),
    ),
    Fault(
        "the last stage is not released",
        "cooperative",
        (
            Change(
                "roles",
                "        warpgroup.wait_group(0)\n        ring.release(previous)\n",
                "        warpgroup.wait_group(0)\n",
            ),
        ),
    ),
    Fault(
        "accumulators are stored before the last product is done",
        "cooperative",
        (
            Change(
                "roles",
                "        warpgroup.wait_group(0)\n        ring.release(previous)\n",
                "        ring.release(previous)\n",
            ),
        ),
    ),
    Fault(
        "one arrival too few is expected",
        "multicast",
        (Change("group_ring", 'contract["empty"])', 'contract["empty"] - 1)'),),
    ),
    Fault(
        "one arrival too many is expected",
        "cooperative",
        (Change("group_ring", 'contract["empty"])', 'contract["empty"] + 1)'),),
    ),
    Fault(
        "a peer is not told of a release",
        "multicast",
        (Change("group_ring", "if lane < self.cluster:", "if lane < self.cluster - 1:"),),
    ),
    Fault(
        "CTAs do not meet before they load",
        "multicast",
        (Change("gemm", "        self.meet()\n", ""),),
    ),
    Fault(
        "a CTA ends while peers still arrive",
        "multicast",
        (Change("gemm", "            ring.close(slot)\n", "            pass\n"),),
    ),
    Fault(
        "a CTA ends while its stores read shared memory",
        "cooperative",
        (Change("gemm", "        self.leave()\n", ""),),
    ),
    Fault(
        "more bytes are announced than land",
        "cooperative",
        (
            Change(
                "sync",
                "self.tx_bytes if tx_bytes is None",
                "self.tx_bytes + 16 if tx_bytes is None",
            ),
        ),
    ),
    Fault(
        "a buffer of C is written while a store reads it",
        "cooperative",
        (
            Change(
                "epilogue",
                "            await_buffers(k)\n        for n",
                "            pass\n        for n",
            ),
        ),
    ),
    Fault(
        "stores are issued before all have written",
        "cooperative",
        (
            Change(
                "epilogue",
                '        cute.arch.fence_proxy("async.shared", space="cta")\n'
                "        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)",
                '        cute.arch.fence_proxy("async.shared", space="cta")',
            ),
        ),
    ),
    Fault(
        "stores are issued without a fence",
        "cooperative",
        (Change("epilogue", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),),
    ),
    Fault(
        "C goes over stages that the other consumer still reads",
        "cooperative, one tile",
        (Change("gemm", "            epilogue.settle(k, self.stored)\n", "            pass\n"),),
    ),
    Fault(
        "what was fetched is read before it lands",
        "addend fetched",
        (
            Change(
                "fetched",
                "    if cutlass.const_expr(number % per == 0):\n        ring.wait(slot)\n",
                "",
            ),
        ),
    ),
    Fault(
        "an addend leaves its stage before all have read it",
        "addend fetched",
        (
            Change(
                "fetched",
                "    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)\n   "
                " ring.release",
                "    ring.release",
            ),
        ),
    ),
    Fault(
        "C is stored over an addend that has not been fetched",
        "elastic columns, addend in place",
        (
            Change(
                "fetched",
                "            ring.wait(turns[(number + 1) // per])\n",
                "            pass\n",
            ),
        ),
    ),
    Fault(
        "slots that a narrow tile leaves empty are not released",
        "elastic columns, few to a stage",
        (
            Change(
                "epilogue",
                "        fetched.skip(k, whole, config, ring, turns, len(slabs))",
                "        pass",
            ),
        ),
    ),
    Fault(
        "a consumer keeps its turn",
        "staggered turns",
        (
            Change(
                "gemm",
                "if cutlass.const_expr(config.pingpong or self.form.in_turn):\n            "
                "cute.arch.barrier_arrive(",
                "if cutlass.const_expr(config.pingpong):\n            cute.arch.barrier_arrive(",
            ),
        ),
    ),
    Fault(
        "sums of the cluster are read before they land",
        "cluster-K",
        (Change("exchange", "    cute.arch.mbarrier_wait(landed, turn & 1)\n", ""),),
    ),
    Fault(
        "sums of the cluster are awaited in one phase for ever",
        "cluster-K",
        (
            Change(
                "exchange",
                "    cute.arch.mbarrier_wait(landed, turn & 1)\n",
                "    cute.arch.mbarrier_wait(landed, 0)\n",
            ),
        ),
    ),
    Fault(
        "sums are sent before the peer has read the last ones",
        "cluster-K",
        (Change("exchange", "        await_free(free, turn)\n", "        pass\n"),),
    ),
    Fault(
        "a peer too few has to be free",
        "cluster-K",
        (Change("exchange", "config.cluster_k - 1)\n", "config.cluster_k - 2)\n"),),
    ),
    Fault(
        "fewer sums are announced than land",
        "cluster-K",
        (
            Change(
                "exchange",
                "landed, (parts - 1) * count * WARPGROUP * 4)",
                "landed, (parts - 2) * count * WARPGROUP * 4)",
            ),
        ),
    ),
    Fault(
        "partial sums are counted before they are written",
        "split-K",
        (
            Change("pieces", "        cute.arch.fence_acq_rel_gpu()\n", ""),
            Change("pieces", 'sem="acq_rel"', 'sem="relaxed"'),
        ),
    ),
    Fault(
        "partial sums of one warp are not waited for",
        "split-K",
        (
            Change(
                "pieces",
                "    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)\n   "
                " said = k.said",
                "    said = k.said",
            ),
        ),
    ),
    Fault(
        "a counter is left for the next call",
        "split-K",
        (
            Change(
                "pieces",
                "            counters[work.shared * k.parts + k.part] = Int32(0)\n",
                "            pass\n",
            ),
        ),
    ),
    Fault(
        "whoever comes before the last adds up",
        "split-K",
        (
            Change(
                "pieces",
                "    last = said[k.consumer] == work.pieces - 1",
                "    last = said[k.consumer] == work.pieces - 2",
            ),
        ),
    ),
    Fault(
        "two tiles have one place for their sums",
        "stream-K, five clusters",
        (
            Change(
                "work", "            place = begins_in + shared ", "            place = begins_in "
            ),
        ),
    ),
)
