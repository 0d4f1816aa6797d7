"""What a sweep found: ranks, the report and its chart, the command, and the views while it runs."""

import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support import commands, stored
from support.reports import Page
from support.stored import FINALIST, H100, H200, WORKLOAD, failed
from typer.testing import Result

from outblas.autotune.measure import progress
from outblas.autotune.measure.progress import Progress
from outblas.autotune.search.rank import ranks, spearman
from outblas.autotune.store import transfer
from outblas.autotune.store.records import BestConfig, Gpu, Trial, Workload
from outblas.autotune.store.store import Store
from outblas.bench import plotting
from outblas.cli import tune_view
from outblas.report.tuning import chart, model, tables
from outblas.report.tuning.page import html


def timed(config: str, ratio: float, predicted: float | None = None, **changes: Any) -> Trial:
    return stored.trial(
        config=config, us=175 / ratio, ratio=ratio, predicted_us=predicted, **changes
    )


def config(m: int, n: int, slots: int) -> str:
    return f"tile_m={m},tile_n={n},tile_k=64,stages={slots},order=hilbert,group_m=8"


# Sixteen right configs of four tiles, the first the best by the screen, and four that failed.
SPACE = [
    *(
        timed(
            config(m, n, slots),
            1.05 - 0.1 * i - 0.01 * abs(slots - 3),
            170 + 10 * i + abs(slots - 4),
        )
        for i, (m, n) in enumerate([(128, 256), (256, 128), (128, 128), (64, 64)])
        for slots in (2, 3, 4, 5)
    ),
    failed(config=config(192, 160, 2), reason="odd"),
    *(failed(config=config(192, 160, slots), reason="not done\n  in 30 s") for slots in (3, 4)),
    failed(config=config(64, 64, 6), status="crash", reason=""),
]
FIRST, SECOND = config(128, 256, 4), config(128, 256, 3)  # in the finals


def winner(**changes: Any) -> BestConfig:
    finalists = (
        replace(FINALIST, config=FIRST),
        replace(FINALIST, kernel="portable"),
        replace(FINALIST, config=SECOND, us=201.0, ratio=1.045),
    )
    return stored.winner(**{"config": FIRST, "runner_up": SECOND, "finalists": finalists} | changes)


def build(trials: Sequence[Trial], *winners: BestConfig, **options: Any) -> model.TuneReport:
    return model.build(
        trials, winners, **{"kernel": "hopper.hilbert", "workload": WORKLOAD} | options
    )


@pytest.fixture
def report() -> model.TuneReport:
    return build(SPACE, winner())


def lines(report: model.TuneReport, heading: str) -> list[str]:
    (rows,) = (rows for title, _, rows in tables.tables(report) if heading in title)
    return [" | ".join(row) for row in rows]


def test_ranks_share_the_mean_of_equal_values() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0, 3.0]) == [4.0, 1.0, 4.0, 2.0, 4.0]
    assert ranks([]) == []


