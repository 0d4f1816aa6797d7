"""Grouped products in a campaign, with and without scales of blocks: operands, the check, the base
of torch's single products, what is timed, and the command.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_machine import VirtualGpu, install
from support.commands import refuses

from outblas.base.grouped_shapes import GroupedWorkload, parse
from outblas.bench import grouped_providers
from outblas.bench.campaign import Campaign
from outblas.bench.operation import Operation
from outblas.bench.providers import Provider
from outblas.bench.record import Record
from outblas.bench.tasks import GroupedTask, grouped_tasks
from outblas.cli.bench import row
from outblas.verify.kernels import Refused

Tensor = torch.Tensor

# ---- what stands for `torch._scaled_mm` with scales of blocks, which needs an sm_90 GPU
BLOCK = 128
ROW_MULTIPLE = 8  # cuBLAS takes multiples of so many, where each has its own scales
SIZES = 16  # multiples of other sizes


def _have_strides(t: Tensor, *strides: int) -> bool:
    """Whether a tensor has these strides in the dimensions where they matter."""
    return all(
        size == 1 or own == wanted
        for size, own, wanted in zip(t.shape, t.stride(), strides, strict=True)
    )


class ScaledMm:
    """Refuses what torch and cuBLAS refuse, computes in float64, and notes the operands of each
    call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Any = None,
        *,
        out_dtype: torch.dtype,
        out: Tensor,
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert bias is None
        assert not use_fast_accum
        self.calls.append((a, b, scale_a, scale_b))
        M, K = a.shape
        N, blocks = b.shape[1], -(-K // BLOCK)
        assert (M % ROW_MULTIPLE, N % SIZES, K % SIZES) == (0, 0, 0), f"{M}x{N}x{K}"
        assert (a.stride(1), a.stride(0) % SIZES) == (1, 0), "a is not by rows"
        assert (b.stride(0), b.stride(1) % SIZES) == (1, 0), "b is not by columns"
        assert (*scale_a.shape, _have_strides(scale_a, 1, M)) == (M, blocks, True)
        columns = 1 if scale_b.shape == (blocks, N) else BLOCK
        assert scale_b.shape == (blocks, -(-N // columns))
        assert _have_strides(scale_b, *((N, 1) if columns == 1 else (1, blocks)))
        assert columns == 1 or blocks % 4 == 0, "torch takes no padding of blocks"
        assert (out.dtype, out.shape) == (out_dtype, (M, N))
        x = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)[:, :K]
        of_terms = scale_b.double().repeat_interleave(BLOCK, 0)[:K]
        y = b.double() * of_terms.repeat_interleave(columns, 1)[:, :N]
        return out.copy_(x @ y)


Prepare = Callable[..., Callable[..., object]]

FP16, FP8 = Operation("float16"), Operation("fp8-block")
ROWS = GroupedTask(GroupedWorkload(8, 100, 64, 32, "zipf"), "nt")
TERMS = GroupedTask(GroupedWorkload(8, 100, 64, 32, "zipf", "terms"), "tn")
# Groups of 7, 19, 6, 12, 37, 9, 5 and 5 rows; blocks of columns that are not whole.
SCALED_ROWS = GroupedTask(GroupedWorkload(8, 100, 144, 512, "zipf"), "nt", has_scales=True)
# Groups of 0, 128, 0, 128, 256, 16, 0 and 0 terms.
SCALED_TERMS = replace(SCALED_ROWS, workload=GroupedWorkload(8, 528, 64, 48, "zipf", "terms"))
OPERATIONS = {ROWS: FP16, TERMS: FP16, SCALED_ROWS: FP8, SCALED_TERMS: FP8}
TASKS = pytest.mark.parametrize("task", OPERATIONS, ids=str)
SCALED = pytest.mark.parametrize("task", [SCALED_ROWS, SCALED_TERMS], ids=str)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def scaled_mm(monkeypatch: pytest.MonkeyPatch) -> ScaledMm:
    """What stands for `torch._scaled_mm`."""
    stub = ScaledMm()
    monkeypatch.setattr(grouped_providers, "cublas_scaled_mm", stub)
    return stub


def parsed(name: str, task: GroupedTask) -> Provider:
    return grouped_providers.parse(name, OPERATIONS.get(task, FP8))


def said_of(task: GroupedTask, prepare: Prepare) -> str | None:
    """What the check says on the CPU."""
    return task.case(OPERATIONS[task], "cpu").fault(prepare)


# ---- tasks
def test_a_backward_pass_reads_the_same_weights_by_their_other_dimension() -> None:
    of_a, of_b = grouped_tasks(parse("8x100x64x32"), ["nt"], True, FP16)

    assert (of_a.product, of_a.layout, of_a.shape) == ("dA", "nn", (100, 32, 64))
    assert (of_b.product, of_b.layout, of_b.shape) == ("dB", "tn", (32, 64, 100))


def test_scaled_groups_of_terms_have_whole_blocks() -> None:
    assert SCALED_TERMS.ends == (0, 128, 128, 256, 512, 528, 528, 528)
    assert SCALED_ROWS.ends == SCALED_ROWS.workload.ends


@pytest.mark.parametrize(
    ("task", "moved"),
    [
        pytest.param(ROWS, 2 * (100 * (32 + 64) + 8 * 32 * 64), id="rows"),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 3, 64, 32), "nt"),
            2 * (3 * (32 + 64) + 3 * 32 * 64),
            id="experts without rows are not read",
        ),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 3, 64, 32, form="terms"), "tn"),
            2 * (3 * (32 + 64) + 8 * 32 * 64),
            id="gradients of all experts are written",
        ),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 3, 144, 1024), "nt", has_scales=True),
            3 * (1024 + 4 * 8) + 3 * (144 * 1024 + 4 * 2 * 8) + 2 * 3 * 144,
            id="scales of rows",
        ),
        pytest.param(
            GroupedTask(GroupedWorkload(8, 300, 144, 48, form="terms"), "nt", has_scales=True),
            (48 + 144) * (300 + 4 * 3) + 2 * 8 * 48 * 144,
            id="scales of terms",
        ),
    ],
)
def test_bytes_are_those_that_a_call_needs(task: GroupedTask, moved: int) -> None:
    assert task.bytes_moved(FP8 if task.has_scales else FP16) == moved


