"""The bench on a GPU: cuBLAS against itself, cuBLASLt's alternatives, clocks, energy, a wrong
kernel.
"""

import json
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from outblas.base import grouped_shapes
from outblas.base.shapes import LAYOUTS
from outblas.bench import campaign, cold, grouped, grouped_providers, providers, sustained
from outblas.bench.campaign import Campaign
from outblas.bench.clock import Clock
from outblas.bench.operation import Operation
from outblas.bench.power import EnergyMeter
from outblas.bench.record import Record
from outblas.cli import app
from outblas.core.steps import Steps
from outblas.verify.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

BASE = providers.parse("cublas")


@pytest.fixture(scope="module")
def cublas_twice() -> tuple[Record, Record]:
    """cuBLAS beside itself."""
    first, second = Campaign([BASE, BASE]).run([(2048, 2048, 2048)], ["nt"], ["burst"])
    return first, second


def test_cublas_ties_with_itself(cublas_twice: tuple[Record, Record]) -> None:
    first, second = cublas_twice

    assert (first.provider, second.provider, second.verdict) == ("cublas", "cublas (2)", "tied")
    assert second.ratio == pytest.approx(1, abs=0.01)
    assert second.ratio_apart == pytest.approx(1, abs=0.02)


def test_a_record_has_the_graph_and_the_hosts_time(cublas_twice: tuple[Record, Record]) -> None:
    record, _ = cublas_twice

    assert record.graph
    assert 5 < record.host_us < 200


def test_clock_counts_cycles() -> None:
    clock = Clock()

    clock.start(wait_us=2000)
    torch.cuda._sleep(1_000_000)
    clock.stop()

    assert 200 < clock.mhz() < 3000


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cublaslt_best_is_right(dtype: str, layout: str) -> None:
    best = providers.parse("cublaslt-best")

    assert best.fault(Case(256, 384, 512, getattr(torch, dtype), layout=layout)) is None


@pytest.mark.parametrize("name", ["cublas-no-workspace", "triton-persistent"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_batch_invariant_products_are_right(name: str, dtype: str) -> None:
    for M in (1, 16, 300):
        case = Case(M, 384, 512, getattr(torch, dtype), layout="nt")
        assert providers.parse(name).fault(case) is None


@pytest.fixture(scope="module")
def sustained_records() -> tuple[Record, Record]:
    """Those of cuBLAS and of `portable`, in turns too short to be worth anything."""
    short = {**sustained.run.__kwdefaults__, "seconds": 1.0}
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sustained.run, "__kwdefaults__", short)
        cublas, ours = Campaign([BASE, providers.kernel("portable")], rounds={"sustained": 2}).run(
            [(2048, 2048, 2048)], ["nt"], ["sustained"]
        )
    return cublas, ours


def test_sustained_turns_alternate(sustained_records: tuple[Record, Record]) -> None:
    cublas, ours = sustained_records

    assert (ours.check, ours.rounds, cublas.rounds) == ("exact", 2, 3)


def has_energy_meter() -> bool:
    try:
        EnergyMeter()
    except RuntimeError:
        return False
    return True


def test_sustained_turns_have_their_energy_where_it_is_metered(
    sustained_records: tuple[Record, Record],
) -> None:
    _, ours = sustained_records

    if has_energy_meter():
        assert 30 < ours.watts < 2000
        assert ours.joules == pytest.approx(ours.watts * ours.us / 1e6, rel=0.2)
    else:
        assert ours.watts is None


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        def call() -> None:
            torch.mm(a, b, out=out)
            out[-1, -1] = torch.inf

        return call

    monkeypatch.setattr(campaign.turn, "host_us", lambda call, us: 0.0)
    wrong = providers.Provider("wrong", "", prepare)

    _, record = Campaign([BASE, wrong], rounds={"burst": 2}).run(
        [(256, 256, 256)], ["nn"], ["burst"]
    )

    assert record.check.startswith("wrong: 1 of 65536 elements, first at [255, 255]")
    assert record.us is None
    assert not record.passed


def test_the_command_reports_what_it_timed() -> None:
    result = CliRunner().invoke(
        app, ["bench", "--kernels", "portable", "--shapes", "256x128x64", "--json"]
    )

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
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
    records = campaign.run([(256, 512, 1024)], ["nt"], [mode])
    return {record.provider: record for record in records}


@pytest.mark.parametrize("epilogue", ["bias", "gelu", "bias+gelu+residual", "swiglu"])
def test_an_epilogue_is_timed_beside_torchs_own_functions(epilogue: str) -> None:
    operation = Operation(steps=Steps.parse(epilogue))

    found = timed(operation, "cublaslt-best", "outblas", "outblas-bare", "portable")

    assert {name: record.check for name, record in found.items()} == {
        "cublas": "–",
        "cublaslt-best": "exact",
        "outblas": "bounded",
        "outblas-bare": "exact",
        "portable": "bounded",
    }
    assert all(record.us for record in found.values())
    assert found["outblas-bare"].epilogue == ""


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["fp8", "fp8-rowwise"])
def test_fp8_is_timed_beside_torchs(dtype: str) -> None:
    found = timed(Operation(dtype), "outblas", "cublas-fast-accum")

    assert found["outblas"].check == "bounded"
    assert all(record.us for record in found.values())


