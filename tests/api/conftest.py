"""What tests of fused models share."""

from typing import Any

import pytest
import torch

from outblas.patching import gated


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The activations of the GEMMs that fused MLPs compute."""
    activations: list[str | None] = []
    linear = gated.linear

    def recording(*operands: Any, activation: Any) -> torch.Tensor:
        activations.append(activation)
        return linear(*operands, activation=activation)

    monkeypatch.setattr(gated, "linear", recording)
    return activations
