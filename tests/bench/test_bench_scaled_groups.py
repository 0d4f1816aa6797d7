"""Grouped products of fp8 operands with scales of blocks in a campaign: operands, the check, the
base of torch's single products, what is timed, and the command.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bench_machine import VirtualGpu, install
from support.commands import invoke, refuses
from support.torch_scaled_mm import ScaledMm

import outblas
from outblas.base.grouped_shapes import GroupedWorkload, parse
from outblas.bench import scaled_groups
from outblas.bench.campaign import Campaign
from outblas.bench.grouped import GroupedProvider
from outblas.bench.operation import Operation
from outblas.bench.scaled_groups import ScaledCase, ScaledGroups, ScaledTask
from outblas.cli.bench import row
from outblas.verify.kernels import Refused

Tensor = torch.Tensor
Prepare = Callable[..., Callable[..., object]]

FP8 = Operation("fp8-block")
# Groups of 7, 19, 6, 12, 37, 9, 5 and 5 rows; blocks of columns that are not whole.
ROWS = ScaledTask(GroupedWorkload(8, 100, 144, 512, "zipf"), "nt")
# Groups of 0, 128, 0, 128, 256, 16, 0 and 0 terms.
TERMS = ScaledTask(GroupedWorkload(8, 528, 64, 48, "zipf", "terms"), "nt")
TASKS = pytest.mark.parametrize("task", [ROWS, TERMS], ids=["rows", "terms"])


@pytest.fixture(autouse=True)
def scaled_mm(monkeypatch: pytest.MonkeyPatch) -> ScaledMm:
    """What stands for `torch._scaled_mm`."""
    made = ScaledMm()
    monkeypatch.setattr(scaled_groups, "cublas_scaled_mm", made)
    return made


# ---- tasks
def test_terms_of_both_operands_are_contiguous_in_both_forms() -> None:
    found = scaled_groups.tasks(parse("8x100x64x512,8x100x64x512,8x100x64x512:terms"))

    assert [(task.workload.form, task.layout) for task in found] == [
        ("rows", "nt"),
        ("terms", "nt"),
    ]


def test_groups_of_terms_have_whole_blocks() -> None:
    assert TERMS.ends == (0, 128, 128, 256, 512, 528, 528, 528)
    assert ROWS.ends == ROWS.workload.ends


@pytest.mark.parametrize(
    ("workload", "moved"),
    [
        pytest.param(
            GroupedWorkload(8, 3, 144, 1024),
            3 * (1024 + 4 * 8) + 3 * (144 * 1024 + 4 * 2 * 8) + 2 * 3 * 144,
            id="experts without rows are not read",
        ),
        pytest.param(
            GroupedWorkload(8, 300, 144, 48, form="terms"),
            (48 + 144) * (300 + 4 * 3) + 2 * 8 * 48 * 144,
            id="gradients of all experts are written",
        ),
    ],
)
def test_bytes_are_those_of_values_scales_and_the_result(
    workload: GroupedWorkload, moved: int
) -> None:
    assert ScaledTask(workload, "nt").bytes_moved(FP8) == moved


def test_calls_with_few_rows_an_expert_are_timed_cold() -> None:
    bound = {
        text: ScaledTask(parse(text)[0], "nt").is_memory_bound(FP8, 50 << 20)
        for text in ("4x32768x4096x7168", "128x32768x1536x2048", "128x256x1536x2048:terms")
    }

    assert list(bound.values()) == [False, True, False]


# ---- operands
def test_operands_lie_as_quantize_lays_them_out() -> None:
    made = scaled_groups.quantised(ROWS, "cpu")

    _, of_rows = outblas.quantize(torch.ones(100, 512), "1x128")
    _, of_weights = outblas.quantize(torch.ones(8, 144, 512), "128x128")
    assert (made.scale_a.shape, made.scale_a.stride()) == ((100, 4), of_rows.stride())
    assert (made.scale_b.shape, made.scale_b.stride()) == ((8, 4, 2), of_weights.mT.stride())
    assert (made.a.stride(), made.b.stride()) == ((512, 1), (144 * 512, 1, 512))
    assert made.offs.tolist() == [7, 26, 32, 44, 81, 90, 95, 100]


def test_columns_of_terms_have_contiguous_scales() -> None:
    made = scaled_groups.quantised(TERMS, "cpu")

    assert (made.scale_a.shape, made.scale_a.stride()) == ((48, 5), (1, 48))
    assert (made.scale_b.shape, made.scale_b.stride()) == ((5, 64), (64, 1))
    assert (made.a.stride(), made.b.stride()) == ((528, 1), (1, 528))


@TASKS
def test_integers_lie_as_quantised_operands_do(task: ScaledTask) -> None:
    exact, real = (make(task, "cpu") for make in (scaled_groups.integers, scaled_groups.quantised))

    assert [(t.shape, t.stride(), t.dtype) for t in exact] == [
        (t.shape, t.stride(), t.dtype) for t in real
    ]


@TASKS
def test_scales_of_integers_are_different_powers_of_two(task: ScaledTask) -> None:
    made = scaled_groups.integers(task, "cpu")

    assert made.scale_a.unique().tolist() == [0.5, 1.0, 2.0]
    assert made.scale_b.unique().tolist() == [0.5, 1.0, 2.0]


@TASKS
@pytest.mark.parametrize("make", [scaled_groups.integers, scaled_groups.quantised])
def test_operands_are_the_same_every_time(
    make: Callable[[ScaledTask, str], ScaledGroups], task: ScaledTask
) -> None:
    pairs = zip(make(task, "cpu"), make(task, "cpu"), strict=True)

    assert all(torch.equal(x.float(), y.float()) for x, y in pairs)


# ---- the check
@pytest.mark.parametrize("name", ["torch", "outblas"])
@TASKS
def test_right_products_pass(task: ScaledTask, name: str) -> None:
    assert ScaledCase(task, "cpu").fault(scaled_groups.parse(name).prepare) is None


@pytest.mark.interpreter
@pytest.mark.parametrize("task", [ROWS, pytest.param(TERMS, marks=pytest.mark.slow)])
def test_right_products_of_the_portable_kernel_pass(task: ScaledTask) -> None:
    assert ScaledCase(task, "cpu").fault(scaled_groups.parse("portable").prepare) is None


def changed(change: Callable[[Tensor], object]) -> Prepare:
    """Prepares the base's calls, whose result is changed afterwards."""

    def prepare(*made: Tensor) -> Callable[[], Tensor]:
        call: Any = scaled_groups.parse("torch").prepare(*made)

        def then() -> Tensor:
            out: Tensor = call()
            change(out)
            return out

        return then

    return prepare


