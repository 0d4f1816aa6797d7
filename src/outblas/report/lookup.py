"""Finds a timing or a profile by provider, shape and config."""

from ..core.registry import layout_of
from ..core.shapes import Shape
from .profiles import Profile, Profiles
from .results import Measurement, Measurements


def find(
    measurements: Measurements,
    provider: str,
    shape: Shape,
    dtype: str,
    gpu: str,
    *,
    mode: str = "burst",
    config: str = "",
    layout: str | None = None,
) -> Measurement | None:
    """Returns the newest timing of a provider's bare product on a GPU model, or None.

    `config` names the fields that differ from the provider's defaults, in any order. The default
    `layout` is that of the provider's ladder.
    """
    wanted = provider, _changes(config), shape, dtype, gpu, mode, layout or layout_of(provider)
    found = [
        m
        for m in measurements
        if (m.provider, _changes(m.config), m.shape, m.dtype, m.gpu, m.mode, m.layout) == wanted
        and m.ratio is not None
        and m.is_plain
    ]
    newest = max((str(m.environment.get("date", "")) for m in found), default="")
    return next((m for m in reversed(found) if str(m.environment.get("date", "")) == newest), None)


def profiled(
    profiles: Profiles,
    provider: str,
    shape: Shape,
    dtype: str,
    gpu: str,
    *,
    config: str = "",
    layout: str | None = None,
    addend: bool = False,
) -> Profile | None:
    """Returns the last profile of a provider on a GPU model, or None; `config` and `layout` are as
    for `find`.
    """
    wanted = provider, _changes(config), shape, dtype, gpu, layout or layout_of(provider), addend
    found = (
        p
        for p in reversed(profiles)
        if (p.provider, _changes(p.config), p.shape, p.dtype, p.gpu, p.layout, p.addend) == wanted
    )
    return next(found, None)


def _changes(config: str) -> frozenset[str]:
    return frozenset(filter(None, config.split(",")))
