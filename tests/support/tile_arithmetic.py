"""The tile arithmetic of hopper.gemm on Python's integers."""

from __future__ import annotations  # handed on by compile() to the scheduler's source

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from outblas.device import raster
from outblas.hopper.core import tile_order
from outblas.hopper.core.config import HopperConfig
from outblas.hopper.gemm import records, tile_scheduler


class Word(int):
    """A 32-bit integer that is never more."""

    def __divmod__(self, other: int) -> tuple[Word, Word]:
        quotient, remainder = divmod(int(self), int(other))
        return Word(quotient), Word(remainder)


@pytest.fixture(scope="module")
def arithmetic():
    """The scheduler's own source on Python's integers: what the DSL would trace is computed
    instead.
    """
    tree = ast.parse(Path(tile_scheduler.__file__).read_text(encoding="utf-8"))
    dsl = SimpleNamespace(const_expr=bool, min=min, max=max, Constexpr=object)
    made = {"cutlass": dsl, "cute": SimpleNamespace(jit=lambda function: function), "Int32": Word}
    made |= {"NamedTuple": NamedTuple, "dataclass": dataclass, "__name__": tile_scheduler.__name__}
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, tile_scheduler.__file__, "exec"), made)
    return SimpleNamespace(**made)


def launch(
    config: HopperConfig, M: int, N: int, K: int, batch: int = 0, fit: int = 132, order: str = ""
) -> tile_scheduler.TileScheduler:
    """What the kernel has of a call on a GPU where so many clusters fit, as the host and
    `Gemm.__call__` make it.
    """
    tiles_m, tiles_n = tile_order.cluster_tiles(config, M, N)
    tiles, k_tiles = tiles_m * tiles_n * max(batch, 1), -(-K // config.tile_k)
    pieces = min(config.split_k, k_tiles)
    columns, narrow = tile_order.columns(config, N), config.tile_n - 8
    clusters = min(fit, tiles * (k_tiles if config.stream_k else pieces))
    single_wave, table = tiles * pieces <= fit and not config.stream_k, None
    if order == "dealt":  # a tile each, of any matrix, in any order that has them all
        table = (
            [Word(tile) for tile in reversed(range(tiles))]
            if single_wave and not config.split
            else None
        )
    elif order:
        steps = raster.schedule(order, tiles_m, tiles_n, fit, 8, 8)
        table = [Word(tile) for step in steps for tile in step]
    line = tiles_m if table is None else tiles_n
    wide = min(max(-(-(N - columns * narrow) // 8), 0), columns) if config.variable_tile_n else 0
    params = tile_scheduler.ScheduleParams(
        divmods=tile_scheduler.FastDivmods(*map(Word, (line, tiles_m * tiles_n, clusters, pieces))),
        tiles=Word(tiles),
        wide_columns=Word(wide),
        k_tiles=Word(k_tiles),
        table=table,
        partitions=Word(pieces),
        clusters=Word(clusters),
    )
    return tile_scheduler.TileScheduler(
        params,
        cluster=Word(0),
        coord=coord(),
        table_entry=None,
        columns=config.tile_n,
        batched=batch > 0,
        single_wave=single_wave,
    )


def coord(m=0, n=0, k=0):
    """Where a CTA stands in its cluster."""
    return records.ClusterCoord(Word(m), Word(n), None, None, Word(k), Word(0), Word(0))