def given(change: Callable[[ScaledGroups], ScaledGroups]) -> Prepare:
    """Prepares the base's calls with other operands."""

    def prepare(*made: Tensor) -> Any:
        return scaled_groups.parse("torch").prepare(*change(ScaledGroups(*made)))

    return prepare


@pytest.mark.parametrize(
    ("task", "at"), [(ROWS, (57, 9)), (TERMS, (3, 31, 63))], ids=["rows", "terms"]
)
def test_one_wrong_element_is_found(task: ScaledTask, at: tuple[int, ...]) -> None:
    said = ScaledCase(task, "cpu").fault(changed(lambda out: out[at].fill_(0.3)))

    assert said is not None
    assert said.startswith("wrong: 1 of ")
    assert said.endswith(f"first at {list(at)}")


@TASKS
def test_nan_is_wrong(task: ScaledTask) -> None:
    said = ScaledCase(task, "cpu").fault(changed(lambda out: out[-1].fill_(torch.nan)))

    assert said is not None


def test_a_group_without_terms_has_to_get_zeros() -> None:
    said = ScaledCase(TERMS, "cpu").fault(changed(lambda out: out[2].fill_(1)))

    assert said is not None
    assert said.endswith("first at [2, 0, 0]")


@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
@TASKS
def test_one_wrong_scale_is_found(task: ScaledTask, name: str) -> None:
    def with_wrong_scale(made: ScaledGroups) -> ScaledGroups:
        wrong = getattr(made, name).clone()
        wrong[(-1,) * wrong.dim()] *= 2
        return made._replace(**{name: wrong})

    said = ScaledCase(task, "cpu").fault(given(with_wrong_scale))

    assert said is not None


