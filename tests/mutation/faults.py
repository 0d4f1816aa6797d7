"""Faults of barriers, stages and partial sums of the Hopper kernels, beside those that
tests/protocol plants in its model.
"""

from pathlib import Path
from typing import NamedTuple


class StaleFault(Exception):
    """A fault that the sources have outgrown: its text is gone, or there more than once."""


class Check(NamedTuple):
    """The tests that have to find a fault.

    file: the base name of a file, wherever it lies below tests/.
    select: what `pytest -k` takes of it; all tests where it is empty.
    """

    file: str
    select: str = ""

    def path(self, tests: Path) -> Path:
        """The file of this name. Raises StaleFault unless there is exactly one."""
        files = sorted(tests.rglob(self.file))
        if len(files) != 1:
            raise StaleFault(f"{self.file} stands {len(files)} times below {tests}, expected one")
        return files[0]


class Fault(NamedTuple):
    """One text of a source file, replaced by another.

    file: the source file, from the folder of the package that the faults are of.
    old, new: the text, which the file has exactly once, and what takes its place.
    check: the tests of which one has to fail.
    what: a sentence that says what goes wrong, unique among all faults, for `--only`.
    """

    file: str
    old: str
    new: str
    check: Check
    what: str

    def planted(self, folder: Path) -> str:
        """The file's text with the fault in it. Raises StaleFault where the fault does not fit."""
        path = folder / self.file
        if not path.is_file():
            raise StaleFault(f"{self.what} there is no {path}")
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise StaleFault(
                f"{self.what} {path} has its text {source.count(self.old)} times, "
                f"expected once:\n{self.old}"
            )
        return source.replace(self.old, self.new)


# `not planted`: tests that plant faults in the same sources would miss the text to replace.
SCHEDULES = Check("test_protocol.py", "(cooperative or consumer) and not planted")
MULTICAST = Check("test_protocol.py", "multicast and not planted")
BATCHES = Check("test_protocol.py", "batch_runs_clean")
FETCHED = Check("test_protocol.py", "fetched and not planted")
DELAYS = Check("test_protocol.py", "one_kind_of_delay")
ELASTIC = Check("test_protocol.py", "elastic and not planted")
TURNS = Check("test_protocol.py", "staggered and not planted")
PINGPONG = Check("test_protocol.py", "pingpong and not planted")
CLUSTER_K = Check("test_protocol.py", "cluster-K and not planted")
SPLIT_K = Check("test_protocol.py", "(split-K or stream-K) and not planted")
SUMS = Check("test_splitk_reduce.py")
RUNGS = Check("test_protocol.py", "rung_of_the_ladder")
SCHEDULER = Check("test_tile_scheduler.py")
GROUP_SCALES = Check("test_grouped_protocol.py", "scales and not planted")
GROUP_SCALES_ANYWHERE = Check("test_grouped_protocol.py", "anywhere")
GROUP_STORES = Check("test_grouped_protocol.py", "(epilogue or registers) and not planted")