def test_spearman() -> None:
    """IQ and hours of television, the textbook's example, then one with equal values."""
    iq, hours = (
        [106, 100, 86, 101, 99, 103, 97, 113, 112, 110],
        [7, 27, 2, 50, 28, 29, 20, 12, 6, 17],
    )
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("predicted", "measured", "message"),
    [
        ([1, 2], [1], "predicted has 2 values and measured 1"),
        ([1], [1], "predicted has 1 values, expected at least 2"),
        ([1, 2], [3, 3], "measured has 3 only"),
    ],
)
def test_spearman_of_what_has_no_order(
    predicted: list[int], measured: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        spearman(predicted, measured)


def test_the_best_and_where_their_figures_come_from() -> None:
    report = build(SPACE, winner(), limits=lambda config: config[:8])
    assert lines(report, "best")[:3] == [
        "1 | tile_m=128, tile_n=256, stages=4 | 200.5 | 1.047 (1.040–1.050) | finals | 1 | "
        "tile_m=1",
        # Slots 3 and 5 are one to the model.
        "2 | tile_m=128, tile_n=256, stages=3 | 201.0 | 1.045 (1.040–1.050) | finals | 2–3 | "
        "tile_m=1",
        "3 | tile_m=128, tile_n=256, stages=2 | 168.3 | 1.040 | screen | 4 | tile_m=1",
    ]
    assert "Common to the 10 best: tile_k=64, order=hilbert, group_m=8." in tables.notes(report)
    assert [line.count("|") for line in lines(build(SPACE), "best")] == [5] * 10


def test_the_winner(report: model.TuneReport) -> None:
    assert lines(report, "Winner") == [
        f"config | {FIRST}",
        "× cuBLAS | 1.047 (1.040–1.050), median of 30 rounds",
        "µs | 200.5, cuBLAS 210.0",
        "lead | 1.0100 (1.0050–1.0200) over the runner-up",
        "confidence | at least 99.0% that it is the fastest of the finalists",
        "runner-up | stages=3",
        "screened | 60 of 80 valid configs",
    ]
    alone = lines(build(SPACE, winner(lead=None, runner_up="", confidence=None)), "Winner")
    assert [line.split()[0] for line in alone] == ["config", "×", "µs", "screened"]
    assert "not separated" in lines(build(SPACE, winner(separated=False)), "Winner")[3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "a tie: no finalist is surely the fastest"),
        (0.5, "at least 50.0% that it is the fastest of the finalists"),
        (1.0, "over 99.9% that it is the fastest of the finalists"),
    ],
)
def test_a_bound_of_nothing_is_no_confidence(value: float, text: str) -> None:
    """Doubts of several finalists add up to more than 1."""
    assert f"confidence | {text}" in lines(build(SPACE, winner(confidence=value)), "Winner")


def test_tiles_stages_and_failures(report: model.TuneReport) -> None:
    assert lines(report, "by tile") == [
        "64 | 0.750 | – | – | –",
        "128 | – | 0.850 | – | 1.050",
        "192 | – | – | failed | –",
        "256 | – | 0.950 | – | –",
    ]
    assert lines(report, "by stages")[0] == "128×256 | 1.040 | 1.050 | 1.040 | 1.030"
    assert lines(report, "Failures") == ["hang | 3 | not done in 30 s", "crash | 1 | –"]
    assert "20 configs tried: 16 right, 4 failed." in tables.notes(report)


def predicting(us: float | None) -> list[Trial]:
    return [replace(trial, predicted_us=us) for trial in SPACE]


def test_the_model_beside_the_measurement(report: model.TuneReport) -> None:
    found = report.agreement
    assert (found.place, found.rho) == ((1, 1), pytest.approx(0.947, abs=1e-3))
    assert str(found) == "best measured is 1st of 16 predicted: top 7%"
    # Without finals the best is the screen's, which the model cannot tell from another.
    assert str(build(SPACE).agreement) == "best measured is 2nd to 3rd of 16 predicted: top 19%"
    blind = build(predicting(5.0)).agreement
    assert (blind.rho, blind.place) == (None, (1, 16))
    silent = build(predicting(None))
    assert silent.agreement is None
    assert all(line.count("|") == 4 for line in lines(silent, "best"))


def test_record(report: model.TuneReport) -> None:
    value = json.loads(json.dumps(report.record()))
    assert value["counts"] == {"tried": 20, "right": 16, "failed": 4, "left_out": 0}
    assert (value["kernel"], value["workload"]["M"]) == ("hopper.hilbert", 4096)
    assert [gpu["name"] for gpu in value["gpus"]] == [H100.name]
    best = value["top"][0]
    assert value["winner"]["config"] == best["config"] == FIRST
    assert (best["final"], best["predicted"], best["limits"]) == (True, [1, 1], None)
    assert value["tiles"][-1] == {
        "m": 256,
        "n": 128,
        "ratio": pytest.approx(0.95),
        "tried": 4,
        "right": 4,
    }
    assert {"m": 192, "n": 160, "ratio": None, "tried": 3, "right": 0} in value["tiles"]
    assert value["stages"]["field"] == "stages"
    assert list(value["stages"]["lines"][0]["ratios"]) == ["2", "3", "4", "5"]
    assert (value["model"]["configs"], value["model"]["best_place"]) == (16, [1, 1])
    assert value["failures"]["crash"] == {"trials": 1, "reason": "", "config": config(64, 64, 6)}
    bare = build([timed("a=1", 1.0)]).record()
    assert (bare["winner"], bare["model"], bare["failures"], bare["top"][0]["config"]) == (
        None,
        None,
        {},
        "a=1",
    )


