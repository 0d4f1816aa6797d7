"""What tests of batch-invariance share."""

import pytest

from outblas.call import invariance


@pytest.fixture
def no_context_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no context of batch-invariance had been entered, and so after the test: under torch
    2.11 no compiled call keeps one graph once one has been.
    """
    monkeypatch.setattr(invariance.flag, "ever", False)