@TASKS
def test_scales_that_are_powers_of_two_are_not_enough(task: ScaledTask) -> None:
    """Products that are exact with integers, whose scales have no other bits, are checked with
    normal data too.
    """

    def rounded(made: ScaledGroups) -> ScaledGroups:
        return made._replace(scale_a=made.scale_a.log2().floor().exp2())

    case = ScaledCase(task, "cpu")
    prepare = given(rounded)

    assert case._fault(prepare, scaled_groups.integers(task, "cpu"), is_exact=True) is None
    assert case.fault(prepare) is not None


def test_an_error_that_normal_data_hides_is_found_with_integers() -> None:
    prepare = changed(lambda out: out.copy_(out.float() + 0.005))
    case = ScaledCase(ROWS, "cpu")

    assert case._fault(prepare, scaled_groups.quantised(ROWS, "cpu"), is_exact=False) is None
    assert case.fault(prepare) is not None


def test_a_result_of_another_dtype_is_wrong() -> None:
    said = ScaledCase(ROWS, "cpu").fault(lambda *_: lambda: torch.zeros(100, 144))

    assert said == "wrong: expected a tensor of shape (100, 144) and torch.bfloat16"


# ---- the base
def prepared(name: str, task: ScaledTask) -> Any:
    """A call on integers."""
    return scaled_groups.parse(name).prepare(*scaled_groups.integers(task, "cpu"))


def test_torch_is_trusted_and_nobody_else() -> None:
    names = "torch", "outblas", "hopper.grouped", "portable", "deepgemm"

    assert [scaled_groups.parse(name).trusted for name in names] == [True] + [False] * 4


@pytest.mark.parametrize(("task", "calls"), [(ROWS, 8), (TERMS, 4)], ids=["rows", "terms"])
def test_torch_multiplies_each_group_that_has_any(
    task: ScaledTask, calls: int, scaled_mm: ScaledMm
) -> None:
    prepared("torch", task)()

    assert len(scaled_mm.calls) == calls


def test_groups_of_rows_are_as_long_as_torch_takes_them(scaled_mm: ScaledMm) -> None:
    prepared("torch", ROWS)()

    assert [a.shape[0] for a, *_ in scaled_mm.calls] == [8, 24, 8, 16, 40, 16, 8, 8]


def test_groups_of_rows_that_torch_takes_as_they_are_have_no_more(scaled_mm: ScaledMm) -> None:
    prepared("torch", ScaledTask(GroupedWorkload(4, 128, 144, 512), "nt"))()

    assert [a.shape[0] for a, *_ in scaled_mm.calls] == [32] * 4


def test_operands_and_scales_are_those_of_the_group(scaled_mm: ScaledMm) -> None:
    made = scaled_groups.integers(TERMS, "cpu")

    scaled_groups.parse("torch").prepare(*made)()

    a, b, scale_a, scale_b = scaled_mm.calls[2]  # of terms 256 to 512
    assert torch.equal(a.float(), made.a[:, 256:512].float())
    assert torch.equal(b.float(), made.b[256:512].float())
    assert torch.equal(scale_a, made.scale_a[:, 2:4])
    assert torch.equal(scale_b, made.scale_b[2:4])


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (GroupedWorkload(8, 100, 144, 768), "K that is a multiple of 512, .* not 768"),
        (GroupedWorkload(8, 100, 24, 512), "multiples of 16 columns, not 24"),
        (GroupedWorkload(8, 500, 64, 48, form="terms"), "of 16 terms, not 48 and 500"),
        (GroupedWorkload(8, 512, 64, 44, form="terms"), "multiples of 8 rows .* not 44 and 512"),
    ],
    ids=["K", "columns", "terms", "rows of the result"],
)
def test_sizes_that_torch_refuses_are_refused(workload: GroupedWorkload, message: str) -> None:
    with pytest.raises(Refused, match=message):
        prepared("torch", ScaledTask(workload, "nt"))


