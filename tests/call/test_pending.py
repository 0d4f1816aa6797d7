"""Calls whose kernel is being compiled: torch computes them until a compile has ended."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from outblas.base import compiling
from outblas.base.compiling import CompileFailed, CompilePending
from outblas.call import dispatch, launcher
from outblas.call.artifact import example
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs

A, B = torch.ones(2, 3), torch.ones(3, 4)
TORCHS, OURS = torch.full((2, 4), 3.0), torch.full((2, 4), 7.0)


class Worker:
    """What compiles in the place of a worker. Its kernel writes 7."""

    def __init__(self) -> None:
        self.ready, self.asked = False, 0
        self.error: CompileFailed | None = None

    def launcher(self, *_: object, **options: object) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if not self.ready and compiling.defers():
            raise CompilePending("a_kernel", "its place")
        return lambda a, b, c, out, *rest: out.fill_(7)

    def end(self, *, ready: bool) -> None:
        self.ready = ready
        compiling.end_generation()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setenv("OUTBLAS_COMPILE", "background")
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", worker.launcher)
    monkeypatch.setattr(launcher, "named_launcher", worker.launcher)
    return worker


def call(**changes: Any) -> Call:
    return Call(A, B, None, None, None, 1, 0, "", "")._replace(**changes)


def test_torch_computes_until_the_kernel_is_there(worker: Worker) -> None:
    assert torch.equal(dispatch.run(call()), TORCHS)
    assert torch.equal(dispatch.run(call()), TORCHS)
    assert worker.asked == 1, "it was planned again although no compile has ended"

    worker.end(ready=False)  # another kernel
    assert torch.equal(dispatch.run(call()), TORCHS)
    worker.end(ready=True)

    assert torch.equal(dispatch.run(call()), OURS)
    assert worker.asked == 3


def test_a_kernel_of_a_pack_stands_in(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.full((2, 4), 5.0)
    monkeypatch.setattr(
        launcher, "packed_launcher", lambda problem: lambda a, b, c, out, *rest: out.copy_(packed)
    )
    assert torch.equal(dispatch.run(call()), packed)
    worker.end(ready=True)

    assert torch.equal(dispatch.run(call()), OURS)


def test_the_ends_of_other_compiles_are_none_of_its_concern(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "unfinished", {"its place"})
    dispatch.run(call())
    worker.end(ready=True)
    assert torch.equal(dispatch.run(call()), TORCHS)
    assert worker.asked == 1

    compiling.unfinished.clear()

    assert torch.equal(dispatch.run(call()), OURS)


def test_the_first_call_asks_for_a_kernel_that_is_compiled_ahead(worker: Worker) -> None:
    with compiling.ahead():
        plan = dispatch.find_plan(call())
        dispatch.at_rows(plan, A.shape)
    asked = worker.asked

    assert torch.equal(dispatch.run(call()), TORCHS)
    assert torch.equal(dispatch.run(call()), TORCHS)

    assert (asked, worker.asked) == (1, 2)


def test_caches_hold_the_plan_that_takes_its_place(worker: Worker) -> None:
    batch = call(a=A.expand(2, 2, 3), b=B.expand(2, 3, 4))  # whose plan is for its sizes alone
    for each in (call(), batch):
        pending = dispatch.find_plan(each)
        assert dispatch.is_pending(dispatch.at_rows(pending, each.a.shape))
    worker.end(ready=True)
    for each in (call(), batch):
        dispatch.run(each)

    of_rows, of_batch = map(dispatch.find_plan, (call(), batch))
    assert dispatch.parts_of(of_batch) is not None
    assert dispatch.parts_of(of_rows.sizes[A.shape]) is not None  # type: ignore[attr-defined]


def test_no_other_kernel_takes_the_place_of_a_tuned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep it when the tuned one is there."""
    problem = replace(
        example(torch.bfloat16, None, "nt", (64, 64, 64)), device=torch.device("cuda")
    )
    tuner = SimpleNamespace(choices=lambda *_: [("hopper.gemm", "tuned")])
    monkeypatch.setattr(launcher.hooks, "tuner", SimpleNamespace(get=lambda: tuner))
    monkeypatch.setattr(launcher, "unsupported_reason", lambda *_: None)

    def named(kernel: str, config: str, *_: object, **options: object) -> str:
        if config == "tuned":
            raise CompilePending(kernel)
        return kernel

    monkeypatch.setattr(launcher, "named_launcher", named)

    with pytest.raises(CompilePending):
        launcher.best_launcher(problem, "", no_product=False)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_what_cannot_be_compiled_stays_with_torch(worker: Worker) -> None:
    dispatch.run(call())
    worker.error = CompileFailed("a_kernel", "no registers")
    worker.end(ready=False)

    assert torch.equal(dispatch.run(call()), TORCHS)
    compiling.end_generation()
    assert torch.equal(dispatch.run(call()), TORCHS)
    assert worker.asked == 2, "what failed is planned again"


def test_a_graph_does_not_capture_torchs_kernel(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch.run(call())
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)

    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        dispatch.run(call())


