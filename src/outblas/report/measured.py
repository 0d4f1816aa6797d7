"""Claims of the seed documents that a measurement settles: the speed of every rung that runs on their GPU."""

from __future__ import annotations

from ..shapes import Shape
from . import seeds
from .claims import CONFIRMED, DIFFERS, NOT_MEASURED, Claim, Finding
from .results import Measurement, Measurements
from .seeds import Figure

WITHIN = 0.05  # TFLOP/s of one GPU model vary by more than this with its temperature, ratios by less


def find(
    measurements: Measurements, provider: str, shape: Shape, dtype: str, gpu: str, *, mode: str = "burst"
) -> Measurement | None:
    """The newest timing of a provider in its own configuration, B stored N×K, on a model of GPU, or None."""
    wanted = provider, "", shape, dtype, gpu, mode, "nt"
    found = [
        m
        for m in measurements
        if (m.provider, m.config, m.shape, m.dtype, m.gpu, m.mode, m.layout) == wanted and m.ratio is not None
    ]
    newest = max((str(m.environment.get("date", "")) for m in found), default="")
    return next((m for m in reversed(found) if str(m.environment.get("date", "")) == newest), None)


def speed(figure: Figure) -> Claim:
    """TFLOP/s on the same model of GPU."""
    assert figure.tflops is not None
    assert figure.n is not None
    low, high = figure.tflops
    n = figure.n

    def test(measurements: Measurements) -> Finding:
        ours = find(measurements, figure.rung, (n, n, n), figure.dtype, figure.gpu)
        if ours is None or ours.tflops is None:
            return NOT_MEASURED
        agrees = low * (1 - WITHIN) <= ours.tflops <= high * (1 + WITHIN)
        return Finding(f"{ours.tflops:.0f} TFLOP/s", CONFIRMED if agrees else DIFFERS, ours.tflops)

    text = f"{figure.rung} reaches {low:g} TFLOP/s at {n}"
    return Claim(figure.source, text, f"burst on an {figure.gpu}", test)


def share(figure: Figure) -> Claim:
    """The ratio to cuBLAS, which is not the cuBLAS of the document."""
    claimed = figure.stated or figure.ratio
    assert claimed is not None
    assert figure.n is not None
    low, high = claimed
    n = figure.n

    def test(measurements: Measurements) -> Finding:
        ours = find(measurements, figure.rung, (n, n, n), figure.dtype, figure.gpu)
        if ours is None or ours.ratio is None:
            return NOT_MEASURED
        agrees = low * (1 - WITHIN) <= ours.ratio <= high * (1 + WITHIN)
        beside = f" of CUDA {ours.environment.get('cuda', '?')}'s"
        return Finding(f"{ours.ratio:.1%}{beside}", CONFIRMED if agrees else DIFFERS, ours.ratio)

    stated = " to ".join(
        f"{100 * value:.3g}%" if value < 1 else f"{100 * value:.4g}%"
        for value in ((low,) if low == high else (low, high))
    )
    return Claim(figure.source, f"{figure.rung} reaches {stated} of cuBLAS at {n}", "the same rounds", test)


def _claims() -> tuple[Claim, ...]:
    found = []
    for figure in seeds.FIGURES:
        if figure.gpu == "H100" and figure.n is not None and figure.rung.startswith("hopper."):
            found += [speed(figure)] if figure.tflops is not None else []
            found += [share(figure)] if figure.ratio is not None else []
    return tuple(found)


CLAIMS: tuple[Claim, ...] = _claims()
