"""The claims of the seed documents: the page that they make, and where the command line shows
them.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seed_claims
from seed_claims import __main__ as program
from seed_claims import arithmetic, measured, page
from seed_claims.measured import speed
from support.paths import ROOT
from support.reports import MEASURED, Entry, entry, findings, invoke, loaded, verdict, write

from outblas.cli import seed_claims as command
from outblas.report import evidence, results, rungs
from outblas.report.evidence import Evidence


# ---- all claims
@pytest.fixture(scope="module")
def unmeasured() -> list[seed_claims.Settled]:
    """Every claim, tested without any measurement."""
    return seed_claims.settled(Evidence())


def test_no_two_claims_of_a_document_have_the_same_text(
    unmeasured: list[seed_claims.Settled],
) -> None:
    texts = Counter((each.claim.source, each.claim.text) for each in unmeasured)

    assert [text for text, count in texts.items() if count > 1] == []


def test_arithmetic_settles_thirty_claims_and_more() -> None:
    assert len(arithmetic.CLAIMS) >= 30


def test_every_verdict_is_one_of_four(unmeasured: list[seed_claims.Settled]) -> None:
    found = {each.finding.verdict for each in unmeasured}

    assert found <= set(seed_claims.VERDICTS)


@pytest.mark.parametrize(
    ("part", "expected", "value"),
    [
        ("4 times the MACs per byte", "refuted", 2.0),
        ("takes 37 KB", "refuted", 14.0),
        ("0.25 FLOP per byte it loads", "confirmed", 0.25),
        ("two CTAs an SM, 49.4%", "confirmed", 2),
        ("105% of the bandwidth ceiling", "refuted", pytest.approx(0.3209, rel=1e-3)),
        ("165 registers a thread", "confirmed", 0.1875),
    ],
)
def test_a_claim_that_arithmetic_settles(part: str, expected: str, value: float) -> None:
    assert verdict(part) == (expected, value)


def test_a_number_just_under_another_is_confirmed() -> None:
    assert verdict("64512, just under")[0] == "confirmed"


def test_claims_without_a_measurement_have_no_number() -> None:
    numbered = [
        claim.text
        for claim in measured.CLAIMS
        if claim.test(Evidence()) != seed_claims.NOT_MEASURED
    ]

    assert numbered == []


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("hopper.tma_wgmma reaches 317 TFLOP/s at 4096", "confirmed", pytest.approx(319.8)),
        ("hopper.tma_wgmma reaches 44% of cuBLAS at 4096", "differs", 0.41),
        ("hopper.hilbert reaches 764 TFLOP/s at 4096", "not yet measured", None),
    ],
)
def test_a_claim_that_a_measurement_settles(text: str, expected: str, value: float | None) -> None:
    found = findings(*MEASURED)[text]

    assert (found.verdict, found.value) == (expected, value)


@pytest.mark.parametrize(
    ("changes", "gpu"),
    [
        pytest.param({"config": "tile_m=128"}, "NVIDIA H100 80GB HBM3", id="another config"),
        pytest.param({"mode": "sustained"}, "NVIDIA H100 80GB HBM3", id="another mode"),
        pytest.param({"layout": "nn"}, "NVIDIA H100 80GB HBM3", id="another layout"),
        pytest.param({}, "NVIDIA H200", id="another GPU"),
    ],
)
def test_a_measurement_of_something_else_settles_no_claim(changes: Entry, gpu: str) -> None:
    of_rung = entry("hopper.tma_wgmma", 0.41)

    other = loaded(of_rung | changes, gpu=gpu)

    verdicts = {claim.test(other).verdict for claim in speed.CLAIMS}
    assert verdicts == {seed_claims.OPEN}


# ---- the claims about one ladder
@pytest.fixture(scope="module")
def sources(unmeasured: list[seed_claims.Settled]) -> dict[str, set[str]]:
    """By ladder the documents and kernels whose claims are about it."""
    return {
        ladder: {each.claim.source for each in seed_claims.of_ladder(unmeasured, ladder)}
        for ladder in rungs.LADDERS
    }


@pytest.mark.parametrize("source", ["000 kernel 6", "002 float4", "003 v06", "004 introduction"])
def test_claims_about_the_cuda_cores(source: str, sources: dict[str, set[str]]) -> None:
    assert source in sources["simt"]


@pytest.mark.parametrize("source", ["003 v07", "001 kernel 3"])
def test_claims_about_tensor_cores_are_none_about_the_cuda_cores(
    source: str, sources: dict[str, set[str]]
) -> None:
    assert source not in sources["simt"]


def test_no_claim_is_about_the_portable_kernel(sources: dict[str, set[str]]) -> None:
    assert sources["portable"] == set()


def test_every_source_is_about_some_ladder(
    sources: dict[str, set[str]], unmeasured: list[seed_claims.Settled]
) -> None:
    assert set().union(*sources.values()) == {each.claim.source for each in unmeasured}


def test_without_a_ladder_there_are_the_claims_about_all(
    unmeasured: list[seed_claims.Settled],
) -> None:
    assert seed_claims.of_ladder(unmeasured, None) == unmeasured


# ---- the page
def test_the_page_is_what_the_command_writes() -> None:
    made = page.page(evidence.load(results.saved()))

    assert made == (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), "run make claims"


@pytest.fixture
def claims_md(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that the command writes, which is not there yet."""
    path = tmp_path / "claims.md"
    monkeypatch.setattr(program, "PAGE", path)
    return path


