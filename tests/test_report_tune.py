"""What a sweep found: ranks, the report and its chart, the command, and the views while it runs."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from test_report import Page
from typer.testing import CliRunner, Result

from outblas import charts
from outblas.autotune import transfer
from outblas.autotune.progress import Progress
from outblas.autotune.rank import ranks, spearman
from outblas.autotune.records import Finalist, Gpu, Status, Trial, Winner, Workload
from outblas.autotune.store import Store
from outblas.cli import tune_view
from outblas.cli.report_tune import tune as command
from outblas.report import tune

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 700.0, driver="570.1", torch="2.13")
H200 = Gpu("NVIDIA H200", 90, 132)
CUBE = Workload(4096, 4096, 4096)
CUBLAS_US = 175.0


def trial(config: str, ratio: float | None = None, predicted: float | None = None, **changes: Any) -> Trial:
    status: Status = "ok" if ratio is not None else "failed"
    known: dict[str, Any] = {
        "gpu": H100, "workload": CUBE, "kernel": "hopper.gemm", "source": "s", "config": config, "status": status,
        "predicted_us": predicted, "when": "2026-05-01T10:00:00+00:00",
    }  # fmt: skip
    if ratio is not None:
        known |= {"us": CUBLAS_US / ratio, "ratio": ratio, "ratio_low": ratio * 0.99, "ratio_high": ratio * 1.01}
    return Trial(**(known | changes))


def config(m: int, n: int, slots: int, group: int = 8) -> str:
    return f"tile_m={m},tile_n={n},tile_k=64,slots={slots},order=hilbert,group_m={group}"


def space() -> list[Trial]:
    """Sixteen right configs of four tiles, the first the best by the screen, and four that failed."""
    tiles = [(128, 256), (256, 128), (128, 128), (64, 64)]
    found = [
        trial(config(m, n, slots), 1.05 - 0.1 * i - 0.01 * abs(slots - 3), 170 + 10 * i + abs(slots - 4))
        for i, (m, n) in enumerate(tiles)
        for slots in (2, 3, 4, 5)
    ]
    return [
        *found,
        trial(config(192, 160, 4), reason="RuntimeError: ptxas\n  ran out"),
        trial(config(192, 160, 3), reason="RuntimeError: ptxas\n  ran out"),
        trial(config(192, 160, 2), reason="odd"),
        trial(config(64, 64, 3, 16), status="hang"),
    ]


def winner(**changes: Any) -> Winner:
    second, first = config(128, 256, 3), config(128, 256, 4)
    finalists = [
        Finalist(kernel="hopper.gemm", config=first, us=170.0, ratio=1.03, ratio_low=1.02, ratio_high=1.04),
        Finalist(kernel="portable", config="block_m=64", us=170.5, ratio=1.02, ratio_low=1.01, ratio_high=1.03),
        Finalist(kernel="hopper.gemm", config=second, us=171.0, ratio=1.01, ratio_low=1.0, ratio_high=1.02),
    ]
    known: dict[str, Any] = {
        "gpu": H100, "workload": CUBE, "kernel": "hopper.gemm", "source": "s", "config": first, "us": 170.0,
        "cublas_us": CUBLAS_US, "ratio": 1.03, "ratio_low": 1.02, "ratio_high": 1.04, "rounds": 61, "runner_up": second,
        "lead": 1.0059, "lead_low": 1.002, "lead_high": 1.009, "confidence": 0.9971, "separated": True, "screened": 20,
        "valid": 24, "finalists": tuple(finalists),
    }  # fmt: skip
    return Winner(**(known | changes))


def build(trials: Sequence[Trial], winners: Sequence[Winner] = (), **options: Any) -> tune.TuneReport:
    return tune.build(trials, winners, **({"kernel": "hopper.gemm", "workload": CUBE} | options))


def rows(report: tune.TuneReport, heading: str) -> list[Sequence[str]]:
    (found,) = [rows for title, _, rows in report.tables() if heading in title]
    return list(found)


def test_ranks_share_the_mean_of_equal_values() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0, 3.0]) == [4.0, 1.0, 4.0, 2.0, 4.0]
    assert ranks([]) == []


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # IQ and hours of television: the textbook's example
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        ([1, 1, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
    ],
)
def test_spearman(predicted: list[float], measured: list[float], expected: float) -> None:
    assert spearman(predicted, measured) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predicted", "measured", "message"),
    [
        ([1.0, 2.0], [1.0], "predicted has 2 values and measured 1"),
        ([1.0], [1.0], "predicted has 1 values, expected at least 2"),
        ([1.0, 2.0], [3.0, 3.0], "measured has 3.0 only"),
    ],
)
def test_spearman_of_what_has_no_order(predicted: list[float], measured: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        spearman(predicted, measured)


def test_the_best_and_where_their_figures_come_from() -> None:
    report = build(space(), [winner()], limits=lambda config: f"{len(tune.fields(config))} fields")
    assert [entry.final for entry in report.top] == [True] * 2 + [False] * 8
    first, second, third = rows(report, "best")[:3]
    assert first == (
        "1", "tile_m=128, tile_n=256, slots=4", "170.0", "1.030 (1.020–1.040)", "finals", "1", "6 fields",
    )  # fmt: skip
    assert second[3:6] == ("1.010 (1.000–1.020)", "finals", "2–3")  # slots 3 and 5 are one to the model
    assert third[1:5] == ("tile_m=128, tile_n=256, slots=2", "168.3", "1.040", "screen")
    assert "Common to the 10 best: tile_k=64, order=hilbert, group_m=8." in report.notes()
    assert [len(row) for row in rows(build(space()), "best")] == [6] * 10


def test_the_winner() -> None:
    said = dict(rows(build(space(), [winner()]), "Winner"))
    assert said["config"] == config(128, 256, 4)
    assert said["× cuBLAS"] == "1.030 (1.020–1.040), median of 61 rounds"
    assert said["lead"] == "1.0059 (1.0020–1.0090) over the runner-up"
    assert said["confidence"] == "99.7% that it is the fastest of the finalists"
    assert said["runner-up"] == "slots=3"
    alone = dict(rows(build(space(), [winner(lead=None, runner_up="", confidence=None)]), "Winner"))
    assert "lead" not in alone
    assert "not separated" in dict(rows(build(space(), [winner(separated=False)]), "Winner"))["lead"]


def test_tiles_stages_and_failures() -> None:
    report = build(space(), [winner()])
    tiles = {row[0]: row[1:] for row in rows(report, "by tile")}
    assert tiles == {
        "64": ("0.750", "–", "–", "–"), "128": ("–", "0.850", "–", "1.050"), "192": ("–", "–", "failed", "–"),
        "256": ("–", "0.950", "–", "–"),
    }  # fmt: skip
    assert rows(report, "by slots")[0] == ("128×256", "1.040", "1.050", "1.040", "1.030")
    assert rows(report, "Failures") == [("failed", "3", "RuntimeError: ptxas ran out"), ("hang", "1", "–")]
    assert "20 configs tried: 16 right, 4 failed." in report.notes()


def test_the_model_beside_the_measurement() -> None:
    report = build(space(), [winner()])
    assert report.agreement is not None
    assert report.agreement.place == (1, 1)
    assert report.agreement.rho == pytest.approx(0.947, abs=1e-3)
    assert str(report.agreement) == "best measured is 1st of 16 predicted: top 7%"
    # Without finals the best is the screen's, which the model cannot tell from another.
    assert str(build(space()).agreement) == "best measured is 2nd to 3rd of 16 predicted: top 19%"
    blind = build([dataclasses.replace(t, predicted_us=5.0) for t in space()])
    assert blind.agreement is not None
    assert (blind.agreement.rho, blind.agreement.place) == (None, (1, 16))
    silent = build([dataclasses.replace(t, predicted_us=None) for t in space()])
    assert silent.agreement is None
    assert all(len(row) == 5 for row in rows(silent, "best"))


def test_record() -> None:
    value = json.loads(json.dumps(build(space(), [winner()]).record()))
    assert value["counts"] == {"tried": 20, "right": 16, "failed": 4, "left_out": 0}
    assert (value["kernel"], value["workload"]["dtype"], value["gpus"][0]["sms"]) == ("hopper.gemm", "bfloat16", 132)
    assert value["winner"]["config"] == value["top"][0]["config"] == config(128, 256, 4)
    assert (value["top"][0]["final"], value["top"][0]["predicted"], value["top"][0]["limits"]) == (True, [1, 1], None)
    assert value["tiles"][-1] == {"m": 256, "n": 128, "ratio": pytest.approx(0.95), "tried": 4, "right": 4}
    assert {"m": 192, "n": 160, "ratio": None, "tried": 3, "right": 0} in value["tiles"]
    assert value["stages"]["field"] == "slots"
    assert list(value["stages"]["lines"][0]["ratios"]) == ["2", "3", "4", "5"]
    assert (value["model"]["configs"], value["model"]["best_place"]) == (16, [1, 1])
    assert value["failures"]["hang"] == {"trials": 1, "reason": "", "config": config(64, 64, 3, 16)}
    bare = build([trial("a=1", 1.0)]).record()
    assert (bare["winner"], bare["model"], bare["failures"], bare["top"][0]["config"]) == (None, None, {}, "a=1")


def test_machines_and_sources_are_not_mixed() -> None:
    old = [dataclasses.replace(t, source="old", when="2026-04-01") for t in space()]
    other = [dataclasses.replace(t, gpu=H200) for t in space()[:3]]
    again = trial(config(128, 256, 3), 0.5, when="2026-06-01")
    slice_of = dataclasses.replace(H100, sms=16)
    report = build([again, *space(), *other, *old, trial("tile_m=1", 2.0, gpu=slice_of)], [winner(source="old")])
    assert (report.gpus, report.left_out, report.winner) == ((H100,), 21, None)
    assert {t.config: t.ratio for t in report.trials}[config(128, 256, 3)] == 0.5
    assert len(build([*space(), *other], gpu_name="NVIDIA H200").trials) == 3
    assert build(space(), [winner(gpu=H200), winner(kernel="portable")]).winner is None
    newest = build(space(), [winner(rounds=1, when="b"), winner(rounds=2, when="a")]).winner
    assert newest is not None
    assert newest.rounds == 1


@pytest.mark.parametrize(
    ("trials", "options", "message"),
    [
        ([], {}, "no trials of hopper.gemm at 4096 bfloat16 nt; there are none at all"),
        (space(), {"kernel": "portable"}, "no trials of portable at 4096 bfloat16 nt; there are some of hopper.gemm"),
        (space(), {"gpu_name": "T4"}, "on T4; there are some of hopper.gemm at 4096 bfloat16 nt on NVIDIA H100"),
    ],
)
def test_what_is_missing_is_named(trials: list[Trial], options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(trials, **options)


SPACES: dict[str, list[Trial]] = {
    "all": space(),
    "a single trial": [trial(config(128, 256, 4), 1.0, 170.0)],
    "one tile": [trial(config(128, 256, slots), 0.9, 170.0 + slots) for slots in (2, 3, 4)],
    "ties": [trial(config(128, 128 + 64 * i, slots), 0.9, 170.0) for i in range(3) for slots in (2, 3)],
    "no stages": [trial(f"block_m={m},block_n={n},threads=256", 0.01 * m + n / 999) for m in (32, 64) for n in (8, 16)],
    "stages only": [trial(f"num_stages={n}", 0.5 + n / 10) for n in (1, 2, 3)],
    "the model only": [trial(f"vector={n}", 0.5 + n / 10, 10 - n) for n in (1, 2)],
    "no predictions": [dataclasses.replace(t, predicted_us=None) for t in space()],
}


@pytest.mark.parametrize("name", SPACES)
def test_pages(name: str) -> None:
    report = build(SPACES[name])
    text = tune.html(report)
    page = Page(text)
    assert {"svg", "table"} <= set(page.seen)
    assert "hopper.gemm, 4096 bfloat16 nt" in page.text
    assert {link.rstrip('"') for link in re.findall(r"https?://[^\s>]+", text)} <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    json.dumps(report.record())


def test_nothing_right_is_a_page_without_a_chart() -> None:
    report = build([t for t in space() if not t.ok])
    assert [heading for heading, *_ in report.tables()] == ["Failures"]
    page = Page(tune.html(report))
    assert "svg" not in page.seen
    assert "4 configs tried: 0 right, 4 failed." in page.text
    with pytest.raises(ValueError, match="there is nothing to draw of hopper"):
        tune.draw(report)


def test_the_chart_says_what_it_shows(tmp_path: Path) -> None:
    charts.save(tune.draw(build(space(), [winner()])), tmp_path / "c.svg")
    drawn = (tmp_path / "c.svg").read_text(encoding="utf-8")
    for text in ("hopper.gemm, 4096 bfloat16 nt: 1.030 × cuBLAS", "1.050", "failed", "0 of 3", "128×256", "ρ 0.9"):
        assert text in drawn


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path) -> Invoke:
    """The command on an export and on a store, which hold trials of two kernels, three workloads and two GPUs."""
    small = dataclasses.replace(CUBE, M=512, N=512, K=512)
    trials = [
        *space(),
        *(dataclasses.replace(t, gpu=H200) for t in space()[:9]),
        *(dataclasses.replace(t, workload=small) for t in space()[:5]),
        *(dataclasses.replace(t, kernel="portable", workload=dataclasses.replace(CUBE, layout="nn")) for t in space()),
    ][:-1]
    transfer.export(trials, [winner()], tmp_path / "--from")
    with Store(tmp_path / "--store") as kept:
        kept.merge(trials, [winner()])
    app = typer.Typer()
    app.command()(command)
    return lambda *arguments, source="--from": CliRunner().invoke(app, [source, str(tmp_path / source), *arguments])


def test_command(invoke: Invoke, tmp_path: Path) -> None:
    html, chart, saved = (tmp_path / name for name in ("t.html", "t.png", "t.json"))
    done = invoke("--html", str(html), "--chart", str(chart), "--save", str(saved))
    assert done.exit_code == 0, done.output
    assert "hopper.gemm, 4096 bfloat16 nt, NVIDIA H100 80GB HBM3" in done.stdout
    assert "best measured is 1st of 16 predicted" in done.stdout
    assert "svg" in Page(html.read_text()).seen
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert json.loads(saved.read_text())["counts"]["tried"] == 20


@pytest.mark.parametrize(
    ("arguments", "kernel", "shape", "gpu", "tried"),
    [
        ((), "hopper.gemm", 4096, H100, 20),
        (("--kernel", "portable"), "portable", 4096, H100, 19),
        (("--layout", "nn"), "portable", 4096, H100, 19),
        (("--shapes", "512"), "hopper.gemm", 512, H100, 5),
        (("--gpu", "h200"), "hopper.gemm", 4096, H200, 9),
    ],
)
@pytest.mark.parametrize("source", ["--from", "--store"])
def test_command_chooses(
    source: str, arguments: tuple[str, ...], kernel: str, shape: int, gpu: Gpu, tried: int, invoke: Invoke
) -> None:
    done = invoke(*arguments, "--json", source=source)
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert (value["kernel"], value["workload"]["M"], value["counts"]["tried"]) == (kernel, shape, tried)
    assert [each["name"] for each in value["gpus"]] == [gpu.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "none"), "--kernel is 'none', expected what there are trials of: hopper.gemm, portable"),
        (("--shapes", "7"), "--shapes is '7', expected what there are trials of: 4096, 512"),
        (("--shapes", "512,4096"), "--shapes is '512,4096', expected one shape"),
        (("--shapes", "x"), "--shapes is 'x'"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--layout", "no"), "--layout is 'no', expected one of nt"),
        (("--gpu", "NVIDIA"), "--gpu is 'NVIDIA', expected what there are trials of: NVIDIA H100 80GB HBM3, NVIDIA H2"),
        (("--chart", "x.bmp"), "--chart is 'x.bmp'"),
        (("--html", "/nowhere/x.html"), "--html is '/nowhere/x.html'"),
        (("--store", "/nowhere"), "--store is '/nowhere', expected a file"),
        (("--store", __file__), "--store and --from are both there"),
        (("--from", "/nowhere"), "--from is '/nowhere', expected a file"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...], message: str, invoke: Invoke) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "".join(message.split()) in "".join(done.stderr.replace("│", "").split())


def test_no_trials_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2
    said = "".join(done.stderr.replace("│", "").split())
    assert "tuning.sqlitehasnotrials:outblastunemakesthem" in said


def snapshots() -> list[Progress]:
    now = time.monotonic()
    long = "hopper.gemm[tile_m=128,tile_n=256,slots=4,cluster_m=2,order=hilbert,store_buffers=2,group_m=16]"
    timed: dict[str, Any] = {"best": long, "best_ratio": 1.032, "cublas_us": 175.2}
    failures = Counter({"wrong": 3, "hang": 1})
    return [
        Progress(CUBE, "0", "screening", 212, 40, 91, 4, 7, failures, started=now - 133, deadline=now + 4000, **timed),
        Progress(dataclasses.replace(CUBE, out_dtype="float32"), "1", "finals", 9, 0, 9, rounds=45, started=now - 4000),
        Progress(
            dataclasses.replace(CUBE, K=64), "node:GPU-0123456789abcdef", "preparing", message="asks\n[the model]"
        ),
        Progress(dataclasses.replace(CUBE, M=1), "0", "done", 9, 0, 9, **timed),
        Progress(dataclasses.replace(CUBE, M=2), "0", "done", 9, 0, 9, failures=Counter({"crash": 9})),
        Progress(dataclasses.replace(CUBE, M=3), "0", "failed", message="RuntimeError: no\nway"),
        Progress(dataclasses.replace(CUBE, M=4)),
    ]


def shown(found: Sequence[Progress], **options: Any) -> list[str]:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tune_view.render(found, **options))
    return console.export_text().splitlines()


def test_the_view_of_a_sweep() -> None:
    lines = shown(snapshots(), gpu="NVIDIA H100")
    assert max(map(len, lines)) <= 80
    assert lines[0] == "NVIDIA H100: 3 tuned now, 2 done, 1 failed, 1 waiting"
    first = lines[2:6]
    assert first[0].startswith("4096 bfloat16 nt  screening on GPU 0")
    assert re.search(r" 2:1\d elapsed, [12]:\d\d left$", first[0])
    assert first[1].endswith("131/212 (40 known)  1.032 × cuBLAS, 169.8 µs")
    assert first[2] == "4 compiling, 7 compiled and waiting; failures: 3 wrong, 1 hang"
    assert first[3].startswith("best: hopper.gemm[tile_m=128")
    text = "\n".join(lines)
    assert "finals, 45 rounds on GPU 1" in text
    assert re.search(r"1:06:4\d elapsed", text)
    assert "on node:GPU-01234567 " in text
    assert "asks [the model]" in text
    assert "✓ 1x4096x4096 bfloat16 nt on GPU 0  1.032 × cuBLAS, 169.8 µs" in text
    assert "✗ 2x4096x4096 bfloat16 nt on GPU 0  no config is right, failures: 9 crash" in text
    assert lines[-1] == "✗ 3x4096x4096 bfloat16 nt on GPU 0  RuntimeError: no way"


def test_many_at_a_time_have_two_lines_each() -> None:
    lines = shown(snapshots()[:1] * 8)
    assert len(lines) == 1 + 8 * 3
    assert "131/212 (40 known, 4 failed)" in lines[3]
    assert shown([]) == ["nothing to tune"]


def test_lines_for_logs() -> None:
    lines = [tune_view.line(p) for p in snapshots()]
    assert all("\n" not in each for each in lines)
    assert lines[0].startswith("4096 bfloat16 nt on GPU 0: screening, 131 of 212, 4 compiling, 7 compiled and waiting")
    assert "best 1.032 × cuBLAS, 169.8 µs by hopper.gemm[tile_m=128" in lines[0]
    assert re.search(r", failures: 3 wrong, 1 hang, 2:1\d elapsed, [12]:\d\d left$", lines[0])
    assert lines[1].startswith("4096 bfloat16 to float32 nt on GPU 1: finals, 9 of 9, 45 rounds")
    assert lines[5:] == [
        "3x4096x4096 bfloat16 nt on GPU 0: failed, RuntimeError: no way", "4x4096x4096 bfloat16 nt: waiting",
    ]  # fmt: skip
