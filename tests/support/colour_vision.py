"""How colours look to readers with and without colour vision deficiencies, and how far apart."""

import math
from types import MappingProxyType

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
_VISIONS = MappingProxyType(
    {
        "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        "protanopia": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "deuteranopia": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881),
        ),
        "tritanopia": (
            (1.255528, -0.076749, -0.178779),
            (-0.078411, 0.930809, 0.147602),
            (0.004733, 0.691367, 0.303900),
        ),
    }
)
VISIONS = tuple(_VISIONS)
_WHITE = (0.95047, 1.0, 1.08883)
_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def distance(first: str, second: str, vision: str) -> float:
    """The difference of two colours in CIELAB (CIE 1976): about 2 is just noticeable."""
    return math.dist(_lab(first, vision), _lab(second, vision))


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, as WCAG defines it: from 1 to 21."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _linear(colour: str) -> tuple[float, ...]:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)


def _luminance(colour: str) -> float:
    return sum(c * v for c, v in zip(_XYZ[1], _linear(colour), strict=True))


def _lab(colour: str, vision: str) -> tuple[float, float, float]:
    linear = _linear(colour)
    seen = [
        min(1.0, max(0.0, sum(c * v for c, v in zip(row, linear, strict=True))))
        for row in _VISIONS[vision]
    ]
    x, y, z = (
        _cube_root(sum(c * v for c, v in zip(row, seen, strict=True)) / white)
        for row, white in zip(_XYZ, _WHITE, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _cube_root(value: float) -> float:
    return value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116
