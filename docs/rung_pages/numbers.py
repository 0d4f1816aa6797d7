"""What follows from a rung's config: the fields that it changes, its tiles, its FLOP per byte."""

from __future__ import annotations

from .source import Rung

Row = tuple[str, str, str]
_NONE = "–"
# What the first rung of a ladder shows of its config; later rungs show what they change.
_FIRST = {
    "simt": ("block_m", "block_n", "warp_m", "warp_n", "thread_m", "thread_n"),
    "turing": ("block_m", "block_n", "block_k", "warps_m", "warps_n", "vector"),
    "hopper": ("tile_m", "tile_n", "tile_k", "stages", "order"),
}


def config_rows(own: Rung, parent: Rung | None) -> list[Row]:
    """Fields of the config that differ from the parent's, with both values."""
    now = own.config
    if parent is None or parent.kernel.ladder != own.kernel.ladder:
        return [(f"`{name}`", _NONE, str(now[name])) for name in _FIRST[own.kernel.ladder]]
    before = parent.config
    return [
        (f"`{name}`", str(before[name]), str(value))
        for name, value in now.items()
        if value != before[name]
    ]


def number_rows(own: Rung, parent: Rung | None) -> list[Row]:
    """Tiles, threads and FLOP per byte of a rung, beside its parent's."""
    now = _numbers(own)
    before = _numbers(parent) if parent is not None else {}
    return [(name, before.get(name, _NONE), value) for name, value in now.items()]


def _numbers(rung: Rung) -> dict[str, str]:
    config = {name: value for name, value in rung.config.items() if isinstance(value, int)}
    if rung.kernel.ladder == "turing":
        return _turing(config, staged=rung.body[1] != "direct")
    return _simt(config) if rung.kernel.ladder == "simt" else _hopper(config)


def _simt(c: dict[str, int]) -> dict[str, str]:
    staged = c["block_k"] > 1
    warps = (c["block_m"] // c["warp_m"]) * (c["block_n"] // c["warp_n"])
    m, n = c["thread_m"], c["thread_n"]
    return {
        "tile of a CTA": f"{c['block_m']}×{c['block_n']}",
        "terms of a k-block": str(c["block_k"]) if staged else _NONE,
        "outputs of a warp": f"{c['warp_m']}×{c['warp_n']}",
        "outputs of a thread": f"{m}×{n}",
        "threads of a CTA": str(32 * warps),
        "values read from shared memory for an FMA": f"{(m + n) / (m * n):.3g}"
        if staged
        else _NONE,
        "FLOP for a byte of A and B": _intensity(c["block_m"], c["block_n"], 4)
        if staged
        else _NONE,
    }


def _turing(c: dict[str, int], *, staged: bool) -> dict[str, str]:
    m, n = c["block_m"], c["block_n"]
    warp_m, warp_n = m // c["warps_m"], n // c["warps_n"]
    loaded = (m, n) if staged else (warp_m, warp_n)  # together, by a CTA or by each warp alone
    return {
        "tile of a CTA": f"{m}×{n}",
        "terms of a k-block": str(c["block_k"]),
        "outputs of a warp": f"{warp_m}×{warp_n}",
        "threads of a CTA": str(32 * c["warps_m"] * c["warps_n"]),
        "stages": str(c["stages"]) if staged else _NONE,
        "FLOP for a byte of A and B": _intensity(*loaded, 2),
    }


def _hopper(c: dict[str, int]) -> dict[str, str]:
    m, n, k = c["tile_m"], c["tile_n"], c["tile_k"]
    return {
        "tile of a CTA": f"{m}×{n}",
        "terms of a k tile": str(k),
        "outputs of a consumer warpgroup": f"{m // c['consumers']}×{n}",
        "stages": f"{c['stages']} of {(m + n) * k * 2 // 1024} KiB",
        "FLOP for a byte from L2": _intensity(m * c["cluster_m"], n * c["cluster_n"], 2),
    }


def _intensity(m: int, n: int, size: int) -> str:
    """FLOP for each byte that one tile, or the tiles of a cluster, read of A and B."""
    return f"{2 * m * n / ((m + n) * size):.3g}"
