"""The chart of a campaign: ratio to cuBLAS by shape, then TFLOP/s and pJ/FLOP against N."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.shapes import to_text
from . import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
_STYLES = {"sustained": "--", "cold": ":"}
VERSIONS = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the chart of a bench report to a file. Raises ValueError when it holds no figures."""
    plotting.save(figure(report), path)


def figure(report: dict[str, Any]) -> Figure:
    """The chart of a bench report. Raises ValueError when it holds no figures."""
    results = [r for r in report["results"] if r.get("ratio") is not None]
    if not results:
        raise ValueError("the report holds no figures to draw")
    labels = list(dict.fromkeys(label(r) for r in results))
    colours = plotting.colours(labels)
    squares = [r for r in results if len(set(r["shape"])) == 1]
    energy = [r for r in squares if r.get("pj_per_flop") is not None]
    panels = 1 + bool(squares) + bool(energy)
    groups = list(dict.fromkeys(_group(r) for r in results))
    canvas, axes = plotting.canvas(
        panels, (max(8.0, 0.5 + 0.28 * len(groups) * len(labels)), 3.4 * panels)
    )
    _ratios(axes[0], results, groups, labels, colours)
    if squares:
        _against_n(axes[1], squares, labels, colours, "tflops", "TFLOP/s")
    if energy:
        _against_n(axes[-1], energy, labels, colours, "pj_per_flop", "pJ/FLOP")
    e = report["environment"]
    versions = "".join(f", {name} {e[key]}" for name, key in VERSIONS if e.get(key))
    canvas.suptitle(f"{e['gpu']}, {results[0]['dtype']}{versions}")
    return canvas


def label(result: Result) -> str:
    """The provider, with the config that it ran in where that is not its own."""
    return (
        f"{result['provider']}[{result['config']}]" if result["config"] else str(result["provider"])
    )


def _group(result: Result) -> tuple[str, str, str]:
    product = result.get("product") or ""
    shape = f"{to_text(tuple(result['shape']))} {product}".strip()
    return shape, result["layout"], result["mode"]


def _ratios(
    axis: Any,
    results: list[Result],
    groups: list[tuple[str, str, str]],
    labels: list[str],
    colours: dict[str, str],
) -> None:
    """Draws bars by shape, with whiskers from the 10th to the 90th percentile; cuBLAS is the line
    at 1.
    """
    shown = [name for name in labels if name != "cublas"]
    width = 0.8 / max(1, len(shown))
    for i, name in enumerate(shown):
        own = {_group(r): r for r in results if label(r) == name}
        at = [(x, own[g]) for x, g in enumerate(groups) if g in own]
        places = [x - 0.4 + width * (i + 0.5) for x, _ in at]
        heights = [r["ratio"] for _, r in at]
        whiskers = [
            [r["ratio"] - r["ratio_low"] for _, r in at],
            [r["ratio_high"] - r["ratio"] for _, r in at],
        ]
        axis.bar(
            places,
            heights,
            width * 0.92,
            yerr=whiskers,
            capsize=2,
            color=colours[name],
            label=name,
            ecolor="#444",
        )
    axis.axhline(1.0, color=plotting.BASE_COLOUR, linewidth=1.2, label="cublas")
    axis.set_xticks(range(len(groups)), [_tick(g, groups) for g in groups], rotation=30, ha="right")
    axis.set_ylabel("× cuBLAS (above 1 is faster)")
    axis.legend(frameon=False, ncols=4, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1.0))


def _tick(group: tuple[str, str, str], groups: list[tuple[str, str, str]]) -> str:
    """The shape, with the layout and the mode where these differ between groups."""
    extra = [group[i] for i in (1, 2) if len({g[i] for g in groups}) > 1]
    return " ".join([group[0], *extra])


def _against_n(
    axis: Any,
    results: list[Result],
    labels: list[str],
    colours: dict[str, str],
    key: str,
    unit: str,
) -> None:
    """Draws a line for each provider, layout and mode over square products."""
    lines = list(dict.fromkeys((label(r), r["layout"], r["mode"]) for r in results))
    for name, layout, mode in lines:
        points = sorted(
            (r["shape"][0], r[key])
            for r in results
            if (label(r), r["layout"], r["mode"]) == (name, layout, mode)
        )
        style = _STYLES.get(mode, "-") if key == "tflops" else "-"
        axis.plot(
            *zip(*points, strict=True),
            style,
            marker="o",
            markersize=4,
            color=colours[name],
            label=name,
        )
    axis.set_xscale("log", base=2)
    sizes = sorted({r["shape"][0] for r in results})
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.minorticks_off()
    axis.set_xlabel("N, square products")
    axis.set_ylabel(unit)
    axis.set_ylim(bottom=0)
