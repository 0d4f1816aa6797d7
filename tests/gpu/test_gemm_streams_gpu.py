"""hopper.gemm on a GPU: calls on several streams, and of several host threads."""

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from support.gemm_levers import LEVERS, config_of, runner
from support.precompiled import KERNEL, Ahead, of_case

import outblas
from outblas.base import configs
from outblas.call.problem import problem
from outblas.hopper import gemm
from outblas.hopper.gemm import workspace
from outblas.hopper.parts.config import HopperConfig
from outblas.verify.call import prepare
from outblas.verify.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(1200)]

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- calls that start before the previous one has ended
ONE_CONSUMER = (
    "tile_m=64,tile_k=128,consumers=1,producer_registers=0,consumer_registers=0,cluster_m=1,"
    "epilogue_stages=1"
)
EARLY = {
    "few rows as columns": f"{ONE_CONSUMER},tile_n=16,stages=10,swap_ab=True",
    "two CTAs an SM": f"{ONE_CONSUMER},tile_n=16,stages=5,swap_ab=True",
    "K in a cluster": f"{ONE_CONSUMER},tile_n=16,stages=5,swap_ab=True,cluster_k=2",
    "split-K": f"{ONE_CONSUMER},tile_n=64,stages=4,split_k=4,k_serpentine=False",
    "two consumers": "tile_n=64,cluster_m=1,epilogue_stages=1",
}
LAYERS, WIDTH, REPLAYS = 48, 2048, 20