@pytest.mark.parametrize("name", ["torch", "outblas"])
def test_calls_take_other_weights(name: str) -> None:
    """As with cold weights."""
    call = prepared(name, ROWS)
    weights = scaled_groups.integers(ROWS, "cpu").b

    assert call().any()
    assert not call(torch.zeros_like(weights)).any()


def test_a_kernel_that_cannot_run_is_refused() -> None:
    with pytest.raises(Refused, match=r"hopper\.grouped.*needs an NVIDIA GPU"):
        prepared("hopper.grouped", ROWS)


# ---- campaigns
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    """A virtual device, which the bench times, and operands on the CPU."""
    device = VirtualGpu()
    install(device, monkeypatch)
    make = scaled_groups.quantised
    monkeypatch.setattr(ScaledTask, "operands", lambda task, _: make(task, "cpu"))
    monkeypatch.setattr(ScaledTask, "case", lambda task, _: ScaledCase(task, "cpu"))
    return device


def provider(gpu: VirtualGpu, name: str, us: float) -> GroupedProvider:
    """A provider whose calls take that many µs, besides what they compute."""
    real = scaled_groups.parse(name)

    def prepare(*made: Tensor) -> Any:
        call = real.prepare(*made)

        def timed(*weights: Tensor) -> object:
            gpu.launch(name, us)
            return call(*weights)

        return timed

    return GroupedProvider(name, "", prepare, trusted=real.trusted)


def timed_campaign(gpu: VirtualGpu) -> Campaign:
    """outblas beside the base, in few rounds."""
    both = provider(gpu, "torch", 200.0), provider(gpu, "outblas", 150.0)
    return Campaign(both, FP8, {"burst": 2})


@TASKS
def test_a_record_has_the_figures_of_fp8_and_its_check(task: ScaledTask, gpu: VirtualGpu) -> None:
    campaign = timed_campaign(gpu)

    base, ours = campaign.run_tasks([task], ["burst"])

    M, N, K = task.shape
    assert (base.check, ours.check) == ("–", "exact")
    assert (ours.dtype, ours.layout, ours.workload) == ("fp8-block", "nt", task.workload)
    assert ours.ratio == pytest.approx(200 / 150)
    assert ours.tflops == pytest.approx(2 * M * N * K / 150e-6 / 1e12)
    assert ours.gbs == pytest.approx(task.bytes_moved(FP8) / 150e-6 / 1e9)
    assert row(ours)[0] == str(task.workload)


def test_what_torch_refuses_is_said_and_not_timed(gpu: VirtualGpu) -> None:
    task = ScaledTask(GroupedWorkload(4, 64, 144, 768), "nt")
    campaign = timed_campaign(gpu)

    base, ours = campaign.run_tasks([task], ["burst"])

    assert base.check.startswith("refused: torch._scaled_mm takes K that is a multiple of 512")
    assert base.passed
    assert (ours.check, ours.us) == ("exact", None)


# ---- the command
SHAPES = ["--op", "grouped", "--dtype", "fp8-block", "--shapes", "deepgemm,deepgemm:terms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "nn"], "--dtype fp8-block needs --layout nt"),
        (["--backward"], "cannot be combined with --backward"),
        (["--kernels", "cublas"], "expected some of torch, outblas, hopper.grouped, portable, dee"),
        (["--dtype", "fp8"], "expected one of bfloat16, float16, float32, fp8-block"),
        (["--dtype", "bfloat16", "--kernels", "deepgemm"], "--kernels has 'deepgemm', expected"),
    ],
    ids=["layout", "backward", "kernels", "dtype", "no scales"],
)
def test_what_scaled_groups_lack_is_refused(arguments: list[str], message: str) -> None:
    refuses(message, "bench", *SHAPES, *arguments)


@pytest.mark.no_gpu
def test_without_a_gpu_nothing_is_timed() -> None:
    invoke("bench", *SHAPES, "--kernels", "outblas,hopper.grouped,portable,deepgemm", code=3)


def test_a_torch_without_grouped_products_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is of single products."""
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    invoke("bench", *SHAPES, code=3)
