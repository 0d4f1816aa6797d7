"""Host timing: the layout of a checkout for it, and when a call is slower than another's."""

from pathlib import Path

import pytest

from tools import host, host_calls


@pytest.mark.parametrize(
    ("here", "there", "word"),
    [
        ([2.0, 2.1, 2.2, 2.1], [1.0, 1.1, 1.2, 1.1], "slower"),
        ([1.0, 1.1, 1.2, 1.1], [2.0, 2.1, 2.2, 2.1], "faster"),
        ([1.00, 1.01, 1.02, 1.01], [1.03, 1.04, 1.05, 1.04], "as fast"),
        ([1.0, 3.0, 1.0, 3.0], [1.0, 1.5, 2.0, 1.6], "as fast"),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_spread(
    here: list[float], there: list[float], word: str
) -> None:
    assert host.verdict(here, there) == word


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a checkout of outblas"):
        host.package_path(tmp_path)


def test_every_pair_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.call import launcher

    monkeypatch.setattr(launcher, "no_kernel_reason", launcher.no_kernel_reason)
    monkeypatch.setattr(launcher, "best_launcher", launcher.best_launcher)

    for ours, theirs in host_calls.pairs().values():
        ours()
        theirs()