E4M3 = torch.float8_e4m3fn
VALUES = torch.arange(-64, 64).view(8, 16).to(E4M3), torch.arange(128).view(8, 16).to(E4M3)
SCALES = {
    "tensors": (torch.tensor(0.5), torch.tensor(0.25)),
    "rows": (torch.arange(1.0, 9).view(8, 1), torch.arange(1.0, 9).view(1, 8)),
    "mixed": (torch.tensor(0.5), torch.arange(1.0, 9).view(1, 8)),
    "blocks": (torch.ones(8, 1), torch.ones(1, 8)),
}


def fp8_call(kind: str, activation: str = "", **tensors: torch.Tensor) -> Call:
    """A product of pairs of values, as `scaled_mm` plans it."""
    a, b = (t.view(torch.bfloat16) for t in VALUES)
    extra = EpilogueArgs(activation, **tensors)
    blocks = " promoted 1x128 1x128" if kind == "blocks" else ""
    scaled = {"extra": extra, "scales": SCALES[kind], "formats": f"e4m3 e4m3{blocks}"}
    return call(a=a, b=b.t(), out_dtype=torch.bfloat16, **scaled)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("kind", ["tensors", "rows"])
@pytest.mark.parametrize("fused", [False, True])
def test_torch_computes_products_of_fp8_operands(kind: str, fused: bool) -> None:
    (a, b), (scale_a, scale_b) = VALUES, SCALES[kind]
    expected = (scale_a * a.float()) @ (scale_b * b.float().t())
    tensors = {}
    if fused:
        tensors = {name: torch.full((8, 8), 3.0).bfloat16() for name in ("bias", "residual")}
        expected = (expected.bfloat16() + 3).relu() + 3

    result = dispatch.run(fp8_call(kind, "relu" if fused else "", **tensors))

    torch.testing.assert_close(result, expected.bfloat16(), rtol=0.01, atol=0)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("kind", ["mixed", "blocks"])
def test_calls_wait_that_torch_does_not_take(kind: str) -> None:
    assert torch.equal(dispatch.run(fp8_call(kind)), torch.full((8, 8), 7.0).bfloat16())


# ---- who waits
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    "changes", [{"kernel": "portable"}, {"batch_invariant": True}, {"tune": "on"}], ids=str
)
@pytest.mark.parametrize("before", [False, True])
def test_calls_wait_that_are_not_torchs(changes: dict[str, Any], before: bool) -> None:
    if before:
        dispatch.run(call())

    assert torch.equal(dispatch.run(call(**changes)), OURS)


@pytest.fixture(params=["deterministic", "strict", "waiting", "distributed", "side stream"])
def cause(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], object]]:
    """Has what makes calls wait begin."""
    with contextlib.ExitStack() as stack:
        yield {
            "deterministic": lambda: torch.use_deterministic_algorithms(True),
            "strict": lambda: monkeypatch.setenv("OUTBLAS_STRICT", "1"),
            "waiting": lambda: stack.enter_context(compiling.waiting()),
            "distributed": lambda: monkeypatch.setattr(
                torch.distributed, "is_initialized", lambda: True
            ),
            "side stream": lambda: [
                monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
                for name, value in SIDE_STREAM.items()
            ],
        }[request.param]
    torch.use_deterministic_algorithms(False)


SIDE_STREAM = {"is_initialized": True, "current_stream": 1, "default_stream": 0}


@pytest.mark.parametrize("before", [False, True])
def test_calls_wait(worker: Worker, cause: Callable[[], object], before: bool) -> None:
    """Those too whose kernel was pending before."""
    if before:
        assert torch.equal(dispatch.run(call()), TORCHS)
    cause()

    assert torch.equal(dispatch.run(call()), OURS)


def test_calls_wait_by_the_environment(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "block")

    assert torch.equal(dispatch.run(call()), OURS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_pass_that_is_computed_again_waits(worker: Worker, reentrant: bool) -> None:
    """Its recomputation has the kernel of its forward pass then."""
    x = torch.ones(2, 3, requires_grad=True)
    results = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            out = dispatch.run(call(a=a.detach()))
            results.append(out.clone())
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (out,) = ctx.saved_tensors
            return gradients[0] @ B.t() * out.sum()

    checkpoint(Product.apply, x, use_reentrant=reentrant).sum().backward()

    assert len(results) == 2, "the forward pass was not computed again"
    assert all(torch.equal(out, OURS) for out in results)


def test_a_compiled_program_waits(worker: Worker) -> None:
    """It is what warms up a graph that Inductor captures, and what recomputes."""
    product = torch.library.custom_op(
        "outblas_tests::pending",
        lambda a: dispatch.run(call(a=a)),
        mutates_args=(),
        schema="(Tensor a) -> Tensor",
    )
    product.register_fake(lambda a: a.new_empty(a.shape[0], 4))
    run = torch.compile(lambda a: product(a) + 1, backend="aot_eager")

    assert torch.equal(run(A), OURS + 1)


@pytest.mark.usefixtures("worker")
def test_other_values_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "later")

    with pytest.raises(ValueError, match="'later', expected one of background, block, never"):
        dispatch.run(call())
