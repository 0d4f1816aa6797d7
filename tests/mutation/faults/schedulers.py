"""Faults in who computes which tile, which part of K, and where it runs."""

from ..fault import Check, Fault

WORK = (Check("test_tile_scheduler.py"),)
RASTER = (Check("test_raster.py"),)
PLACEMENT = (Check("test_gpc_placement.py"),)
SCHEDULE = (Check("test_schedule.py"), Check("hopper/core"), Check("hopper/gemm"))
GRID = (Check("test_tile_schedule.py"),)

_SCHEDULER = "hopper/gemm/tile_scheduler.py"
_RASTER = "src/outblas/device/raster.py"
_PLACEMENT = "hopper/gemm/gpc_placement.py"
_HOST = "hopper/gemm/schedule.py"
_ORDER = "hopper/core/tile_order.py"

FAULTS = (
    Fault(
        "tile_count_rounded_down",
        _SCHEDULER,
        "return (items - scheduler.cluster + params.clusters - 1) // params.divmods.clusters",
        "return (items - scheduler.cluster) // params.divmods.clusters",
        WORK,
        "Clusters leave out the tiles of the last wave.",
    ),
    Fault(
        "tile_one_further",
        _SCHEDULER,
        "index = step * params.clusters + scheduler.cluster",
        "index = step * params.clusters + scheduler.cluster + 1",
        WORK,
        "Every cluster computes the tile after its own.",
    ),
    Fault(
        "tile_rows_and_columns_swapped",
        _SCHEDULER,
        "n, m = divmod(index, params.divmods.line)",
        "m, n = divmod(index, params.divmods.line)",
        WORK,
        "Without a table, rows of tiles are taken for columns.",
    ),
    Fault(
        "cluster_rows_overlap",
        _SCHEDULER,
        "m = m * config.cluster_m + coord.cta_m_in_cluster",
        "m = m + coord.cta_m_in_cluster",
        WORK,
        "Clusters of two rows begin at every row of tiles.",
    ),
    Fault(
        "batch_by_columns_of_tiles",
        _SCHEDULER,
        "matrix, index = divmod(index, params.divmods.matrix)",
        "matrix, index = divmod(index, params.divmods.line)",
        WORK,
        "A matrix of a batch ends after one line of its tiles.",
    ),
    Fault(
        "narrow_tile_begins_late",
        _SCHEDULER,
        "column -= 8 * cutlass.max(n - params.wide_columns, 0)",
        "column -= 8 * cutlass.max(n - params.wide_columns - 1, 0)",
        WORK,
        "Of a variable tile N, every narrow tile but the first begins 8 columns late.",
    ),
    Fault(
        "narrow_tile_is_wide",
        _SCHEDULER,
        "if n >= params.wide_columns:",
        "if n > params.wide_columns:",
        WORK,
        "Of a variable tile N, the first narrow tile has the greater width.",
    ),
    Fault(
        "split_k_partition_lost",
        _SCHEDULER,
        "items = params.tiles * params.partitions if",
        "items = params.tiles * (params.partitions - 1) if",
        WORK,
        "Split-K computes one partition too few.",
    ),
    Fault(
        "split_k_ends_early",
        _SCHEDULER,
        "count = (part + 1) * params.k_tiles // params.divmods.partitions - begin",
        "count = params.k_tiles // params.divmods.partitions",
        WORK,
        "Split-K drops the k tiles that partitions do not share evenly.",
    ),
    Fault(
        "split_k_workspace_shared",
        _SCHEDULER,
        "workspace_index = tile * params.partitions",
        "workspace_index = tile",
        WORK,
        "Partial sums of neighbouring tiles have one place in the workspace.",
    ),
    Fault(
        "cluster_k_ends_early",
        _SCHEDULER,
        "count = (part + 1) * k_tiles // config.cluster_k - begin",
        "count = k_tiles // config.cluster_k",
        WORK,
        "A cluster that shares K drops the k tiles that its CTAs do not share evenly.",
    ),
    Fault(
        "stream_k_ends_early",
        _SCHEDULER,
        "count = cutlass.min(end - low, params.k_tiles) - begin",
        "count = cutlass.min(end - low, params.k_tiles - 1) - begin",
        WORK,
        "Stream-K drops the last k tile of a tile that it cuts.",
    ),
    Fault(
        "stream_k_workspace_shared",
        _SCHEDULER,
        "workspace_index = begins_in + split_tile",
        "workspace_index = begins_in",
        WORK,
        "Two tiles that stream-K cuts have one place for their partial sums.",
    ),
    Fault(
        "variable_columns_one_short",
        _ORDER,
        "return narrow + (narrow * config.tile_n < N)",
        "return narrow",
        WORK,
        "Of a variable tile N, there is one column of tiles too few.",
    ),
    Fault(
        "cluster_tile_rows_rounded_down",
        _ORDER,
        "return -(-M // (config.tile_m * config.cluster_m)), ",
        "return max(1, M // (config.tile_m * config.cluster_m)), ",
        GRID,
        "The grid of cluster tiles leaves out the last rows of C.",
    ),
    Fault(
        "waves_balanced_into_one_more",
        _ORDER,
        "fewest = -(-tiles // -(-tiles // clusters))",
        "fewest = tiles // -(-tiles // clusters)",
        SCHEDULE,
        "So few clusters are launched that the tiles take another wave.",
    ),
    Fault(
        "stream_k_workspace_too_small",
        _HOST,
        "places = launched + cut_tiles if config.stream_k else grid.work_tiles",
        "places = launched if config.stream_k else grid.work_tiles",
        SCHEDULE,
        "The workspace of stream-K has no room for the tiles that two clusters begin and end.",
    ),
    Fault(
        "split_k_counters_too_few",
        _HOST,
        "counters=max(cut_tiles, 1) * warpgroups,",
        "counters=max(cut_tiles, 1),",
        GRID,
        "The workspace has one counter a tile, where each warpgroup counts by itself.",
    ),
    Fault(
        "serpentine_band_lost",
        _RASTER,
        "for band, top in enumerate(range(0, rows, group_m)):",
        "for band, top in enumerate(range(0, max(1, rows - group_m + 1), group_m)):",
        RASTER,
        "The serpentine order leaves out the last band where it is not whole.",
    ),
    Fault(
        "hilbert_corner_off",
        _RASTER,
        "last = corner + (length - 1) * along + (arm - 1) * across",
        "last = corner + (length - 1) * along + arm * across",
        RASTER,
        "The last arm of the Hilbert curve begins one tile too far.",
    ),
    Fault(
        "consecutive_runs_overlap",
        _RASTER,
        "starts = [w * length + min(w, longer) for w in range(workers)]",
        "starts = [w * length for w in range(workers)]",
        RASTER,
        "Runs of consecutive tiles begin as if all were equally long.",
    ),
    Fault(
        "gpc_order_inverted",
        _PLACEMENT,
        "of_cluster[cluster] = tile",
        "of_cluster[tile] = cluster",
        PLACEMENT,
        "Clusters get the inverse of the order that makes GPC-local tiles neighbours.",
    ),
    Fault(
        "gpc_fallback_grid_swapped",
        _PLACEMENT,
        'tiles = raster.order("column", self.rows, self.columns)',
        'tiles = raster.order("row", self.rows, self.columns)',
        PLACEMENT,
        "Where probes fail, tiles go along the rows of the grid.",
    ),
    Fault(
        "gpcs_not_merged",
        _PLACEMENT,
        "parent[found] = min(roots)",
        "parent[found] = found",
        PLACEMENT,
        "SMs that clusters connect are taken for SMs of different GPCs.",
    ),
    Fault(
        "probes_need_not_agree",
        _PLACEMENT,
        "if first == second and len(set(first)) == len(first):",
        "if len(set(first)) == len(first):",
        PLACEMENT,
        "One probe is believed, though the next sees clusters elsewhere.",
    ),
)
