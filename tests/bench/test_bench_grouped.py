"""Grouped products in a campaign: operands, the check, what is timed, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_machine import VirtualGpu, install
from support.commands import invoke, refuses

from outblas.base.grouped_shapes import Distribution, GroupedWorkload, parse
from outblas.bench import compare, grouped
from outblas.bench.campaign import Campaign
from outblas.bench.grouped import GroupedCase, GroupedProvider, GroupedTask
from outblas.bench.operation import Operation
from outblas.bench.record import Record
from outblas.cli.bench import row
from outblas.verify.kernels import Refused

ROWS = GroupedTask(GroupedWorkload(8, 100, 64, 32, "zipf"), "nt")
TERMS = GroupedTask(GroupedWorkload(8, 100, 64, 32, "zipf", "terms"), "tn")
BF16 = Operation("bfloat16")
MIB = 1 << 20


# ---- tasks
def test_gradients_of_weights_have_the_layout_in_which_terms_are_not_contiguous() -> None:
    (task,) = grouped.tasks(parse("8x100x64x32:terms"), ["nt"], False)

    assert task.layout == "tn"


@pytest.mark.parametrize(("layout", "of_rows"), [("nt", "nn"), ("nn", "nt")])
def test_a_backward_pass_reads_the_same_weights_by_their_other_dimension(
    layout: str, of_rows: str
) -> None:
    of_a, of_b = grouped.tasks(parse("8x100x64x32"), [layout], True)

    assert (of_a.product, of_a.layout, of_a.shape) == ("dA", of_rows, (100, 32, 64))
    assert (of_b.product, of_b.layout, of_b.shape) == ("dB", "tn", (32, 64, 100))


def test_operands_lie_as_the_layout_says() -> None:
    made = {
        layout: grouped.operands(
            replace(ROWS, layout=layout), torch.float32, torch.zero_, torch.zero_, "cpu"
        )
        for layout in ("nt", "nn")
    }

    assert {layout: (a.stride(), b.stride()) for layout, (a, b, _) in made.items()} == {
        "nt": ((32, 1), (64 * 32, 1, 32)),
        "nn": ((32, 1), (64 * 32, 64, 1)),
    }


def test_operands_of_weight_gradients_are_contiguous_beside_the_terms() -> None:
    a, b, offs = grouped.operands(TERMS, torch.float32, torch.zero_, torch.zero_, "cpu")

    assert (a.shape, a.stride(), b.shape, b.stride()) == ((32, 100), (1, 32), (100, 64), (64, 1))
    assert offs.tolist() == list(TERMS.workload.ends)


@pytest.mark.parametrize(
    ("task", "elements"),
    [
        pytest.param(ROWS, 100 * (32 + 64) + 8 * 32 * 64, id="rows"),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 3, 64, 32), "nt"),
            3 * (32 + 64) + 3 * 32 * 64,
            id="experts without rows are not read",
        ),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 3, 64, 32, form="terms"), "tn"),
            3 * (32 + 64) + 8 * 32 * 64,
            id="gradients of all experts are written",
        ),
    ],
)
def test_bytes_are_those_that_a_call_needs(task: GroupedTask, elements: int) -> None:
    assert task.bytes_moved(BF16) == 2 * elements


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        pytest.param("128x32768x1536x2048", True, id="256 rows an expert"),
        pytest.param("128x32769x1536x2048", False, id="more rows"),
        pytest.param("1x512x1024x1024", True, id="all of it fits twice into L2"),
        pytest.param("128x256x1536x2048:terms", False, id="gradients read no weights"),
    ],
)
def test_calls_with_few_rows_an_expert_are_timed_cold(text: str, bound: bool) -> None:
    (workload,) = parse(text)

    assert GroupedTask(workload, "nt").is_memory_bound(BF16, 50 * MIB) is bound


# ---- the check
CASES = [GroupedCase(task, torch.float16, "cpu") for task in (ROWS, TERMS)]
Prepare = Callable[..., Callable[..., object]]


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "outblas",
        pytest.param("portable", marks=pytest.mark.interpreter),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=["rows", "terms"])
def test_right_products_pass(name: str, case: GroupedCase) -> None:
    assert case.fault(grouped.parse(name).prepare) is None


def changed(change: Callable[[torch.Tensor], object]) -> Prepare:
    """Prepares calls of torch's function whose result is changed afterwards."""

    def prepare(a: Any, b: Any, offs: Any) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            out = torch.nn.functional.grouped_mm(a, b, offs=offs)
            change(out)
            return out

        return call

    return prepare


@pytest.mark.parametrize(
    ("case", "at"), [(CASES[0], (57, 9)), (CASES[1], (3, 31, 63))], ids=["rows", "terms"]
)
def test_one_wrong_element_is_found(case: GroupedCase, at: tuple[int, ...]) -> None:
    said = case.fault(changed(lambda out: out[at].fill_(0.5)))

    assert said is not None
    assert said.startswith("wrong: 1 of ")
    assert said.endswith(f"first at {list(at)}")


@pytest.mark.parametrize("case", CASES, ids=["rows", "terms"])
def test_nan_is_wrong(case: GroupedCase) -> None:
    said = case.fault(changed(lambda out: out[-1].fill_(torch.nan)))

    assert said is not None


def test_groups_that_end_elsewhere_are_wrong() -> None:
    def prepare(a: Any, b: Any, offs: torch.Tensor) -> Callable[[], torch.Tensor]:
        shifted = offs.clone()
        shifted[0] += 1
        return lambda: torch.nn.functional.grouped_mm(a, b, offs=shifted)

    said = CASES[0].fault(prepare)

    assert said is not None
    assert "first at [7, " in said  # the first group has rows 0 to 6