@pytest.mark.parametrize(
    ("operation", "text", "bound"),
    [
        pytest.param(FP16, "128x32768x1536x2048", True, id="256 rows an expert"),
        pytest.param(FP16, "128x32769x1536x2048", False, id="more rows"),
        pytest.param(FP16, "1x512x1024x1024", True, id="all of it fits twice into L2"),
        pytest.param(FP16, "128x256x1536x2048:terms", False, id="gradients"),
        pytest.param(FP8, "128x32768x1536x2048", True, id="256 scaled rows"),
        pytest.param(FP8, "4x32768x4096x7168", False, id="more scaled rows"),
    ],
)
def test_calls_with_few_rows_an_expert_are_timed_cold(
    operation: Operation, text: str, bound: bool
) -> None:
    (task,) = grouped_tasks(parse(text), ["nt"], False, operation)

    assert task.is_memory_bound(operation, 50 * MIB) is bound


# ---- the check
@pytest.mark.parametrize("name", ["torch", "outblas"])
@TASKS
def test_right_products_pass(task: GroupedTask, name: str) -> None:
    assert said_of(task, parsed(name, task).prepare) is None


@pytest.mark.interpreter
def test_right_products_of_the_portable_kernel_pass() -> None:
    assert said_of(TERMS, parsed("portable", TERMS).prepare) is None


