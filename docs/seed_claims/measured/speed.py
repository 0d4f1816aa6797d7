"""Claims on the speed of every rung that runs on the document's GPU."""

from collections.abc import Callable

from outblas.core.registry import dtype_of
from outblas.report import seed_figures
from outblas.report.evidence import Evidence
from outblas.report.lookup import find
from outblas.report.results import Measurement
from outblas.report.seed_figures import Figure

from ..claim import Claim, Finding
from ..compare import GPU, in_range


def speed(figure: Figure) -> Claim:
    """The claim that a rung reaches the document's TFLOP/s on the same model of GPU."""
    assert figure.tflops is not None
    stated = f"{figure.tflops[0]:g} TFLOP/s"
    return _reaches(
        figure,
        figure.tflops,
        stated,
        f"burst on an {figure.gpu}",
        lambda m: (m.tflops, f"{m.tflops:.0f} TFLOP/s"),
    )


def share(figure: Figure) -> Claim:
    """The claim that a rung reaches the document's share of cuBLAS. Ours is another version of
    cuBLAS.
    """
    claimed = figure.stated or figure.ratio
    assert claimed is not None
    percents = (
        f"{100 * value:.3g}%" if value < 1 else f"{100 * value:.4g}%"
        for value in dict.fromkeys(claimed)
    )
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
    """The claim that a figure of the rung lies in a range; `read` gives our value and its words."""
    n = figure.n
    assert n is not None
    usual = dtype_of(figure.rung)
    operands = "" if figure.dtype == usual else f" with {figure.dtype} operands"

    def test(evidence: Evidence) -> Finding:
        ours = find(evidence.measurements, figure.rung, (n, n, n), figure.dtype, figure.gpu)
        value, words = read(ours) if ours else (None, "")
        return in_range(value, claimed, words)

    return Claim(figure.source, f"{figure.rung} reaches {stated} at {n}{operands}", how, test)


def _claims() -> tuple[Claim, ...]:
    found = []
    for figure in seed_figures.FIGURES:
        if figure.gpu == GPU and figure.n is not None:
            found += [speed(figure)] if figure.tflops is not None else []
            found += [share(figure)] if figure.ratio is not None else []
    return tuple(found)


CLAIMS: tuple[Claim, ...] = _claims()