def test_a_result_of_another_dtype_is_wrong() -> None:
    said = CASES[0].fault(lambda a, b, offs: lambda: torch.zeros(100, 64))

    assert said == "wrong: expected a tensor of shape (100, 64) and torch.float16"


# ---- providers
def test_torch_is_trusted() -> None:
    assert grouped.parse("torch").trusted


def test_a_kernel_that_cannot_run_is_refused() -> None:
    made = grouped.operands(ROWS, torch.float16, torch.zero_, torch.zero_, "cpu")

    with pytest.raises(Refused, match=r"hopper\.grouped.*needs an NVIDIA GPU"):
        grouped.parse("hopper.grouped").prepare(*made)


def test_calls_take_other_weights() -> None:
    """As with cold weights."""
    a, b, offs = grouped.operands(ROWS, torch.float16, torch.ones_like, torch.zero_, "cpu")
    a.fill_(1)
    call = grouped.parse("torch").prepare(a, b, offs)

    assert float(call(torch.ones_like(b)).min()) == 32.0  # type: ignore[attr-defined]


# ---- campaigns
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    """A virtual device, which the bench times, and operands that nobody reads."""
    device = VirtualGpu()
    install(device, monkeypatch)
    made = tuple(torch.empty(1, dtype=torch.bfloat16) for _ in range(3))
    monkeypatch.setattr(GroupedTask, "operands", lambda *_: made)
    return device


def provider(gpu: VirtualGpu, name: str, us: float, **how: Any) -> GroupedProvider:
    """A provider whose calls take that many µs."""
    return GroupedProvider(name, "", lambda *_: lambda *_: gpu.launch(name, us), **how)


def records(campaign: Campaign, task: GroupedTask, *modes: str) -> dict[str, Record]:
    return {f"{r.provider} {r.mode}": r for r in campaign.run_tasks([task], modes or ("burst",))}


def test_ratios_are_those_to_torch(gpu: VirtualGpu) -> None:
    base = provider(gpu, "torch", 200.0, trusted=True)
    ours = provider(gpu, "ours", 150.0, trusted=True)

    found = records(Campaign([base, ours], BF16), ROWS)["ours burst"]

    assert found.ratio == pytest.approx(200 / 150)
    assert found.tflops == pytest.approx(2 * 100 * 64 * 32 / 150e-6 / 1e12)
    assert found.gbs == pytest.approx(ROWS.bytes_moved(BF16) / 150e-6 / 1e9)


@pytest.mark.parametrize("task", [ROWS, TERMS], ids=["rows", "terms"])
def test_a_record_says_which_groups_were_timed(task: GroupedTask, gpu: VirtualGpu) -> None:
    campaign = Campaign([provider(gpu, "torch", 200.0, trusted=True)], BF16)

    found = records(campaign, task)["torch burst"]

    assert found.workload == task.workload
    assert (found.shape, found.layout) == (task.shape, task.layout)
    assert not found.is_plain
    assert row(found)[0] == str(task.workload)


def test_nothing_is_timed_without_the_base_but_said(gpu: VirtualGpu) -> None:
    """torch's function takes no float16, on some GPUs."""

    def prepare(*_: Any) -> Callable[[], None]:
        raise RuntimeError("expected bfloat16")

    base = GroupedProvider("torch", "", prepare, trusted=True)

    found = records(Campaign([base, provider(gpu, "ours", 1.0, trusted=True)], BF16), ROWS)

    assert found["torch burst"].check == "failed: RuntimeError: expected bfloat16"
    assert not found["torch burst"].passed
    assert found["ours burst"].us is None


# ---- comparisons
def test_only_the_same_groups_are_compared() -> None:
    def report(distribution: Distribution, ratio: float) -> dict[str, Any]:
        facts = {"provider": "outblas", "dtype": "bfloat16", "mode": "burst"}
        task = GroupedTask(GroupedWorkload(8, 100, 64, 32, distribution), "nt")
        figures = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}
        record = json.loads(json.dumps(facts | task.facts() | figures))
        return {"environment": {"gpu": "NVIDIA H200"}, "results": [record]}

    same = compare.compare(report("zipf", 1.1), report("zipf", 1.0))
    other = compare.compare(report("zipf", 1.1), report("balanced", 1.0))

    assert [change.name for change in same.of("fell")] == ["outblas 8x100x64x32:zipf nt burst"]
    assert other.missing == ("outblas 8x100x64x32:zipf nt burst",)


# ---- the command
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4096"], "--shapes is '4096', expected EXPERTSxROWSxNxK"),
        (["--epilogue", "bias"], "--epilogue cannot be combined with --op grouped"),
        (["--ladder", "hopper"], "--ladder cannot be combined with --op grouped"),
        (["--batch-invariant"], "--batch-invariant cannot be combined with --op grouped"),
        (["--layout", "tn"], "--layout has 'tn', expected nt or nn"),
        (["--dtype", "fp8"], "--dtype is 'fp8', expected one of bfloat16, float16, float32"),
        (["--kernels", "cublas"], "--kernels has 'cublas', expected some of torch, outblas"),
        (["--shapes", "moe:terms", "--backward"], "--shapes has :terms, expected none with"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_what_grouped_products_lack_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = ["--op", "grouped", "--shapes", "moe:mixtral-8x7b"]

    refuses(message, "bench", *known, *arguments)


def test_an_operation_that_is_none_is_refused() -> None:
    refuses("--op is 'conv', expected one of gemm, grouped", "bench", "--op", "conv")


def test_a_torch_without_grouped_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")

    refuses("which torch", "bench", "--op", "grouped", "--shapes", "moe")


@pytest.mark.no_gpu
def test_without_a_gpu_nothing_is_timed() -> None:
    invoke("bench", "--op", "grouped", "--shapes", "moe", code=3)