def changed(task: GroupedTask, change: Callable[[Tensor], object]) -> Prepare:
    """Prepares the base's calls, whose result is changed afterwards."""

    def prepare(*operands: Tensor) -> Callable[[], Tensor]:
        call: Any = parsed("torch", task).prepare(*operands)

        def then() -> Tensor:
            out: Tensor = call()
            change(out)
            return out

        return then

    return prepare


def instead(task: GroupedTask, place: int, change: Callable[[Tensor], Tensor]) -> Prepare:
    """Prepares the base's calls with another of their operands."""

    def prepare(*operands: Tensor) -> Any:
        others = list(operands)
        others[place] = change(others[place])
        return parsed("torch", task).prepare(*others)

    return prepare


@TASKS
def test_one_wrong_element_is_found(task: GroupedTask) -> None:
    at = (57, 9) if task.workload.form == "rows" else (3, 31, 63)

    said = said_of(task, changed(task, lambda out: out[at].fill_(0.3)))

    assert said is not None
    assert said.startswith("wrong: 1 of ")
    assert said.endswith(f"first at {list(at)}")


def test_a_group_without_terms_has_to_get_zeros() -> None:
    said = said_of(SCALED_TERMS, changed(SCALED_TERMS, lambda out: out[2].fill_(1)))

    assert said is not None
    assert said.endswith("first at [2, 0, 0]")


@pytest.mark.parametrize("place", [2, 3], ids=["scale_a", "scale_b"])
@SCALED
def test_one_wrong_scale_is_found(task: GroupedTask, place: int) -> None:
    def doubled(scale: Tensor) -> Tensor:
        wrong = scale.clone()
        wrong[(-1,) * wrong.dim()] *= 2
        return wrong

    assert said_of(task, instead(task, place, doubled)) is not None


@SCALED
def test_scales_that_are_powers_of_two_are_not_enough(task: GroupedTask) -> None:
    """Products that are exact with integers, whose scales have no other bits, are checked with
    normal data too.
    """
    case = task.case(FP8, "cpu")
    prepare = instead(task, 2, lambda scale: scale.log2().floor().exp2())

    assert case.fault_on(prepare, integers=True) is None
    assert case.fault(prepare) is not None


def test_an_error_that_normal_data_hides_is_found_with_integers() -> None:
    prepare = changed(SCALED_ROWS, lambda out: out.copy_(out.float() + 0.005))
    case = SCALED_ROWS.case(FP8, "cpu")

    assert case.fault_on(prepare, integers=False) is None
    assert case.fault(prepare) is not None


@pytest.mark.parametrize(
    ("task", "expected"),
    [(ROWS, "(100, 64) and torch.float16"), (SCALED_ROWS, "(100, 144) and torch.bfloat16")],
    ids=str,
)
def test_a_result_of_another_dtype_is_wrong(task: GroupedTask, expected: str) -> None:
    said = said_of(task, lambda *_: lambda: torch.zeros(100, task.shape[1]))

    assert said == f"wrong: expected a tensor of shape {expected}"


# ---- providers
def integers(task: GroupedTask) -> tuple[Tensor, ...]:
    return task.case(OPERATIONS.get(task, FP8), "cpu").operands(integers=True)


def prepared(name: str, task: GroupedTask) -> Any:
    return parsed(name, task).prepare(*integers(task))


@pytest.mark.parametrize("name", ["torch", "outblas"])
@pytest.mark.parametrize("task", [ROWS, SCALED_ROWS], ids=str)
def test_calls_take_other_weights(name: str, task: GroupedTask) -> None:
    """As with cold weights."""
    a, b, *others = integers(task)
    call: Any = parsed(name, task).prepare(a.fill_(1), b, *others)

    assert call(torch.zeros_like(b).copy_(torch.ones(b.shape))).all()
    assert not call(torch.zeros_like(b)).any()


