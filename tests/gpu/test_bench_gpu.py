"""The bench on a GPU: cuBLAS against itself, cuBLASLt's alternatives, clocks, energy, a wrong
kernel, operations and groups beside torch's; and the program that counts by ncu.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.commands import invoke
from support.paths import ROOT

from outblas.base import grouped_shapes
from outblas.base.shapes import LAYOUTS
from outblas.bench import campaign, cold, grouped_providers, providers, sustained
from outblas.bench.campaign import Campaign
from outblas.bench.clock import Clock
from outblas.bench.operation import Operation
from outblas.bench.power import EnergyMeter
from outblas.bench.record import Record
from outblas.bench.tasks import GemmTask, grouped_tasks, tasks
from outblas.call.steps import Steps
from outblas.verify.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

BASE = providers.parse("cublas")


def test_cublas_ties_with_itself() -> None:
    first, second = Campaign([BASE, BASE]).run([GemmTask((2048, 2048, 2048), "nt")], ["burst"])

    assert (first.provider, second.provider, second.verdict) == ("cublas", "cublas (2)", "tied")
    assert second.ratio == pytest.approx(1, abs=0.01)
    assert second.ratio_apart == pytest.approx(1, abs=0.02)
    assert second.graph
    assert 5 < second.host_us < 200


def test_clock_counts_cycles() -> None:
    clock = Clock()

    clock.start(wait_us=2000)
    torch.cuda._sleep(1_000_000)
    clock.stop()

    assert 200 < clock.mhz() < 3000


PEERS = "cublaslt-best", "cublas-no-workspace", "triton-persistent"
PEERS_IN = [(PEERS[0], torch.float32), *itertools.product(PEERS, (torch.bfloat16, torch.float16))]


@pytest.mark.parametrize(("name", "dtype"), PEERS_IN, ids=str)
def test_peers_are_right(name: str, dtype: torch.dtype) -> None:
    peer, is_lt = providers.parse(name), name == "cublaslt-best"
    for M, layout in itertools.product((1, 16, 300), LAYOUTS if is_lt else ("nt",)):
        shape = (256, 384, 512) if is_lt else (M, 384, 512)
        assert peer.fault(Case(*shape, dtype, layout=layout)) is None


def has_energy_meter() -> bool:
    try:
        EnergyMeter()
    except RuntimeError:
        return False
    return True


def test_sustained_turns_alternate_and_have_their_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns too short to be worth anything."""
    short = {**sustained.run.__kwdefaults__, "seconds": 1.0}
    monkeypatch.setattr(sustained.run, "__kwdefaults__", short)
    campaign = Campaign([BASE, providers.kernel("portable")], rounds={"sustained": 2})

    cublas, ours = campaign.run([GemmTask((2048, 2048, 2048), "nt")], ["sustained"])

    assert (ours.check, ours.rounds, cublas.rounds) == ("exact", 2, 3)
    if has_energy_meter():
        assert 30 < ours.watts < 2000
        assert ours.joules == pytest.approx(ours.watts * ours.us / 1e6, rel=0.2)
    else:
        assert ours.watts is None


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, _: Any) -> Callable[[], None]:
        def call() -> None:
            torch.mm(a, b, out=out)
            out[-1, -1] = torch.inf

        return call

    monkeypatch.setattr(campaign.turn, "host_us", lambda call, us: 0.0)
    wrong = providers.Provider("wrong", "", prepare)

    _, record = Campaign([BASE, wrong], rounds={"burst": 2}).run(
        [GemmTask((256, 256, 256), "nn")], ["burst"]
    )

    assert record.check.startswith("wrong: 1 of 65536 elements, first at [255, 255]")
    assert record.us is None
    assert not record.passed


def test_the_command_reports_what_it_timed() -> None:
    options = "--kernels", "portable", "--shapes", "256x128x64", "--json"

    report = json.loads(invoke("bench", *options, code=0).stdout)

    assert report["environment"]["gpu"] == torch.cuda.get_device_name()
    by_mode = {(r["provider"], r["mode"]): r for r in report["results"]}
    assert {key: r["check"] for key, r in by_mode.items()} == {
        (provider, mode): check
        for provider, check in (
            ("cublas", "–"),
            ("cublaslt-best", "exact"),
            ("portable", "exact"),
        )
        for mode in ("burst", "cold")
    }
    assert all(r["us"] > 0 and r["clock_mhz"] > 0 for r in report["results"])


# ---- operations beside bare products
SHORT_ROUNDS = {"burst": 2, "cold": 2}


def timed(operation: Operation, *names: str, mode: str = "burst") -> dict[str, Record]:
    """The records of providers at 256×512×1024, by name."""
    chosen = [providers.parse(name, operation) for name in ("cublas", *names)]
    campaign = Campaign(chosen, operation, SHORT_ROUNDS)
    records = campaign.run([GemmTask((256, 512, 1024), "nt")], [mode])
    return {record.provider: record for record in records}


