"""`outblas report accesses`, and the README's tables of accesses to memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.access_profiles import in_global, in_shared, profile
from support.reports import invoke, rendered, shown, write
from support.simt_reports import BOTH_CONFLICT

pytestmark = pytest.mark.compile
# The loads of simt.vectorized whose loads and stores conflict, as predicted of a launch at 4096.
INSTRUCTIONS, WAVEFRONTS, IDEAL = 1024 * 8 * 512 * 32, 671_088_640, 402_653_184
WITHOUT_CONFLICTS = in_shared("load", INSTRUCTIONS, IDEAL, IDEAL)
AS_PREDICTED = in_shared("load", INSTRUCTIONS, WAVEFRONTS, IDEAL)


# ---- the command
@pytest.fixture(scope="module")
def ncu_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a profile whose loads have no conflicts, although some are predicted."""
    entry = profile("simt.vectorized", BOTH_CONFLICT, [WITHOUT_CONFLICTS])
    return write(tmp_path_factory.mktemp("profiles") / "ncu.json", entry)


@pytest.fixture(scope="module")
def printed_and_saved(
    ncu_json: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """What one run of the command prints, and the record that it saves."""
    path = tmp_path_factory.mktemp("report") / "accesses.json"
    printed = shown("accesses", "--results", ncu_json, "--save", path)
    return printed, json.loads(path.read_text())


@pytest.fixture(scope="module")
def printed(printed_and_saved: tuple[str, dict[str, Any]]) -> str:
    """What the command prints."""
    return printed_and_saved[0]


@pytest.fixture(scope="module")
def saved(printed_and_saved: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The record that the command saves."""
    return printed_and_saved[1]


def test_what_is_printed_is_no_wider_than_140_columns(printed: str) -> None:
    assert max(map(len, printed.splitlines())) <= 140


def test_millions_of_wavefronts_are_printed_beside_those_that_ncu_counted(printed: str) -> None:
    assert "671.1 / 402.7" in printed


def test_the_profiled_config_is_the_first_of_the_record(saved: dict[str, Any]) -> None:
    first = saved["conflicts"][0]

    assert (first["config"], first["gpu"]) == ("piece_n=8,pad=0", "H100")
    assert first["within"] is False


def test_the_record_has_the_wavefronts_of_each_operand(saved: dict[str, Any]) -> None:
    of_b = saved["conflicts"][0]["operands"]["B"]

    assert of_b == {"instructions": 16, "wavefronts": 128, "ideal": 64, "excess": 64}


def test_the_record_has_what_gluon_counts(saved: dict[str, Any]) -> None:
    assert saved["conflicts"][0]["bank_conflicts"] == {"A": 0, "B": 1}


def test_the_record_has_predictions_without_a_measurement(saved: dict[str, Any]) -> None:
    others = saved["conflicts"][2:]

    assert {row["measured"] for row in others} == {None}


def test_the_record_has_the_global_accesses_of_three_kernels(saved: dict[str, Any]) -> None:
    accesses = [row["access"] for row in saved["coalescing"]]

    assert accesses == ["A load", "B load", "out store"] * 3


def test_json_prints_what_is_saved(saved: dict[str, Any], ncu_json: Path) -> None:
    assert json.loads(shown("accesses", "--json", "--results", ncu_json)) == saved


def test_a_missing_file_is_a_usage_error() -> None:
    invoke("accesses", "--results", "/nowhere.json", code=2)


# ---- parts of the README
PARTS = "conflicts from ncu.json", "coalescing from ncu.json"


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a README with both tables, of profiles that agree with the predictions."""
    folder = tmp_path_factory.mktemp("checkout")
    of_a = in_global("A", "load", 16, 0.25)
    write(
        folder / "ncu.json",
        profile("simt.vectorized", BOTH_CONFLICT, [AS_PREDICTED, of_a]),
        profile("simt.naive", "", [in_global("A", "load", 32, 1 / 32)]),
    )
    made, text = rendered(folder, *PARTS)
    assert made == ["README.md"]
    return text.splitlines()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            "| `pad=0,piece_n=8` | 4096, H100 | 40.0% / 40.0% | 33.3% / 0.0% |",
            id="a form of the square",
        ),
        pytest.param(
            "| `simt.vectorized` | piece_n=8,pad=0 | 4096, H100 | loads | A 2+0, B 4+4 | A 0, B 1 "
            "| 671.1 / 671.1 | 268.4 / 268.4 | yes |",
            id="the loads of shared memory",
        ),
        pytest.param(
            "| `simt.naive` | – | 4096, H100 | A load | 4 | 32 / 32 | 3.1% / 3.1% | yes |",
            id="an access to global memory",
        ),
    ],
)
def test_the_readme_has_a_row_of(line: str, readme: list[str]) -> None:
    assert line in readme


def test_the_readme_leaves_out_the_many_global_accesses_of_kernels_that_stage(
    readme: list[str],
) -> None:
    of_vectorized = [line for line in readme if line.startswith("| `simt.vectorized`")]

    assert [line for line in of_vectorized if "A load |" in line] == []


def test_each_table_of_the_readme_names_the_gpu(readme: list[str]) -> None:
    notes = [line for line in readme if line.endswith("NVIDIA H100 80GB HBM3, ncu.")]

    assert len(notes) == 2


@pytest.mark.parametrize("part", PARTS)
def test_a_table_needs_a_profile_with_instructions(part: str, tmp_path: Path) -> None:
    write(tmp_path / "ncu.json", profile("simt.vectorized", BOTH_CONFLICT, None))

    with pytest.raises(ValueError, match=r"no profile of simt.\* made with --instructions"):
        rendered(tmp_path, part)
