"""Reading and checking result files of `outblas profile`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.reports import Entry, counted, invoke, loaded, report

from outblas.report import profiles, results


def test_the_gpu_of_a_profile_has_its_short_name() -> None:
    (profile,) = loaded(counted("cublas")).profiles

    assert profile.provider == "cublas"
    assert profile.gpu == "H100"


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        pytest.param(counted("cublas"), {}, id="none asked for"),
        pytest.param(
            counted("hopper.persistent", "order=hilbert,group_m=2"),
            {"order": "hilbert", "group_m": "2"},
            id="asked for",
        ),
        pytest.param(
            counted("hopper.persistent", "order=row", resolved="tile_m=128,order=row,sms=128"),
            {"tile_m": "128", "order": "row", "sms": "128"},
            id="that ran",
        ),
    ],
)
def test_settings_are_those_that_ran_or_those_asked_for(
    entry: Entry, settings: dict[str, str]
) -> None:
    (profile,) = loaded(entry).profiles

    assert profile.settings == settings


@pytest.fixture(
    params=[
        pytest.param(
            ([], "expected an object with environment and results, as outblas profile writes"),
            id="no object",
        ),
        pytest.param(
            (
                report(counted("x"), counted("x", l2_hit_rate=1.5)),
                "results[1].l2_hit_rate is 1.5, expected a number from 0 to 1",
            ),
            id="rate above 1",
        ),
        pytest.param(
            (
                report({"provider": "x", "dtype": "y", "layout": "nt"}),
                "results[0] has no l2_hit_rate",
            ),
            id="no rate",
        ),
        pytest.param(
            (
                report(counted("x", "order")),
                "results[0].config is 'order', expected name=value,...",
            ),
            id="config",
        ),
        pytest.param(
            (report(counted("x", resolved=3)), "results[0].resolved is 3, expected text"),
            id="resolved",
        ),
        pytest.param((report(counted("x", us=-1)), "results[0].us is -1"), id="us"),
        pytest.param((report(counted("x", shape=[1])), "results[0].shape is [1]"), id="shape"),
    ]
)
def malformed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A file, and what is wrong with it."""
    content, message = request.param
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    return path, message


def test_what_is_wrong_with_a_profile_is_told_by_file_and_field(
    malformed: tuple[Path, str],
) -> None:
    path, message = malformed

    with pytest.raises(ValueError, match=re.escape(f"bad.json: {message}")):
        profiles.load([path])


def test_a_malformed_profile_is_an_error_of_usage(malformed: tuple[Path, str]) -> None:
    path, _ = malformed

    invoke("raster", "--results", path, code=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results of a checkout: a profile, a bench, and something else."""
    contents: dict[str, Any] = {
        "profile.json": report(counted("cublas")),
        "bench.json": {"environment": {"gpu": "x"}, "results": []},
        "other.json": [1],
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_profiles_are_told_from_other_files(folder: Path) -> None:
    assert profiles.default_files() == [folder / "profile.json"]


def test_benches_are_told_from_other_files(folder: Path) -> None:
    assert results.default_files() == [folder / "bench.json"]


def test_an_installed_package_reads_the_results_that_it_carries(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "outblas"

    assert results.own_folder(package) == package / "results"


def test_a_checkout_reads_the_results_in_its_root(tmp_path: Path) -> None:
    package = tmp_path / "src" / "outblas"
    package.mkdir(parents=True)
    (tmp_path / "results").mkdir()

    assert results.own_folder(package) == tmp_path / "results"


def test_without_results_of_the_project_the_option_to_pass_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)

    with pytest.raises(
        ValueError, match="--results is missing, expected files that `outblas bench"
    ):
        results.default_files()