@pytest.mark.sm90
def test_block_scaled_fp8_is_timed_beside_torchs() -> None:
    found = timed(Operation("fp8-block"), "outblas")

    assert {name: record.check for name, record in found.items()} == {
        "cublas": "–",
        "outblas": "exact",
    }
    assert all(record.us for record in found.values())


def test_batch_invariant_calls_are_timed() -> None:
    record = timed(Operation(batch_invariant=True), "outblas")["outblas"]

    assert record.check == "exact"
    assert record.batch_invariant


def test_cold_weights_have_a_share_of_the_bandwidth_of_a_copy() -> None:
    record = timed(Operation(), "outblas", mode="cold")["outblas"]

    assert record.gbs is not None
    assert record.bandwidth_share == pytest.approx(record.gbs / cold.copy_gbs(), rel=0.2)


# ---- groups
GROUPS = "8x4096x512x1024:zipf,8x4096x512x1024:terms"


def grouped_records(text: str, *names: str, mode: str = "burst") -> dict[tuple[str, str], Record]:
    """The records of providers beside torch's grouped_mm, by provider and form."""
    chosen = [grouped_providers.parse(name) for name in ("torch", *names)]
    campaign = Campaign(chosen, Operation("bfloat16"), SHORT_ROUNDS)
    tasks = grouped.tasks(grouped_shapes.parse(text), ["nt"], False, Operation())
    return {(r.provider, str(r.form)): r for r in campaign.run_tasks(tasks, [mode])}


@pytest.mark.parametrize(
    "names",
    [("outblas", "portable"), pytest.param(("hopper.grouped",), marks=pytest.mark.sm90)],
    ids=", ".join,
)
def test_groups_are_checked_and_timed_beside_torchs(names: tuple[str, ...]) -> None:
    found = grouped_records(GROUPS, *names)

    assert {key: record.check for key, record in found.items()} == {
        (name, form): "–" if name == "torch" else "exact"
        for name in ("torch", *names)
        for form in ("rows", "terms")
    }
    assert all(record.us and record.ratio for record in found.values())


def test_groups_are_timed_with_cold_weights() -> None:
    record = grouped_records("8x256x4096x4096", "outblas", mode="cold")["outblas", "rows"]

    assert record.bandwidth_share is not None
    assert 0.05 < record.bandwidth_share < 1.3


def test_groups_that_end_elsewhere_are_found_on_a_gpu() -> None:
    (task,) = grouped.tasks(grouped_shapes.parse("8x4096x512x1024"), ["nt"], False, Operation())

    def prepare(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Callable[[], object]:
        shifted = offs.clone()
        shifted[0] += 1
        return lambda: torch.nn.functional.grouped_mm(a, b, offs=shifted)

    said = task.case(Operation("bfloat16")).fault(prepare)

    assert said is not None
    assert "first at [512, " in said


# Groups of rows that torch does not take as they are, and groups without terms.
SCALED_GROUPS = "16x1000x512x1024:zipf,16x1040x512x1024:zipf:terms,4x512x512x1024"


@pytest.mark.sm90
def test_scaled_groups_are_checked_and_timed_beside_torchs_single_products() -> None:
    names = "torch", "outblas", "hopper.grouped", "portable"
    operation = Operation("fp8-block")
    chosen = [grouped_providers.parse(name, operation) for name in names]
    campaign = Campaign(chosen, operation, SHORT_ROUNDS)
    tasks = grouped.tasks(grouped_shapes.parse(SCALED_GROUPS), ["nt"], False, operation)

    records = list(campaign.run_tasks(tasks, ["burst"]))

    assert [(r.provider, r.check) for r in records] == [
        (name, "–" if name == "torch" else "exact") for _ in tasks for name in names
    ]
    assert all(record.us and record.ratio for record in records)
    base = grouped_providers.parse("torch", operation)
    assert [task.case(operation).fault(base.prepare) for task in tasks] == [None] * len(tasks)


def test_the_products_of_a_backward_pass_are_timed() -> None:
    campaign = Campaign([BASE, providers.parse("outblas")], rounds=SHORT_ROUNDS)

    records = list(campaign.run([(256, 512, 1024)], ["nt"], ["burst"], backward=True))

    found = {(r.product, r.shape, r.layout): r.check for r in records if r.provider == "outblas"}
    assert found == {
        ("dA", (256, 1024, 512), "nn"): "exact",
        ("dB", (512, 1024, 256), "tn"): "exact",
    }