FAULTS = (
    Fault(
        "parts/roles.py",
        "    if cutlass.const_expr(in_flight > 0 or overwrite):\n"
        "        pipeline.consumer_wait(state)\n",
        "    if cutlass.const_expr(in_flight > 0 or overwrite):\n",
        SCHEDULES,
        "Consumers do not wait for the first stage of a tile.",
    ),
    Fault(
        "parts/pipeline.py",
        "wrapped = index == self.stages",
        "wrapped = index == self.stages - 1",
        SCHEDULES,
        "The last stage of the pipeline is never used by who advances step by step.",
    ),
    Fault(
        "gemm/pipeline.py",
        "                cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)\n",
        "                cute.arch.mbarrier_wait(self.empty + state.index, state.phase)\n",
        MULTICAST,
        "The producer's tail waits for a phase that never ends.",
    ),
    Fault(
        "gemm/pipeline.py",
        "for first in cutlass.range_constexpr(0, self.stages, 4):",
        "for first in cutlass.range_constexpr(0, self.stages - 3, 4):",
        SCHEDULES,
        "The barriers of the last stages are not initialised.",
    ),
    Fault(
        "gemm/pipeline.py",
        'cute.arch.mbarrier_init(self.empty + stage, counts["empty"])',
        'cute.arch.mbarrier_init(self.empty + stage, max(counts["empty"] - 1, 1))',
        SCHEDULES,
        "A stage counts as empty one arrival before all have read it.",
    ),
    Fault(
        "gemm/tma_load.py",
        "        if cutlass.const_expr(announces and scales is None):\n"
        "            pipeline.arrive_and_expect_tx(state)\n",
        "        pipeline.arrive_and_expect_tx(state)\n",
        SCHEDULES,
        "Both warps that load arrive at a stage that expects one arrival.",
    ),
    Fault(
        "gemm/tma_load.py",
        "        pipeline.producer_acquire(state)\n"
        "        if cutlass.const_expr(announces and scales is None):\n",
        "        if cutlass.const_expr(announces and scales is None):\n",
        SCHEDULES,
        "Stages are filled before they are empty.",
    ),
    Fault(
        "gemm/tma_load.py",
        "k_tile = begin + i + backwards * (count - 1 - 2 * i)",
        "k_tile = begin + i + backwards * (count - 2 * i)",
        SCHEDULES,
        "Backwards along K, every k tile is the one after it.",
    ),
    Fault(
        "gemm/tma_load.py",
        "cta.coord.mask_b",
        "cta.coord.mask_a",
        MULTICAST,
        "B is multicast to the CTAs that share A.",
    ),
    Fault(
        "gemm/tma_load.py",
        "load_of_columns(cta, (work.column, 0), (work.matrix,) * self.traits.batched)",
        "load_of_columns(cta, (work.column + 8, 0), (work.matrix,) * self.traits.batched)",
        SCHEDULES,
        "The tensor map of B begins 8 columns too far.",
    ),
    Fault(
        "gemm/tma_load.py",
        "loads.tAgA[None, work.m, None, work.matrix]",
        "loads.tAgA[None, work.m, None, 0]",
        BATCHES,
        "Every matrix of a batch multiplies the first A.",
    ),
    Fault(
        "gemm/epilogue_load.py",
        "work, epilogue_config.tile_n, number)\n        state = pipeline.advance(state)\n",
        "work, epilogue_config.tile_n, number)\n"
        "        state = pipeline.advance(state) if cutlass.const_expr(issues) else state\n",
        FETCHED,
        "The warp that does not load the source goes on with the source's stages.",
    ),
    Fault(
        "gemm/epilogue_load.py",
        "state, len(batch) * consumers * subtile_bytes(epilogue_config, size)",
        "state, len(batch) * subtile_bytes(epilogue_config, size)",
        FETCHED,
        "Of the source's bytes those of one consumer are announced.",
    ),
    Fault(
        "gemm/epilogue_load.py",
        "    if cutlass.const_expr((number + 1) % per == 0 or ends):\n",
        "    if cutlass.const_expr((number + 1) % per == 0):\n",
        FETCHED,
        "The last stage of a tile's source is not released where it is not full.",
    ),
    Fault(
        "gemm/epilogue_load.py",
        "    for each in stage_states(source, pipeline, state):\n",
        "    for each in stage_states(source, pipeline, state)[:1]:\n",
        DELAYS,
        "In pingpong the turn passes when the first stage of the source has landed.",
    ),
    Fault(
        "gemm/epilogue_load.py",
        "for state in states[-(-count // per) :]:",
        "for state in states[-(-count // per) + 1 :]:",
        ELASTIC,
        "A narrow tile keeps the first of the source's stages that it leaves empty.",
    ),
    Fault(
        "gemm/consumer.py",
        "    following = 1 - consumer.index\n",
        "    following = consumer.index\n",
        TURNS,
        "In the ordered sequence a consumer gives the turn to itself.",
    ),
    Fault(
        "gemm/consumer.py",
        "barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=2 * WARPGROUP",
        "barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=WARPGROUP",
        TURNS,
        "A consumer's own threads complete the named barrier on which it awaits its turn.",
    ),
    Fault(
        "gemm/consumer.py",
        "first, stride = consumer.index, 2",
        "first, stride = consumer.index, 1",
        PINGPONG,
        "In pingpong each consumer takes every tile from its first on.",
    ),
    Fault(
        "gemm/consumer.py",
        "stages_per_tile = cta.scheduler.params.k_tiles + cta.source_stages",
        "stages_per_tile = cta.scheduler.params.k_tiles",
        PINGPONG,
        "In pingpong a consumer passes over the other's k tiles, and not over its source.",
    ),
    Fault(
        "gemm/consumer.py",
        "    for _ in cutlass.range_constexpr(cta.source_stages):\n",
        "    for _ in cutlass.range_constexpr(0):\n",
        FETCHED,
        "A consumer takes the source's stages for those of the next tile.",
    ),
    Fault(
        "gemm/consumer.py",
        "own = work._replace(column=work.column + cta.coord.cta_k_in_cluster * width)",
        "own = work._replace(column=work.column)",
        CLUSTER_K,
        "All CTAs that share K store their part of the columns at the first one's.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "for p in cutlass.range(partition.total, unroll=",
        "for p in cutlass.range(partition.total - 1, unroll=",
        SPLIT_K,
        "Of small tiles whoever comes last adds all partial sums but those of the last partition.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "add_partial(reduction, acc, 0, partition.workspace_index + p, stride)",
        "add_partial(reduction, acc, 0, partition.workspace_index, stride)",
        SPLIT_K,
        "Of small tiles whoever comes last adds the first partition's sums over and over.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "range(partition.index + 1, partition.total, unroll=1)",
        "range(partition.index + 1, partition.total - 1, unroll=1)",
        SPLIT_K,
        "Of large tiles whoever comes last leaves out the sums of the last partition.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "for p in cutlass.range(partition.index, unroll=1):",
        "for p in cutlass.range(partition.index - 1, -1, -1):",
        SUMS,
        "Partitions before the own one are added in the reverse order of K.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "            before.fill(0.0)\n",
        "            before.fill(-0.0)\n",
        SUMS,
        "A sum of negative zeros is a negative one, if the first partition comes last.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "Float32(0.0) + received[v] + ",
        "received[v] + ",
        SUMS,
        "A sum of negative zeros is a negative one, if the second partition comes last.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "seen == partition.total - 1)",
        "seen >= 0)",
        SPLIT_K,
        "Nobody writes partial sums: each takes the others for done.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "return partition.split_tile * reduction.units + reduction.unit",
        "return partition.split_tile * reduction.units",
        SPLIT_K,
        "Warpgroups that share a tile count on one counter.",
    ),
    Fault(
        "gemm/splitk_reduce.py",
        "return reduction.arrived[consumer.index] == partition.total - 1",
        "return reduction.arrived[0] == partition.total - 1",
        SPLIT_K,
        "Every consumer goes by how many came before the first one.",
    ),
    Fault(
        "gemm/cluster_reduce.py",
        "cute.arch.mbarrier_wait(free, (iteration - 1) & 1)",
        "cute.arch.mbarrier_wait(free, iteration & 1)",
        CLUSTER_K,
        "Sums are sent to a peer that may still read those of the tile before.",
    ),
    Fault(
        "gemm/cluster_reduce.py",
        "sender = own - 1 if own > part else own",
        "sender = 0",
        CLUSTER_K,
        "All peers send their sums to one place.",
    ),
    Fault(
        "gemm/cluster_reduce.py",
        "peer = cta.coord.multicast_rank + part * cta.config.multicast_size",
        "peer = cta.coord.multicast_rank + part",
        CLUSTER_K,
        "In a cluster that also multicasts, sums go to CTAs of another tile.",
    ),
    Fault(
        "gemm/cluster_reduce.py",
        "    if peer and again:\n",
        "    if peer:\n",
        CLUSTER_K,
        "After the last tile CTAs arrive at barriers of peers that have ended.",
    ),
    Fault(
        "persistent.py",
        "            count -= 1\n",
        "            count -= 0\n",
        RUNGS,
        "A CTA of the ladder computes tile -1 where it has none left.",
    ),
    Fault(
        "persistent.py",
        "return tile // cta.grid.tiles_n, tile % cta.grid.tiles_n",
        "return tile % cta.grid.tiles_n, tile // cta.grid.tiles_n",
        RUNGS,
        "The ladder takes columns of the table's tiles for rows.",
    ),
    Fault(
        "cluster_multicast.py",
        "        if lane < self.cluster:\n",
        "        if lane < 1:\n",
        RUNGS,
        "Of a cluster's CTAs only the first hears that a stage is empty.",
    ),
    Fault(
        "gemm/tile_scheduler.py",
        "items = params.tiles * params.partitions if",
        "items = params.tiles * (params.partitions - 1) if",
        SCHEDULER,
        "Split-K computes one partition too few.",
    ),
    Fault(
        "gemm/tile_scheduler.py",
        "count = (part + 1) * params.k_tiles // params.divmods.partitions - begin",
        "count = params.k_tiles // params.divmods.partitions",
        SCHEDULER,
        "Split-K drops the k tiles that partitions do not share evenly.",
    ),
    Fault(
        "gemm/tile_scheduler.py",
        "workspace_index = tile * params.partitions",
        "workspace_index = tile",
        SCHEDULER,
        "Partial sums of neighbouring tiles have one place in the workspace.",
    ),
    Fault(
        "gemm/tile_scheduler.py",
        "count = (part + 1) * k_tiles // config.cluster_k - begin",
        "count = k_tiles // config.cluster_k",
        SCHEDULER,
        "A cluster that shares K drops the k tiles that its CTAs do not share evenly.",
    ),
    Fault(
        "gemm/tile_scheduler.py",
        "count = cutlass.min(end - low, params.k_tiles) - begin",
        "count = cutlass.min(end - low, params.k_tiles - 1) - begin",
        SCHEDULER,
        "Stream-K drops the last k tile of a tile that it cuts.",
    ),
    Fault(
        "gemm/block_scales.py",
        "    return replace(cta, scales=cta.scheduler.scales_of(cta.scales, work))\n",
        "    return cta\n",
        GROUP_SCALES,
        "A work tile of a group has the scales of the whole call.",
    ),
    Fault(
        "gemm/block_scales.py",
        "row += work.first_row(cta.config.tile_m) % GRANULE",
        "row += 0",
        GROUP_SCALES_ANYWHERE,
        "Rows of a group that begins between multiples of 4 have the scales of others.",
    ),
    Fault(
        "gemm/epilogue_store.py",
        "elif cutlass.const_expr(work.end_row is not None):",
        "elif cutlass.const_expr(work.end_row is not None and not stores.aux):",
        GROUP_STORES,
        "TMA stores x of a tile that reaches into the next group.",
    ),
    Fault(
        "gemm/consumer.py",
        "        extents = (work.end_row, extents[1])\n",
        "        pass\n",
        GROUP_STORES,
        "Ragged columns are stored over those of the next group.",
    ),
)