def test_groups_of_rows_are_as_long_as_torch_takes_them(scaled_mm: ScaledMm) -> None:
    prepared("torch", SCALED_ROWS)()

    assert [a.shape[0] for a, *_ in scaled_mm.calls] == [8, 24, 8, 16, 40, 16, 8, 8]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (GroupedWorkload(8, 100, 144, 768), "multiples of 512 terms, not 768"),
        (GroupedWorkload(8, 100, 24, 512), "multiples of 16 columns, not 24"),
        (GroupedWorkload(8, 500, 64, 48, form="terms"), "multiples of 16 terms, not 500"),
        (GroupedWorkload(8, 512, 64, 44, form="terms"), "multiples of 8 rows, not 44"),
    ],
    ids=["K", "columns", "terms", "rows of the result"],
)
def test_sizes_that_torch_refuses_are_refused(workload: GroupedWorkload, message: str) -> None:
    with pytest.raises(Refused, match=message):
        prepared("torch", replace(SCALED_ROWS, workload=workload))


# ---- campaigns
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    """A virtual device, which the bench times, and operands that nobody reads."""
    device = VirtualGpu()
    install(device, monkeypatch)
    operands = tuple(torch.empty(1, dtype=torch.bfloat16) for _ in range(3))
    monkeypatch.setattr(GroupedTask, "operands", lambda *_: operands)
    return device


def provider(gpu: VirtualGpu, name: str, us: float, **how: Any) -> Provider:
    """A provider whose calls take that many µs."""
    return Provider(name, "", lambda *_: lambda *_: gpu.launch(name, us), **how)


def records(campaign: Campaign, task: GroupedTask, *modes: str) -> dict[str, Record]:
    return {f"{r.provider} {r.mode}": r for r in campaign.run([task], modes or ("burst",))}


@TASKS
def test_a_record_says_which_groups_were_timed(task: GroupedTask, gpu: VirtualGpu) -> None:
    operation = OPERATIONS[task]
    campaign = Campaign([provider(gpu, "torch", 200.0, trusted=True)], operation)

    timed = records(campaign, task)["torch burst"]

    assert timed.workload == task.workload
    assert timed.dtype == operation.dtype
    assert (timed.shape, timed.layout) == (task.shape, task.layout)
    assert not timed.is_plain
    assert row(timed)[0] == str(task.workload)


def test_what_torch_refuses_is_said_and_no_failure(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(SCALED_ROWS, workload=GroupedWorkload(4, 64, 144, 768))
    case = task.case(FP8, "cpu")
    monkeypatch.setattr(GroupedTask, "operands", lambda *_: case.operands(integers=False))
    monkeypatch.setattr(GroupedTask, "case", lambda *_: case)
    both = [grouped_providers.parse(name, FP8) for name in ("torch", "outblas")]

    base, ours = Campaign(both, FP8).run([task], ["burst"])

    assert base.check.startswith("refused: torch._scaled_mm takes multiples of 512 terms")
    assert base.passed
    assert (ours.check, ours.us) == ("exact", None)


# ---- the command
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4096"], "--shapes is '4096', expected EXPERTSxROWSxNxK"),
        (["--epilogue", "bias"], "--epilogue cannot be combined with --op grouped"),
        (["--layout", "tn"], "--layout has 'tn', expected nt or nn"),
        (["--dtype", "fp8"], "--dtype is 'fp8', expected one of bfloat16, float16, float32, fp8"),
        (["--kernels", "cublas"], "--kernels has 'cublas', expected some of torch, outblas"),
        (["--shapes", "moe:terms", "--backward"], "--shapes has :terms, expected none with"),
        (["--dtype", "fp8-block", "--layout", "nn"], "--dtype fp8-block needs --layout nt"),
        (["--op", "conv"], "--op is 'conv', expected one of gemm, grouped"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_grouped_products_lack_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--op", "grouped", "--shapes", "moe:mixtral-8x7b"]

    refuses(message, "bench", *options, *arguments)
