"""The claims of the seed documents: the page that they make, and where the command line shows
them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import seed_claims
from seed_claims import __main__ as program
from seed_claims import arithmetic, measured, page
from seed_claims.measured import speed
from support.paths import ROOT
from support.reports import MEASURED, entry, findings, invoke, loaded, verdict, write

from outblas.cli import seed_claims as command
from outblas.report import evidence, results
from outblas.report.evidence import Evidence


@pytest.fixture
def file(tmp_path: Path):
    return write(tmp_path / "a.json", entry("hopper.tma_wgmma", 0.41))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As from a wheel, which has no docs/."""
    monkeypatch.setattr(command, "FOLDER", tmp_path / "docs" / "seed_claims")
    monkeypatch.delitem(sys.modules, command.PACKAGE, raising=False)


def test_claims_that_arithmetic_settles() -> None:
    assert verdict("4 times the MACs per byte") == ("refuted", 2.0)
    assert verdict("takes 37 KB") == ("refuted", 14.0)
    assert verdict("0.25 FLOP per byte it loads") == ("confirmed", 0.25)
    assert verdict("two CTAs an SM, 49.4%") == ("confirmed", 2)
    assert verdict("105% of the bandwidth ceiling") == ("refuted", pytest.approx(0.3209, rel=1e-3))
    assert verdict("165 registers a thread") == ("confirmed", 0.1875)
    assert verdict("64512, just under")[0] == "confirmed"
    assert len(arithmetic.CLAIMS) >= 30
    assert {found.verdict for found in findings().values()} <= set(seed_claims.VERDICTS)


def test_claims_without_a_measurement_have_no_number() -> None:
    for claim in measured.CLAIMS:
        assert claim.test(Evidence()) == seed_claims.NOT_MEASURED


def test_claims_that_a_measurement_settles() -> None:
    found = findings(*MEASURED)
    claimed = found["hopper.tma_wgmma reaches 317 TFLOP/s at 4096"]
    assert (claimed.verdict, claimed.value) == ("confirmed", pytest.approx(319.8))
    share = found["hopper.tma_wgmma reaches 44% of cuBLAS at 4096"]
    assert (share.verdict, share.value) == ("differs", 0.41)
    assert found["hopper.hilbert reaches 764 TFLOP/s at 4096"].verdict == "not yet measured"


def test_only_the_rungs_own_config_on_the_seeds_gpu_settles_a_claim() -> None:
    changed = {"config": "tile_m=128"}, {"mode": "sustained"}, {"layout": "nn"}
    other = loaded(*(MEASURED[1] | changes for changes in changed)).measurements
    elsewhere = loaded(MEASURED[1], gpu="NVIDIA H200").measurements
    for claim in speed.CLAIMS:
        assert claim.test(Evidence(other + elsewhere)).verdict == seed_claims.OPEN


def test_the_page_is_what_the_command_writes() -> None:
    made = page.page(evidence.load(results.saved()))
    assert made == (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), "run make claims"


def test_the_command_writes_the_page_and_checks_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "claims.md"
    monkeypatch.setattr(program, "PAGE", written)
    assert program.main(["--check"]) == 1
    assert not written.exists()
    assert program.main([]) == 0
    assert program.main(["--check"]) == 0
    assert "docs/claims.md: made anew" in capsys.readouterr().out
    written.write_text(written.read_text(encoding="utf-8").replace("confirmed", "refuted", 1))
    assert program.main(["--check"]) == 1


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


def test_the_page_has_every_claim_once_in_its_document() -> None:
    found = seed_claims.settled(loaded(entry("hopper.tma_wgmma", 0.41)))
    text = page.page(loaded(entry("hopper.tma_wgmma", 0.41)))
    _, *documents = text.split("\n## 0")
    rows = [line for part in documents for line in part.splitlines() if line.startswith("| ")]
    heads = 2 * len(page.DOCUMENTS)
    assert len(documents) == len(page.DOCUMENTS)
    assert len(rows) == len(found) + heads
    assert seed_claims.count(found) in text


def test_ladder_shows_the_claims_in_a_checkout(file) -> None:
    assert "Claims: " in invoke("ladder", "--results", file, code=0).stdout
    shown = json.loads(invoke("ladder", "--results", file, "--json", code=0).stdout)
    found = seed_claims.settled(evidence.load([file, *_profiles()]))
    assert [claim["claim"] for claim in shown["claims"]] == [s.claim.text for s in found]
    assert [claim["verdict"] for claim in shown["claims"]] == [s.finding.verdict for s in found]


def _profiles():
    """What `outblas report ladder` takes without --profiles."""
    files = results.by_kind(results.saved())
    return files.profiles + files.phases


@pytest.mark.usefixtures("installed")
def test_ladder_says_where_the_claims_are_elsewhere(file) -> None:
    shown = invoke("ladder", "--results", file, code=0).stdout
    assert "hopper.tma_wgmma" in shown
    assert "Claims: " not in shown
    assert "docs/seed_claims" in shown
    assert json.loads(invoke("ladder", "--results", file, "--json", code=0).stdout)["claims"] == []
