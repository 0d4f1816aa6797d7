"""Claims of the seed documents that a measurement settles: the speed of every rung that runs on their GPU."""

from __future__ import annotations

from collections.abc import Callable

from ..shapes import Shape
from . import seeds
from .claims import CONFIRMED, DIFFERS, NOT_MEASURED, Claim, Evidence, Finding
from .profiles import Profile, Profiles
from .results import Measurement, Measurements
from .seeds import Figure

WITHIN = 0.05  # TFLOP/s of one GPU model vary by more than this with its temperature, ratios by less


def find(
    measurements: Measurements,
    provider: str,
    shape: Shape,
    dtype: str,
    gpu: str,
    *,
    mode: str = "burst",
    config: str = "",
) -> Measurement | None:
    """The newest timing of a provider, B stored N×K, on a model of GPU, or None.

    `config` names what differs from the provider's own, in any order.
    """
    wanted = provider, _changes(config), shape, dtype, gpu, mode, "nt"
    found = [
        m
        for m in measurements
        if (m.provider, _changes(m.config), m.shape, m.dtype, m.gpu, m.mode, m.layout) == wanted and m.ratio is not None
    ]
    newest = max((str(m.environment.get("date", "")) for m in found), default="")
    return next((m for m in reversed(found) if str(m.environment.get("date", "")) == newest), None)


def profiled(profiles: Profiles, provider: str, shape: Shape, dtype: str, gpu: str) -> Profile | None:
    """The last profile of a provider in its own configuration, B stored N×K, on a model of GPU, or None."""
    wanted = provider, "", shape, dtype, gpu, "nt"
    found = (p for p in reversed(profiles) if (p.provider, p.config, p.shape, p.dtype, p.gpu, p.layout) == wanted)
    return next(found, None)


def speed(figure: Figure) -> Claim:
    """TFLOP/s on the same model of GPU."""
    assert figure.tflops is not None
    stated = f"{figure.tflops[0]:g} TFLOP/s"
    return _reaches(
        figure, figure.tflops, stated, f"burst on an {figure.gpu}", lambda m: (m.tflops, f"{m.tflops:.0f} TFLOP/s")
    )


def share(figure: Figure) -> Claim:
    """The ratio to cuBLAS, which is not the cuBLAS of the document."""
    claimed = figure.stated or figure.ratio
    assert claimed is not None
    percents = (f"{100 * value:.3g}%" if value < 1 else f"{100 * value:.4g}%" for value in dict.fromkeys(claimed))
    return _reaches(
        figure,
        claimed,
        f"{' to '.join(percents)} of cuBLAS",
        "the same rounds",
        lambda m: (m.ratio, f"{m.ratio:.1%} of CUDA {m.environment.get('cuda', '?')}'s"),
    )


def _reaches(
    figure: Figure,
    claimed: tuple[float, float],
    stated: str,
    how: str,
    read: Callable[[Measurement], tuple[float | None, str]],
) -> Claim:
    """That the figure's rung lies in the claimed range; `read` gives our value and its words."""
    n = figure.n
    assert n is not None
    low, high = claimed

    def test(evidence: Evidence) -> Finding:
        ours = find(evidence.measurements, figure.rung, (n, n, n), figure.dtype, figure.gpu)
        value, words = read(ours) if ours else (None, "")
        if value is None:
            return NOT_MEASURED
        agrees = low * (1 - WITHIN) <= value <= high * (1 + WITHIN)
        return Finding(words, CONFIRMED if agrees else DIFFERS, value)

    return Claim(figure.source, f"{figure.rung} reaches {stated} at {n}", how, test)


def _changes(config: str) -> frozenset[str]:
    return frozenset(filter(None, config.split(",")))


def _claims() -> tuple[Claim, ...]:
    found = []
    for figure in seeds.FIGURES:
        if figure.gpu == "H100" and figure.n is not None and figure.rung.startswith("hopper."):
            found += [speed(figure)] if figure.tflops is not None else []
            found += [share(figure)] if figure.ratio is not None else []
    return tuple(found)


CLAIMS: tuple[Claim, ...] = _claims()
