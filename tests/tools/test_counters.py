"""The program that counts by ncu, with a program and a module that stand for NVIDIA's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import counters
from tools.pages import results

NCU = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
(here / "calls").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
Path(sys.argv[sys.argv.index("-o") + 1]).write_text("")
"""
# Two launches, of 30 and of 10 µs, the second without a count of FFMA's pipe. An instruction at
# each of three addresses, the last of which touches no memory. A report owns its launches, and it
# reads its file when it is asked.
READER = """
import weakref
from pathlib import Path

class Metric:
    def __init__(self, value, unit="", instances=()):
        self.value, self.of_unit, self.instances = value, unit, instances
    def as_double(self): return float(self.value)
    def as_uint64(self, index): return self.instances[index]
    def unit(self): return self.of_unit
    def num_instances(self): return len(self.instances)
    def correlation_ids(self): return Metric(0, "", (16, 32, 48))

class Launch:
    def __init__(self, report, time):
        self.report = weakref.ref(report)
        self.metrics = {
            "gpu__time_duration.sum": Metric(1000 * time, "ns"),
            "dram__bytes_read.sum": Metric(3e6, "byte"),
            "dram__bytes_write.sum": Metric(1e6, "byte"),
            "lts__t_sector_hit_rate.pct": Metric(2 * time, "%"),
            "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": Metric(time),
            "inst_executed": Metric(6, "", (1, 2, 3)),
        }
    def name(self): return "kernel"
    def metric_names(self): return tuple(self.metrics)
    def metric_by_name(self, name):
        assert self.report(), "the report is gone"
        assert self.report().path.exists(), "the file is gone"
        return self.metrics.get(name)
    def sass_by_pc(self, pc):
        return {16: "  @P0 LDG.E.128 R4, [R2]", 32: "LDS R1, [R2]", 48: "LDGDEPBAR"}[pc]

class Report:
    def __init__(self, path): self.path = Path(path)
    def range_by_idx(self, index): return self
    def num_actions(self): return 2
    def action_by_idx(self, index): return Launch(self, (30, 10)[index])

load_report = Report
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ncu, on a machine with a GPU."""
    reader = tmp_path / "extras" / "python" / "ncu_report.py"
    reader.parent.mkdir(parents=True)
    reader.write_text(READER)
    (tmp_path / "ncu").write_text(NCU)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "ncu_report", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters, "environment", lambda: {"gpu": "H100"})
    return tmp_path


def measured(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The results that the program prints."""
    assert counters.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)["results"]


def test_launches_are_added_up_and_rates_are_of_the_longest(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cublas, kernel = measured("simt.naive", "--shape", "100", "--instructions", capsys=capsys)

    assert (cublas["provider"], kernel["provider"]) == ("cublas", "simt.naive")
    assert (kernel["dtype"], kernel["layout"], kernel["shape"]) == ("float32", "nn", [100] * 3)
    assert (kernel["us"], kernel["dram_read_bytes"]) == (40, 6e6)
    assert kernel["dram_gbs"] == pytest.approx(8e6 / 40e3)
    assert kernel["flop_per_dram_byte"] == 2e6 / 8e6
    assert kernel["l2_hit_rate"] == pytest.approx(0.6)
    assert kernel["stalls"] == {"barrier": 30}
    assert not {"ffma", "ffma_per_mnk", "fma_active"} & kernel.keys()  # ncu did not count them
    assert kernel["memory"] == [
        {"instruction": "LDG.E.128", "executed": 2},
        {"instruction": "LDS", "executed": 4},
    ]


def test_pages_read_what_is_printed(
    machine: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "counters.json"
    counters.main(["simt.naive", "--config", "block_n=16"])
    path.write_text(capsys.readouterr().out)

    cublas, kernel = results.load([path]).profiles

    assert (cublas.provider, cublas.settings) == ("cublas", {})
    assert (kernel.l2_hit_rate, kernel.settings) == (pytest.approx(0.6), {"block_n": "16"})