def test_machines_and_sources_are_not_mixed() -> None:
    old = [replace(trial, source="old", when="2025-04-01") for trial in SPACE]
    other = [replace(trial, gpu=H200) for trial in SPACE[:3]]
    again = timed(SECOND, 0.5, when="2026-06-01")
    sliced = timed("tile_m=1", 2.0, gpu=replace(H100, sms=16))
    report = build([again, *SPACE, *other, *old, sliced], winner(source="old"))
    assert (report.gpus, report.left_out, report.winner) == ((H100,), 21, None)
    assert {t.config: t.ratio for t in report.trials}[SECOND] == 0.5
    assert len(build([*SPACE, *other], gpu_name="NVIDIA H200").trials) == 3
    assert build(SPACE, winner(gpu=H200), winner(kernel="portable")).winner is None
    newest = winner(rounds=1, when="b")
    assert build(SPACE, newest, winner(rounds=2, when="a")).winner == newest


@pytest.mark.parametrize(
    ("trials", "options", "message"),
    [
        ([], {}, "no trials of hopper.hilbert at 4096 bfloat16 nt; there are none at all"),
        (
            SPACE,
            {"kernel": "portable"},
            "no trials of portable at 4096 bfloat16 nt; there are some of hopper.hilbert",
        ),
        (
            SPACE,
            {"gpu_name": "T4"},
            "on T4; there are some of hopper.hilbert at 4096 bfloat16 nt on NVIDIA H100",
        ),
    ],
)
def test_what_is_missing_is_named(
    trials: list[Trial], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(trials, **options)


SPACES = {
    "all": SPACE,
    "a single trial": [timed(FIRST, 1.0, 170.0)],
    "one tile": [timed(config(128, 256, slots), 0.9, 170.0 + slots) for slots in (2, 3, 4)],
    "ties": [
        timed(config(128, 128 + 64 * i, slots), 0.9, 170.0) for i in range(3) for slots in (2, 3)
    ],
    "no stages": [
        timed(f"block_m={m},block_n={n},threads=256", 0.01 * m + n / 999)
        for m in (32, 64)
        for n in (8, 16)
    ],
    "stages only": [timed(f"num_stages={n}", 0.5 + n / 10) for n in (1, 2, 3)],
    "the model only": [timed(f"vector={n}", 0.5 + n / 10, 10 - n) for n in (1, 2)],
    "no predictions": predicting(None),
}


@pytest.mark.parametrize("name", SPACES)
def test_pages(name: str) -> None:
    report = build(SPACES[name])
    text = html(report)
    page = Page(text)
    assert {"svg", "table"} <= set(page.seen)
    assert "hopper.hilbert, 4096 bfloat16 nt" in page.text
    links = re.findall(r'https?://[^\s>"]+', text)
    assert set(links) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    json.dumps(report.record())


def test_nothing_right_is_a_page_without_a_chart() -> None:
    report = build([trial for trial in SPACE if not trial.ok])
    assert [heading for heading, *_ in tables.tables(report)] == ["Failures"]
    page = Page(html(report))
    assert "svg" not in page.seen
    assert "4 configs tried: 0 right, 4 failed." in page.text
    with pytest.raises(ValueError, match="there is nothing to draw of hopper"):
        chart.draw(report)


def test_the_chart_says_what_it_shows(report: model.TuneReport, tmp_path: Path) -> None:
    plotting.save(chart.draw(report), tmp_path / "c.svg")
    drawn = (tmp_path / "c.svg").read_text(encoding="utf-8")
    for text in (
        "hopper.hilbert, 4096 bfloat16 nt: 1.047 × cuBLAS",
        "1.050",
        "failed",
        "0 of 3",
        "128×256",
        "ρ 0.9",
    ):
        assert text in drawn


def command(line: str) -> Result:
    return commands.invoke("report", "tune", *line.split(), code=0)


def refused(line: str, message: str) -> None:
    commands.refuses(message, "report", "tune", *line.split())


@pytest.fixture
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files here: trials of two kernels, three workloads and two GPUs, each as many as no other."""
    monkeypatch.chdir(tmp_path)
    trials = [
        *SPACE,
        *(replace(trial, gpu=H200) for trial in SPACE[:9]),
        *(replace(trial, workload=Workload(512, 512, 512)) for trial in SPACE[:5]),
        *(
            replace(trial, kernel="portable", workload=replace(WORKLOAD, layout="nn"))
            for trial in SPACE[:-1]
        ),
    ]
    transfer.export(trials, [winner()], Path("export"))
    with Store(Path("store")) as store:
        store.merge(trials, [winner()])


@pytest.mark.usefixtures("_kept")
def test_command() -> None:
    said = command("--from export --html t.html --chart t.png --save t.json").stdout
    assert "hopper.hilbert, 4096 bfloat16 nt, NVIDIA H100 80GB HBM3" in said
    assert "best measured is 1st of 16 predicted" in said
    assert "svg" in Page(Path("t.html").read_text()).seen
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("t.json").read_text())["counts"]["tried"] == 20


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("options", "kernel", "M", "gpu", "tried"),
    [
        ("", "hopper.hilbert", 4096, H100, 20),
        ("--kernel portable", "portable", 4096, H100, 19),
        ("--layout nn", "portable", 4096, H100, 19),
        ("--shapes 512", "hopper.hilbert", 512, H100, 5),
        ("--gpu h200", "hopper.hilbert", 4096, H200, 9),
    ],
)
@pytest.mark.parametrize("source", ["--from export", "--store store"])
def test_command_chooses(
    source: str, options: str, kernel: str, M: int, gpu: Gpu, tried: int
) -> None:
    found = json.loads(command(f"{source} {options} --json").stdout)
    assert (found["kernel"], found["workload"]["M"]) == (kernel, M)
    assert [each["name"] for each in found["gpus"]] == [gpu.name]
    assert found["counts"]["tried"] == tried


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--kernel none",
            "--kernel is 'none', expected what there are trials of: hopper.hilbert, portable",
        ),
        ("--shapes 7", "--shapes is '7', expected what there are trials of: 4096, 512"),
        ("--shapes 512,4096", "--shapes is '512,4096', expected one shape"),
        ("--shapes x", "--shapes is 'x'"),
        ("--dtype int8", "--dtype is 'int8'"),
        ("--layout no", "--layout is 'no', expected one of nt"),
        (
            "--gpu NVIDIA",
            "--gpu is 'NVIDIA', expected what there are trials of: NVIDIA H100 80GB HBM3, "
            "NVIDIA H2",
        ),
        ("--chart x.bmp", "--chart is 'x.bmp'"),
        ("--html /nowhere/x.html", "--html is '/nowhere/x.html'"),
        ("--store /nowhere", "--store is '/nowhere', expected a file"),
        ("--store store", "--store and --from are both there"),
        ("--from /nowhere", "--from is '/nowhere', expected a file"),
    ],
)
def test_bad_arguments_are_usage_errors(options: str, message: str) -> None:
    refused(f"--from export {options}", message)


def test_no_trials_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    refused("", "tuning.sqlite has no trials: outblas tune makes them")


NOW = 10_000.0


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still at NOW."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: NOW))


def snapshots() -> list[Progress]:
    now = NOW
    best = {"best": f"hopper.hilbert[{FIRST}]", "best_ratio": 1.032, "cublas_us": 175.2}
    faults = Counter(wrong=3, hang=1)
    rows = [replace(WORKLOAD, M=m) for m in range(1, 5)]
    return [
        Progress(
            WORKLOAD,
            "0",
            "screening",
            212,
            40,
            91,
            4,
            7,
            faults,
            started=now - 133,
            deadline=now + 4000,
            **best,
        ),
        Progress(
            replace(WORKLOAD, out_dtype="float32"),
            "1",
            "finals",
            9,
            0,
            9,
            rounds=45,
            started=now - 4000,
        ),
        Progress(
            replace(WORKLOAD, K=64),
            "node:GPU-0123456789abcdef",
            "preparing",
            message="asks\n[the model]",
        ),
        Progress(rows[0], "0", "done", 9, 0, 9, **best),
        Progress(rows[1], "0", "done", 9, 0, 9, failures=Counter(crash=9)),
        Progress(rows[2], "0", "failed", message="RuntimeError: no\nway"),
        Progress(rows[3]),
    ]


def shown(found: Sequence[Progress], **options: Any) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tune_view.render(found, **options))
    return console.export_text().splitlines()


def test_the_view_of_a_sweep(still: None) -> None:
    lines = shown(snapshots(), gpu="NVIDIA H100")
    assert max(map(len, lines)) <= 80
    assert lines[0] == "NVIDIA H100: 3 tuned now, 2 done, 1 failed, 1 waiting"
    title, bar, queue, best = lines[2:6]
    assert re.fullmatch(r"4096 bfloat16 nt  screening on GPU 0 +2:13 elapsed, 1:58 left", title)
    assert bar.endswith("131/212 (40 known)  1.032 × cuBLAS, 169.8 µs")
    assert queue == "4 compiling, 7 compiled and waiting; failures: 3 wrong, 1 hang"
    assert best.startswith("best: hopper.hilbert[tile_m=128")
    text = "\n".join(lines)
    for part in ("finals, 45 rounds on GPU 1", "on node:GPU-01234567 ", "asks [the model]"):
        assert part in text
    assert "1:06:40 elapsed" in text
    assert lines[-3:] == [
        "✓ 1x4096x4096 bfloat16 nt on GPU 0  1.032 × cuBLAS, 169.8 µs  hopper.hilbert[ti…",
        "✗ 2x4096x4096 bfloat16 nt on GPU 0  no config is right, failures: 9 crash",
        "✗ 3x4096x4096 bfloat16 nt on GPU 0  RuntimeError: no way",
    ]


def test_what_is_not_measured_is_seen() -> None:
    now = Progress(
        WORKLOAD,
        "0",
        "done",
        9,
        0,
        7,
        best="portable",
        best_ratio=1.5,
        failures=Counter(unmeasured=2),
    )
    assert (
        shown([now])[-1]
        == "✓ 4096 bfloat16 nt on GPU 0  1.500 × cuBLAS, 2 configs not measured  portable"
    )
    assert "failures: 2 unmeasured" in tune_view.line(now)


def test_many_at_a_time_have_two_lines_each() -> None:
    lines = shown(snapshots()[:1] * 8)
    assert len(lines) == 1 + 8 * 3
    assert "131/212 (40 known, 4 failed)" in lines[3]
    assert shown([]) == ["nothing to tune"]


def test_lines_for_logs(still: None) -> None:
    lines = [tune_view.line(p) for p in snapshots()]
    assert all("\n" not in each for each in lines)
    assert re.fullmatch(
        r"4096 bfloat16 nt on GPU 0: screening, 131 of 212, 4 compiling, 7 compiled and waiting, "
        r"best 1\.032 × cuBLAS, "
        r"169\.8 µs by hopper\.hilbert\[tile_m=128.*\], failures: 3 wrong, 1 hang, 2:13 elapsed, "
        r"1:58 left",
        lines[0],
    )
    assert lines[1].startswith("4096 bfloat16 to float32 nt on GPU 1: finals, 9 of 9, 45 rounds")
    assert lines[5:] == [
        "3x4096x4096 bfloat16 nt on GPU 0: failed, RuntimeError: no way",
        "4x4096x4096 bfloat16 nt: waiting",
    ]
