"""Bank conflicts and coalescing of the CUDA-core kernels: predictions beside profiles that agree,
and that do not.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.reports import Entry, counted, invoke, loaded, rendered, shown, write

from outblas.core import configs, registry
from outblas.report import access_cases, accesses, profiles
from outblas.report.accesses import Coalescing, Conflicts

pytestmark = pytest.mark.compile
FIRST, PADDED, SPLIT = "pad=0,piece_n=8", "piece_n=8", "pad=0"


@cache
def predictions() -> dict[tuple[str, str, str], Conflicts]:
    """By kernel, configuration and operation."""
    return {
        (each.case.kernel, configs.brief(each.case.config), each.operation): each
        for each in accesses.conflicts(())
    }


def row(config: str, operation: str, kernel: str = "simt.vectorized") -> Conflicts:
    brief = configs.brief(configs.from_text(registry.load(kernel).Config, config))
    return predictions()[kernel, brief, operation]


def profile(provider: str, config: str, memory: list[Entry] | None, **changes: Any) -> Entry:
    resolved = configs.to_text(configs.from_text(registry.load(provider).Config, config))
    return counted(provider, config, resolved=resolved, memory=memory) | changes


def shared(operation: str, requests: int, wavefronts: int, ideal: int) -> Entry:
    counts = {"requests": requests, "wavefronts": wavefronts, "ideal": ideal}
    return {"space": "shared", "operation": operation} | counts


def of_global(operand: str, operation: str, transactions: float, efficiency: float) -> Entry:
    counts = {"requests": 1000, "transactions": 1000 * transactions, "sectors": 1000 * transactions}
    return {
        "operand": operand,
        "space": "global",
        "operation": operation,
        "efficiency": efficiency,
    } | counts


def conflicts(kernel: str, config: str, memory: list[Entry], **changes: Any) -> list[Conflicts]:
    """Rows of a kernel, of which one configuration was profiled."""
    given = loaded(profile(kernel, config, memory, **changes)).profiles
    return [each for each in accesses.conflicts(given) if each.case.kernel == kernel]


def coalescing(*entries: Entry) -> list[accesses.Coalescing]:
    return accesses.coalescing(loaded(*entries).profiles)


def ways(row: Conflicts) -> dict[str, tuple[float, float]]:
    """Wavefronts of an instruction by operand, and without conflicts."""
    of = row.of_warp.items()
    return {
        name: (each.wavefronts / each.instructions, each.ideal / each.instructions)
        for name, each in of
    }


def test_the_square_of_vectorized() -> None:
    assert ways(row(FIRST, "store")) == {"A": (2, 1), "B": (4, 4)}
    assert ways(row(FIRST, "load")) == {"A": (2, 2), "B": (8, 4)}
    mended_stores, mended_loads = {"A": (1, 1), "B": (4, 4)}, {"A": (2, 2), "B": (4, 4)}
    assert ways(row(PADDED, "store")) == ways(row("", "store")) == mended_stores
    assert ways(row(SPLIT, "load")) == ways(row("", "load")) == mended_loads
    assert ways(row(PADDED, "load")) == ways(row(FIRST, "load"))
    assert ways(row(SPLIT, "store")) == ways(row(FIRST, "store"))
    assert [cells[2:] for cells in accesses.square(predictions().values())] == [
        ("40.0% / –", "33.3% / –"),
        ("40.0% / –", "0.0% / –"),
        ("0.0% / –", "33.3% / –"),
        ("0.0% / –", "0.0% / –"),
    ]


def test_warp_tiles_load_without_conflicts() -> None:
    assert ways(row("", "load", "simt.warptile")) == {"A": (2, 2), "B": (4, 4)}


def test_a_launch() -> None:
    """1024 CTAs of 8 warps, 512 slabs; a slab has 16 reads of A in 2 wavefronts, 16 of B in 8 where
    4 are ideal.
    """
    at = row(FIRST, "load").predicted
    slabs = 1024 * 8 * 512
    assert (at.instructions, at.wavefronts, at.excess) == (
        slabs * 32,
        slabs * 16 * (2 + 8),
        slabs * 16 * 4,
    )
    loads, stores = (row("", operation, "simt.pipelined") for operation in ("load", "store"))
    ctas_and_warps = 1024 * 4
    assert stores.predicted.instructions == ctas_and_warps * 513 * sum(
        s.instructions for s in stores.of_warp.values()
    )
    terms = sum(each.instructions for each in loads.of_warp.values()) // 8
    assert loads.predicted.instructions == ctas_and_warps * (1 + 512 * 8) * terms


def test_edges_and_pairs_are_rounded_up() -> None:
    loads, stores = conflicts("simt.pipelined", "", [], shape=[129, 100, 17])
    tiles, warps = 2, 4
    assert stores.predicted.instructions == tiles * warps * (1 + 2 * 2) * (8 + 2)
    assert loads.predicted.instructions == tiles * warps * (1 + 2 * 2 * 8) * (2 + 4)


def test_gluon_counts_the_same_where_it_can() -> None:
    rows = predictions().values()
    plain = [r for r in rows if r.case.config.pad == 0]
    assert len(plain) == 6
    for each in plain:
        assert each.triton_agrees, each.cells()
    assert row(SPLIT, "store", "simt.warptile").triton == {"A": 3, "B": 0}
    assert all(r.triton is None and "cannot count" in r.cells() for r in rows if r.case.config.pad)


@pytest.mark.parametrize("name", ["simt.shared", "simt.strip", "simt.register"])
def test_gluon_counts_the_same_of_other_rungs(name: str) -> None:
    assert [r.triton_agrees for r in conflicts(name, "pad=0", [])] == [True, True]


@pytest.mark.parametrize(
    ("config", "operation", "off", "expected"),
    [
        (FIRST, "load", 0.0, True),
        (FIRST, "load", 0.019, True),
        (FIRST, "load", 0.021, False),
        (FIRST, "store", -0.021, False),
        ("", "load", 0.01, True),
        ("", "load", 0.03, False),
    ],
)
def test_measured_beside_predicted(config: str, operation: str, off: float, expected: bool) -> None:
    """Measured twice over: two launches, of which each did half."""
    of = row(config, operation).predicted
    wavefronts = of.wavefronts + round(off * of.wavefronts)
    half = shared(operation, of.instructions // 2, wavefronts // 2, of.ideal // 2)
    rows = conflicts("simt.vectorized", config, [half, half | {"operand": "A"}])
    (at,) = [r for r in rows if r.case.profile and r.operation == operation]
    assert at.measured is not None
    assert at.measured.excess == pytest.approx(of.excess + off * of.wavefronts, abs=2)
    assert at.within is expected
    assert at.cells()[-1] == ("yes" if expected else "no")
    assert len([r for r in rows if r.case.config == at.case.config]) == 2


def test_when_a_slab_is_loaded_and_stored_does_not_matter() -> None:
    """000's warp tile prefetches nothing: its profile stands for the unpadded form."""
    rows = conflicts("simt.warptile", "pad=0,prefetch=False", [])
    assert [(configs.brief(each.case.config), each.measured is None) for each in rows[::2]] == [
        ("pad=0,prefetch=False", False),
        ("", True),
    ]
    assert len(rows) == 4