# What becomes of the check of each provider; None where torch's own error is not known.
FUSED = {
    "cublas": "–",
    "cublaslt-best": "exact",
    "outblas": "bounded",
    "outblas-bare": "exact",
    "portable": "bounded",
}
FP8 = {"cublas": "–", "outblas": "bounded", "cublas-fast-accum": None}
EXACT = {"cublas": "–", "outblas": "exact"}
TIMED: dict[str, tuple[Operation, dict[str, str | None]]] = {
    "bias": (Operation(steps=Steps.parse("bias")), {**FUSED}),
    "gelu": (Operation(steps=Steps.parse("gelu")), {**FUSED}),
    "all steps": (Operation(steps=Steps.parse("bias+gelu+residual")), {**FUSED}),
    "swiglu": (Operation(steps=Steps.parse("swiglu")), {**FUSED}),
    "fp8": (Operation("fp8"), FP8),
    "fp8-rowwise": (Operation("fp8-rowwise"), FP8),
    "fp8-block": (Operation("fp8-block"), {**EXACT}),
    "batch invariant": (Operation(batch_invariant=True), {**EXACT}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.sm90] if n.startswith("fp8") else []) for n in TIMED],
)
def test_an_operation_is_checked_and_timed_beside_torchs(name: str) -> None:
    operation, checks = TIMED[name]

    records = timed(operation, *list(checks)[1:])

    assert list(records) == list(checks)
    for provider, record in records.items():
        assert record.us, provider
        assert checks[provider] in (None, record.check)
        assert record.batch_invariant == operation.batch_invariant
    assert "outblas-bare" not in records or records["outblas-bare"].epilogue == ""


def test_cold_weights_have_a_share_of_the_bandwidth_of_a_copy() -> None:
    record = timed(Operation(), "outblas", mode="cold")["outblas"]

    assert record.gbs is not None
    assert record.bandwidth_share == pytest.approx(record.gbs / cold.copy_gbs(), rel=0.2)


# ---- groups
ROWS_AND_TERMS = "8x4096x512x1024:zipf,8x4096x512x1024:terms"
# Groups of rows that torch does not take as they are, and groups without terms.
SCALED = "16x1000x512x1024:zipf,16x1040x512x1024:zipf:terms,4x512x512x1024"
on_hopper = pytest.mark.sm90


def grouped_records(dtype: str, shapes: str, names: tuple[str, ...], mode: str) -> list[Record]:
    """The records of providers beside torch's grouped_mm, or its products of single groups, which
    are right.
    """
    operation = Operation(dtype)
    base, *others = (grouped_providers.parse(name, operation) for name in ("torch", *names))
    groups = grouped_tasks(grouped_shapes.parse(shapes), ["nt"], False, operation)
    assert [task.case(operation).fault(base.prepare) for task in groups] == [None] * len(groups)
    campaign = Campaign([base, *others], operation, SHORT_ROUNDS)
    return list(campaign.run(groups, [mode]))


@pytest.mark.parametrize(
    ("dtype", "shapes", "names"),
    [
        ("bfloat16", ROWS_AND_TERMS, ("outblas", "portable")),
        pytest.param("bfloat16", ROWS_AND_TERMS, ("hopper.grouped",), marks=on_hopper),
        pytest.param(
            "fp8-block", SCALED, ("outblas", "hopper.grouped", "portable"), marks=on_hopper
        ),
    ],
)
def test_groups_are_checked_and_timed_beside_torchs(
    dtype: str, shapes: str, names: tuple[str, ...]
) -> None:
    records = grouped_records(dtype, shapes, names, "burst")

    assert [(record.provider, record.check) for record in records] == [
        (name, "–" if name == "torch" else "exact")
        for _ in shapes.split(",")
        for name in ("torch", *names)
    ]
    assert all(record.us and record.ratio for record in records)


def test_groups_are_timed_with_cold_weights() -> None:
    _, record = grouped_records("bfloat16", "8x256x4096x4096", ("outblas",), "cold")

    assert record.bandwidth_share is not None
    assert 0.05 < record.bandwidth_share < 1.3


def test_the_products_of_a_backward_pass_are_timed() -> None:
    campaign = Campaign([BASE, providers.parse("outblas")], rounds=SHORT_ROUNDS)

    records = list(campaign.run(tasks([(256, 512, 1024)], ["nt"], True), ["burst"]))

    checks = {(r.product, r.shape, r.layout): r.check for r in records if r.provider == "outblas"}
    assert checks == {
        ("dA", (256, 1024, 512), "nn"): "exact",
        ("dB", (512, 1024, 256), "tn"): "exact",
    }


# ---- counters by ncu itself
OPERANDS_BYTES = 2 * 2 * 1024**2


def measured(*arguments: str) -> list[dict[str, Any]]:
    """The results for a GEMM of 1024 x 1024 x 1024; skips where nobody may count."""
    command = [sys.executable, "-m", "tools.counters", *arguments, "--shape", "1024"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


@pytest.mark.parametrize(
    "kernel", ["portable", pytest.param("hopper.tma_wgmma", marks=pytest.mark.sm90)]
)
def test_counters_are_plausible(kernel: str) -> None:
    results = cublas, ours = measured(kernel, "--instructions")

    assert all(launch["kernel"].startswith("outblas_") for launch in ours["launches"])
    assert not any(launch["kernel"].startswith("outblas_") for launch in cublas["launches"])
    assert ours["ffma"] == 0
    for result in results:
        assert result["us"] > 1
        assert result["l2_to_sm_bytes"] >= OPERANDS_BYTES
        assert 0 < result["flop_per_l2_byte"] <= 2 * 1024**3 / OPERANDS_BYTES
        assert 0 < result["tensor_active"] <= 1
        assert 0 < result["occupancy"] <= 1
        assert sum(result["stalls"].values()) > 0
        assert sum(row["executed"] for row in result["memory"]) > 0


@pytest.mark.sm90
def test_phases_are_counted_by_role() -> None:
    (result,) = measured("hopper.hilbert", "--phases")

    assert len(result["phases"]) > 1
    assert all(role["total"] > 0 for role in result["phases"])