def test_a_check_fails_without_a_page_and_writes_none(claims_md: Path) -> None:
    assert program.main(["--check"]) == 1
    assert not claims_md.exists()


def test_the_command_says_that_it_wrote_the_page(
    claims_md: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([]) == 0

    assert claims_md.exists()
    assert "docs/claims.md: made anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        pytest.param(lambda text: text, 0, id="as written"),
        pytest.param(lambda text: text.replace("confirmed", "refuted", 1), 1, id="changed"),
    ],
)
def test_a_check_compares_the_page(
    changed: Callable[[str], str], code: int, claims_md: Path
) -> None:
    program.main([])
    claims_md.write_text(changed(claims_md.read_text(encoding="utf-8")), encoding="utf-8")

    assert program.main(["--check"]) == code


def test_it_runs_as_a_module_of_the_checkout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.seed_claims", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def measured_rung() -> Evidence:
    """A measurement of one rung."""
    return loaded(entry("hopper.tma_wgmma", 0.41))


def test_the_page_has_every_claim_once_in_its_document(measured_rung: Evidence) -> None:
    claims = seed_claims.settled(measured_rung)

    _, *documents = page.page(measured_rung).split("\n## 0")

    assert len(documents) == len(page.DOCUMENTS)
    rows = [line for part in documents for line in part.splitlines() if line.startswith("| ")]
    rows_of_heads = 2 * len(page.DOCUMENTS)
    assert len(rows) == len(claims) + rows_of_heads


def test_the_page_counts_the_verdicts(measured_rung: Evidence) -> None:
    claims = seed_claims.settled(measured_rung)

    assert seed_claims.count(claims) in page.page(measured_rung)


# ---- the command line
@pytest.fixture
def bench_json(tmp_path: Path) -> Path:
    """A file of results on one rung."""
    return write(tmp_path / "bench.json", entry("hopper.tma_wgmma", 0.41))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As from a wheel, which has no docs/."""
    monkeypatch.setattr(command, "FOLDER", tmp_path / "docs" / "seed_claims")
    monkeypatch.delitem(sys.modules, command.PACKAGE, raising=False)


def ladder_text(bench_json: Path) -> str:
    """What `outblas report ladder` prints."""
    return invoke("ladder", "--results", bench_json, code=0).stdout


def ladder_claims(bench_json: Path) -> list[dict[str, Any]]:
    """The claims in what `outblas report ladder --json` prints."""
    printed = invoke("ladder", "--results", bench_json, "--json", code=0).stdout
    claims: list[dict[str, Any]] = json.loads(printed)["claims"]
    return claims


def test_ladder_shows_the_claims_in_a_checkout(bench_json: Path) -> None:
    assert "Claims: " in ladder_text(bench_json)


def test_ladder_has_every_claim_as_json_in_a_checkout(bench_json: Path) -> None:
    files = results.by_kind(results.saved())
    taken_without_options = [*files.profiles, *files.phases]
    expected = seed_claims.settled(evidence.load([bench_json, *taken_without_options]))

    shown = ladder_claims(bench_json)

    assert [(each["claim"], each["verdict"]) for each in shown] == [
        (each.claim.text, each.finding.verdict) for each in expected
    ]


@pytest.mark.usefixtures("installed")
def test_ladder_says_where_the_claims_are_elsewhere(bench_json: Path) -> None:
    text = ladder_text(bench_json)

    assert "hopper.tma_wgmma" in text
    assert "Claims: " not in text
    assert "docs/seed_claims" in text


@pytest.mark.usefixtures("installed")
def test_ladder_has_no_claims_as_json_elsewhere(bench_json: Path) -> None:
    assert ladder_claims(bench_json) == []