def test_without_instructions_there_is_no_measurement() -> None:
    other = profile("simt.naive", "", []) | {"provider": "cublas"}
    given = loaded(profile("simt.vectorized", "", None), other).profiles
    assert access_cases.profiled(given) == ()
    assert all(r.measured is r.within is None for r in accesses.conflicts(given))
    memory = [{"space": "shared", "operation": "load", "requests": 1}]
    loads, stores = (r for r in conflicts("simt.vectorized", "", memory) if r.case.profile)
    assert loads.measured is None
    assert stores.measured is not None  # none was executed
    assert stores.within is True


def test_coalescing_predicted() -> None:
    rows = [
        (r.case.kernel, r.access, r.predicted.transactions, r.predicted.efficiency)
        for r in coalescing()
    ]
    assert rows == [
        ("simt.naive", "A load", 32, 1 / 32),
        ("simt.naive", "B load", 1, 1),
        ("simt.naive", "out store", 32, 1 / 32),
        *(("simt.coalesced", access, 1, 1) for access in ("A load", "B load", "out store")),
    ]


def test_what_was_measured_is_what_was_predicted() -> None:
    """Every profile in results/ that was made with --instructions."""
    measured = profiles.load([ROOT / "results" / "h100_simt_counters.json"])
    in_shared = [r for r in accesses.conflicts(measured) if r.measured]
    in_global = [r for r in accesses.coalescing(measured) if r.measured]
    everywhere: list[Conflicts | Coalescing] = [*in_shared, *in_global]
    assert [r.cells() for r in everywhere if not r.within] == []
    assert {configs.brief(r.case.config) for r in in_shared} >= {
        "piece_n=8,pad=0",
        "piece_n=8",
        "pad=0",
        "",
    }
    assert {r.case.kernel for r in in_global} >= {"simt.naive", "simt.coalesced"}