def signed_permutations(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights that permute the columns of what they multiply and change some signs, and the product
    of all of them.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    weights, product = [], torch.eye(WIDTH, device="cuda")
    for _ in range(LAYERS):
        order = torch.randperm(WIDTH, device="cuda", generator=generator)
        signs = torch.randint(2, (WIDTH, 1), device="cuda", generator=generator) * 2 - 1
        product = product[order] * signs
        weights.append((torch.eye(WIDTH, device="cuda")[order] * signs).to(BF16))
    return weights, product


@pytest.mark.parametrize("rows", [1, 16, 130])
@pytest.mark.parametrize("way", EARLY)
def test_calls_that_start_early_wait_for_what_the_previous_call_reads_and_writes(
    way: str, rows: int
) -> None:
    """Layers in a row, each of which reads what the one before has written, and writes where the
    one before reads.
    """
    weights, product = signed_permutations(seed=rows)
    text = f"{EARLY[way]},pdl=True,weights_ready=True"
    config = configs.from_text(gemm.Config, text)
    buffers = [torch.zeros(rows, WIDTH, device="cuda", dtype=BF16) for _ in range(2)]
    first = torch.zeros_like(buffers[0])

    def layers() -> None:
        buffers[0].copy_(first)
        for number, weight in enumerate(weights):
            x, out = buffers[number % 2], buffers[1 - number % 2]
            outblas.matmul(x, weight.t(), out=out, kernel=KERNEL, config=config)

    layers()  # compiles and plans
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    wrong = []
    for replay in range(REPLAYS):
        first.copy_(torch.randint(-128, 128, first.shape, device="cuda"))
        (layers if replay % 2 else graph.replay)()
        expected = first.float() @ product.t()
        if not torch.equal(buffers[LAYERS % 2].float(), expected):
            wrong.append(replay)

    assert not wrong


# ---- streams
CALLS, STREAMS, SECONDS = 10_000, 4, 60
MIXED = (
    (Case(256, 256, 256, BF16, layout="nt"), "rule"),
    (Case(64, 512, 8192, BF16, layout="nt"), "rule"),  # K cut
    (Case(1024, 1024, 1024, F16), "rule"),
    (Case(100, 77, 130, BF16, layout="tn", offset=1), "rule"),
    (Case(48, 96, 4096, F16, layout="tt", pad=1), "rule"),  # copied, and K cut
    (Case(65, 127, 200, BF16, batch_a=(3,), batch_b=(3,)), "rule"),
    (Case(33, 40, 520, BF16, layout="nt", batch_a=(2, 1), batch_b=(3,)), "rule"),
    (Case(300, 264, 1000, BF16, layout="nt", addend="matrix", alpha=-0.5, beta=2.0), "rule"),
    (Case(768, 768, 768, BF16, layout="nt"), "default"),
    (Case(128, 4096, 4096, BF16, layout="nt"), "default"),
    (Case(512, 512, 2048, BF16, layout="nt", out_layout="t"), "split_k"),
    (Case(200, 136, 640, BF16, out_dtype=FP32), "small_split_k"),
    (Case(700, 520, 1544, F16, layout="tn"), "stream_k"),
    (Case(700, 904, 648, BF16, layout="nt"), "small_stream_k"),
    (Case(384, 1000, 512, BF16, layout="nt"), "variable_tile_n"),
    (Case(2048, 2048, 512, BF16, layout="nt"), "pingpong"),
    (Case(16, 2048, 1024, BF16, layout="nt"), "swap"),
    (Case(9, 2050, 1024, BF16, layout="nt"), "swap_split_k"),
    (Case(1000, 1032, 2048, BF16, layout="nt"), "cluster_k"),  # several tiles a cluster
    (Case(300, 264, 1000, BF16, layout="nt"), "small_cluster_k"),
)


class Mixed:
    """Calls of many kinds on several streams, whose results are compared where they are."""

    def __init__(self) -> None:
        normal = [lambda t, generator: t.normal_(generator=generator)] * 3
        self.calls = [prepare(case, "cuda", *normal) for case, _ in MIXED]
        self.runs = [runner(way, case) for case, way in MIXED]
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.wrong = torch.zeros(STREAMS, len(MIXED), dtype=torch.bool, device="cuda")
        self.first = [self.once(kind).clone() for kind in range(len(MIXED))]

    def once(self, kind: int) -> torch.Tensor:
        """The bits of a result in new memory, which held NaN."""
        call, case = self.calls[kind], MIXED[kind][0]
        room = call.out.end - call.out.start + case.offset
        out = torch.full((room,), torch.nan, dtype=case.result_dtype, device="cuda")
        view = out.as_strided(call.out.shape, call.out.strides, case.offset)
        self.runs[kind](
            call.a.view, call.b.view, call.c.view if call.c else None, view, case.alpha, case.beta
        )
        return view.view(torch.int16 if view.element_size() == 2 else torch.int32)

    def compared(self, stream: int, kind: int) -> None:
        """Makes a call on a stream and notes whether its bits are those of the first."""
        with torch.cuda.stream(self.streams[stream]):
            self.wrong[stream, kind].logical_or_((self.once(kind) != self.first[kind]).any())

    def work(self, streams: range, calls: int, until: float) -> int:
        """How many of so many calls, each of any kind on any of these streams, were made
        by then.
        """
        draw = random.Random(streams.start)
        for made in range(calls):
            if time.monotonic() > until:
                return made
            self.compared(draw.choice(streams), draw.randrange(len(MIXED)))
        return calls


@pytest.mark.parametrize("threads", [1, STREAMS])
def test_ten_thousand_mixed_calls_on_four_streams(threads: int, ahead: Ahead) -> None:
    """They have the bits of the first call of their kind, and leave no memory behind."""
    ahead((of_case(case), config_of(way, case)) for case, way in MIXED)
    mixed = Mixed()
    torch.cuda.synchronize()
    for stream in range(STREAMS):
        for kind in 3 * [*range(len(MIXED))]:
            mixed.compared(stream, kind)
    torch.cuda.synchronize()
    memory_before, until = torch.cuda.memory_allocated(), time.monotonic() + SECONDS
    of_each = STREAMS // threads
    parts = [range(first, first + of_each) for first in range(0, STREAMS, of_each)]

    with ThreadPoolExecutor(threads) as pool:
        made = sum(pool.map(lambda streams: mixed.work(streams, CALLS // threads, until), parts))
    torch.cuda.synchronize()

    wrong = [
        (stream, str(MIXED[kind][0]), MIXED[kind][1])
        for stream, kind in mixed.wrong.nonzero().tolist()
    ]
    assert not wrong, f"other bits than those of the first call: {wrong}"
    assert torch.cuda.memory_allocated() == memory_before
    assert made == CALLS, f"{made} calls in {SECONDS} s"


# ---- host threads
THREADS, ROUNDS = 4, 12
GROWING_SHAPES = ((64, 64, 4096), (128, 192, 4096), (520, 512, 4096), (1024, 1032, 8192))
SPLIT_LEVERS = ("split_k", "small_split_k", "stream_k", "small_stream_k")


class SplitCall(NamedTuple):
    """A product whose K is split, and what it has to be."""

    a: torch.Tensor
    b: torch.Tensor
    config: HopperConfig
    expected: torch.Tensor

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return outblas.matmul(self.a, self.b, out=out, kernel=KERNEL, config=self.config)


def split_calls() -> Iterator[SplitCall]:
    """Calls that need more and more partial sums, on small integers."""
    for lever, (M, N, K) in itertools.product(SPLIT_LEVERS, GROWING_SHAPES):
        a, b = (torch.randint(-4, 5, (rows, K), device="cuda").bfloat16() for rows in (M, N))
        config = configs.from_text(gemm.Config, LEVERS[lever])
        yield SplitCall(a, b.t(), config, (a.double() @ b.t().double()).bfloat16())


@contextmanager
def stream_that_ends() -> Iterator[None]:
    """A stream of the driver's, whose handle a later one may have: it is destroyed while its
    kernels run.
    """
    library, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert library.cuStreamCreate(ctypes.byref(handle), 1) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        yield
    assert library.cuStreamDestroy_v2(handle) == 0


# What a thread enters around its calls, and whether workspaces are foreign there.
STREAM_KINDS: dict[str, tuple[Callable[[torch.cuda.Stream], AbstractContextManager[Any]], bool]] = {
    "one stream": (torch.cuda.stream, False),
    "the default stream": (lambda _: nullcontext(), False),
    # cudaStreamPerThread, which is another stream in each thread
    "streams of threads": (lambda _: torch.cuda.stream(torch.cuda.ExternalStream(2)), True),
    "streams that end": (lambda _: stream_that_ends(), True),
}


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_calls_of_host_threads_do_not_share_partial_sums(kind: str, ahead: Ahead) -> None:
    """Each with more of them than the last, on any one stream. Nothing is allocated but workspaces:
    the allocator takes a handle for a stream. The rounds of all threads begin together.
    """
    calls, (context, is_foreign) = [*split_calls()], STREAM_KINDS[kind]
    ahead((problem(call.a, call.b, call.expected), call.config) for call in calls)
    assert all(torch.equal(call.run(), call.expected) for call in calls)
    outputs = [
        [[torch.full_like(call.expected, torch.nan) for call in calls] for _ in range(rounds)]
        for rounds in [3 if kind == "streams that end" else ROUNDS] * THREADS
    ]
    workspace._workspaces.clear()
    together, shared = threading.Barrier(THREADS), torch.cuda.Stream()
    torch.cuda.synchronize()

    def work(rounds: list[list[torch.Tensor]]) -> None:
        torch.cuda.current_stream().query()  # so that the thread has a context
        for outs in rounds:
            together.wait(60)
            with context(shared):
                for call, out in zip(calls, outs, strict=True):
                    call.run(out)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, outputs))
    torch.cuda.synchronize()

    wrong = [
        (thread, number, str(call.config), tuple(out.shape))
        for thread, rounds in enumerate(outputs)
        for number, outs in enumerate(rounds)
        for call, out in zip(calls, outs, strict=True)
        if not torch.equal(out, call.expected)
    ]
    assert not wrong, f"{len(wrong)} wrong results, by thread and round: {wrong[:5]}"
    foreign = sum(held.done is not None for held in workspace._workspaces.values())
    assert (foreign > 0) == is_foreign
    assert foreign <= workspace.FOREIGN