def test_coalescing_measured() -> None:
    memory = [
        of_global("A", "load", 32, 1 / 32),
        of_global("B", "load", 1.1, 1 / 1.1),
        of_global("C", "load", 1, 1),
        of_global("A", "load", 16, 1 / 16),
    ]
    other = profile(
        "simt.vectorized", "", [of_global("A", "load", 16, 0.25), of_global("out", "store", 4, 1)]
    )
    rows = coalescing(profile("simt.naive", "", memory[:3]), other)
    naive = {r.access: r for r in rows if r.case.kernel == "simt.naive"}
    assert [naive[name].within for name in ("A load", "B load", "out store")] == [True, False, None]
    assert naive["B load"].cells()[-3:] == ("1 / 1.1", "100.0% / 90.9%", "no")
    vectorized = {
        r.access: (r.predicted.bytes, r.within) for r in rows if r.case.kernel == "simt.vectorized"
    }
    assert vectorized == {"A load": (16, True), "B load": (16, None), "out store": (16, True)}
    twice = coalescing(profile("simt.naive", "", memory))[0].measured
    assert twice is not None
    assert (twice.transactions, twice.efficiency) == (24, pytest.approx(2 / 48))


def test_a_profile_of_another_version_is_named() -> None:
    with pytest.raises(ValueError, match=r"a profile of simt.naive .*tile=3"):
        coalescing(profile("simt.naive", "", [], resolved="tile=3"))


def test_command(tmp_path: Path) -> None:
    of = row(FIRST, "load").predicted
    entry = profile("simt.vectorized", FIRST, [shared("load", of.instructions, of.ideal, of.ideal)])
    path, saved = write(tmp_path / "ncu.json", entry), tmp_path / "saved.json"
    printed = shown("accesses", "--results", path, "--save", saved)
    assert max(map(len, printed.splitlines())) <= 140
    assert "671.1 / 402.7" in printed
    value = json.loads(saved.read_text())
    first = value["conflicts"][0]
    assert (first["config"], first["gpu"], first["within"]) == ("piece_n=8,pad=0", "H100", False)
    assert first["operands"]["B"] == {
        "instructions": 16,
        "wavefronts": 128,
        "ideal": 64,
        "excess": 64,
    }
    assert first["bank_conflicts"] == {"A": 0, "B": 1}
    assert {row["measured"] is None for row in value["conflicts"][2:]} == {True}
    assert [row["access"] for row in value["coalescing"]] == ["A load", "B load", "out store"] * 3
    assert json.loads(shown("accesses", "--json", "--results", path)) == value
    invoke("accesses", "--results", "/nowhere.json", code=2)


def test_readme_parts(tmp_path: Path) -> None:
    of = row(FIRST, "load").predicted
    total = shared("load", of.instructions, of.wavefronts, of.ideal)
    direct = profile("simt.naive", "", [of_global("A", "load", 32, 1 / 32)])
    write(
        tmp_path / "ncu.json",
        profile("simt.vectorized", FIRST, [total, of_global("A", "load", 16, 0.25)]),
        direct,
    )
    parts = "conflicts from ncu.json", "coalescing from ncu.json"
    changed, text = rendered(tmp_path, *parts)
    assert changed == ["README.md"]
    made = text.splitlines()
    assert "| `pad=0,piece_n=8` | 4096, H100 | 40.0% / 40.0% | 33.3% / 0.0% |" in made
    line = "| A 2+0, B 4+4 | A 0, B 1 | 671.1 / 671.1 | 268.4 / 268.4 | yes |"
    assert f"| `simt.vectorized` | piece_n=8,pad=0 | 4096, H100 | loads {line}" in made
    assert "| `simt.naive` | – | 4096, H100 | A load | 4 | 32 / 32 | 3.1% / 3.1% | yes |" in made
    assert not any(
        each.startswith("| `simt.vectorized`") and "A load |" in each for each in made
    ), "they are many"
    assert sum(each.endswith("NVIDIA H100 80GB HBM3, ncu.") for each in made) == 2
    write(tmp_path / "ncu.json", profile("simt.vectorized", FIRST, None))
    with pytest.raises(ValueError, match=r"no profile of simt.\* made with --instructions"):
        rendered(tmp_path, *parts)
