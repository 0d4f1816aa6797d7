"""hopper.gemm on a GPU: sampled calls, its space, NaN and Inf, streams, rows of any batch, more
than 2³¹ elements.

Most tests compile their kernels first, on all cores: without `-n` they take a few minutes together.
"""

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import precompiled, sanitizer
from support.precompiled import KERNEL, SMS, Ahead, Asked, by_default, by_rule, of_case

import outblas
from outblas.core import configs, machines
from outblas.core.artifact import example
from outblas.core.problem import problem
from outblas.core.shapes import LAYOUTS
from outblas.core.space import Space
from outblas.hopper import gemm
from outblas.hopper.core.config import HopperConfig
from outblas.hopper.gemm import host, workspace
from outblas.verify.call import Call, Run, prepare
from outblas.verify.cases import ADDENDS, Case
from outblas.verify.kernels import caller, check
from outblas.verify.oracle import Exact, Result, against, bounded, exact

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(1200)]

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE = (
    "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,epilogue_stages=1,cluster_m=1"
)
LEVERS = {
    "own": "",
    "split_k": "split_k=3,k_serpentine=False",
    "small_split_k": f"{ONE},tile_n=64,stages=8,split_k=7,k_serpentine=False",
    "stream_k": "stream_k=True,k_serpentine=False",
    "small_stream_k": f"{ONE},tile_n=64,stages=8,stream_k=True,k_serpentine=False",
    "variable_tile_n": "tile_n=192,variable_tile_n=True",
    "elastic_by_columns": "tile_m=256,tile_n=200,stages=3,variable_tile_n=True,cluster_m=1,"
    "cluster_n=2",
    "elastic_stream_k": f"{ONE},tile_n=40,stages=8,variable_tile_n=True,stream_k=True,"
    "k_serpentine=False",
    "elastic_swapped": "tile_n=104,stages=6,cluster_m=1,swap_ab=True,variable_tile_n=True",
    "as_they_come": f"{ONE},tile_n=64,stages=8,gpc_local=False",
    "pingpong": "tile_m=64,pingpong=True,order=hilbert",
    "swap": f"{ONE},tile_n=32,stages=16,swap_ab=True",
    "swap_split_k": f"{ONE},tile_n=16,stages=16,swap_ab=True,split_k=4,k_serpentine=False",
    "cluster_k": "tile_n=128,stages=5,cluster_m=1,epilogue_stages=1,cluster_k=2,sms=8",
    "small_cluster_k": f"{ONE},tile_n=64,stages=8,cluster_m=2,cluster_k=4,jitter=True",
    "split_k_of_three": (
        "tile_m=192,tile_n=128,consumers=3,producer_registers=32,"
        "consumer_registers=160,"
        "cluster_m=1,split_k=3,k_serpentine=False,jitter=True"
    ),
    "three_consumers": (
        "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,cluster_m=1"
    ),
    "from_registers": "epilogue_stages=0,sms=23",
}


def config_of(way: str, case: Case) -> HopperConfig | None:
    """`way`: a lever, "rule", or "default", what a call takes that names no kernel. None: the
    rule's config.
    """
    if way in LEVERS:
        return configs.from_text(gemm.Config, LEVERS[way])
    return by_default(of_case(case)) if way == "default" else None


def runner(way: str, case: Case) -> Run:
    def unnamed(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        if c is None:
            outblas.matmul(a, b, out=out, out_dtype=None if out.dtype == a.dtype else out.dtype)
        else:
            outblas.addmm(c, a, b, alpha=alpha, beta=beta, out=out)

    return unnamed if way == "default" else caller(KERNEL, config_of(way, case))


@pytest.fixture(scope="session")
def ahead() -> Iterator[Ahead]:
    with precompiled.compilers() as compile_ahead:
        yield compile_ahead


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that were not compiled ahead, which is for GPUs of 132 SMs."""
    found = []
    real = host.compile_variant

    def noted(gemm: Any, variant: Any, *options: str) -> Any:
        found.append(variant.name)
        return real(gemm, variant, *options)

    monkeypatch.setattr(host, "compile_variant", noted)
    return found


# ---- sampled calls
EXAMPLES = 500
REPEATS = 4  # draws for each: hypothesis makes several of the parts of one
MOST = 1 << 22  # elements of A or B
EDGES = (
    1,
    2,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    191,
    193,
    255,
    256,
    257,
    320,
    511,
    513,
)
BATCHES = (
    ((3,), (3,)),
    ((5,), ()),
    ((), (4,)),
    ((2, 1), (3,)),
    ((2, 3), (2, 3)),
    ((1,), (2,)),
    ((2, 1, 2), (3, 1)),
)
TUNED = (
    (1, 4096, 4096),
    (64, 4096, 4096),
    (128, 4096, 4096),
    (256, 4096, 4096),
    (768, 768, 768),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 1024),
    (4096, 14336, 4096),
)


@st.composite
def examples(draw: st.DrawFn) -> tuple[Case, str]:
    """Any options of a call, sizes at the edges of tiles and between them; where `matmul` is to
    choose ("default"), a little below tuned ones. Half of the calls are such as TMA takes: all is
    in multiples of 8 elements.
    """

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def size(longest: int) -> int:
        n = draw(
            st.one_of(st.sampled_from(EDGES), st.integers(1, 1000), st.integers(1000, longest))
        )
        return n + -n % 8 if even else n

    way = pick("rule", "rule", "rule", "rule", "default", "lever", "lever")
    even = draw(st.booleans())
    options = {}
    kind = (
        pick("plain", "plain", "addend")
        if way == "default"
        else pick("plain", "plain", "addend", "batch")
    )
    if kind == "batch":
        options["batch_a"], options["batch_b"] = pick(*BATCHES)
    if kind == "addend":
        addend = pick(*ADDENDS[1:])
        betas = (1.0, -0.5, 3.0) if addend == "out" else (1.0, -0.5, 3.0, 0.0)
        options |= {"addend": addend, "alpha": pick(1.0, 2.0, -0.5), "beta": pick(*betas)}
    if way == "default":
        M, N, K = (
            n - min(n - 1, draw(st.integers(0, 12)) * 8 + (0 if even else pick(0, 1, 3)))
            for n in pick(*TUNED)
        )
        dtype, out_dtype, layout = BF16, None, pick("nt", "nn")
    else:
        longest = 704 if kind == "batch" else 3000
        M, N = min(size(3000), longest), min(size(3000), longest)
        K = min(size(9000), MOST // max(M, N) // 8 * 8)
        dtype, layout = pick(BF16, F16), pick(*LAYOUTS)
        out_dtype = None if kind == "addend" else pick(None, FP32)
    case = Case(
        M,
        N,
        K,
        dtype,
        out_dtype,
        layout,
        **options,
        out_layout=pick("n", "n", "t"),
        seed=draw(st.integers(0, 99)),
        expand=pick("", "", "", "", "a", "b"),
        offset=pick(0, 8) if even else pick(0, 0, 1, 2, 8),
        pad=pick(0, 8) if even else pick(0, 0, 1, 3, 8),
    )
    return case, pick(*LEVERS) if way == "lever" else way


def sampled() -> list[tuple[Case, str]]:
    """The same ones every time. What would take another kernel by default, or cannot have a lever,
    takes the rule.
    """
    found = []

    @settings(
        max_examples=EXAMPLES * REPEATS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(examples())
    def collect(example: tuple[Case, str]) -> None:
        found.append(example)

    collect()
    return [(case, way if is_taken(case, way) else "rule") for case, way in found[::REPEATS]]


def is_taken(case: Case, way: str) -> bool:
    """Whether the kernel takes the call, and with that config: K may have fewer slices than a
    cluster has parts.
    """
    config = config_of(way, case)
    return way == "rule" or (config is not None and gemm.unsupported(of_case(case), config) is None)


def one_chain(call: Call) -> torch.Tensor:
    """The product in fp32 by the ladder's first rung, which adds all of K in one chain of
    wgmmas.
    """
    case, (a, b) = call.case, (call.a.armed, call.b.armed)
    padded = [
        torch.nn.functional.pad(t, (0, -t.shape[-1] % 8, 0, -t.shape[-2] % 8)) for t in (a, b)
    ]
    a, b = (t.expand(*case.batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in padded)
    products = [
        outblas.matmul(x, y, kernel="hopper.tma_wgmma", out_dtype=FP32)[: case.M, : case.N]
        for x, y in zip(a, b, strict=True)
    ]
    return torch.stack(products).reshape(*case.batch, case.M, case.N)


def near(run: Run, case: Case) -> Result:
    """Rounded to 16 bits, an error is held to torch's. In fp32 it shows how the tensor cores add:
    to the error of the same instructions; torch's may be a seventh of it (WORKLOG.md).
    """
    if case.result_dtype is FP32:
        return against(
            "one chain", run, case, "cuda", one_chain, "that of one chain of wgmmas", 1.25
        )
    return bounded(run, case, "cuda")


def test_sampled_calls_are_right(ahead: Ahead, late: list[str]) -> None:
    calls = sampled()
    compiles = ahead((of_case(case), config_of(way, case)) for case, way in calls)
    faults = []
    for case, way in calls:
        run = runner(way, case)
        for oracle in (lambda run, case: exact(run, case, "cuda"), near):
            try:
                result = oracle(run, case)
            except Exception as error:
                error.add_note(f"{way}: {case!r}")
                raise
            if not result.ok:
                faults.append(f"{way}, {result.oracle}: {case!r}: {result.message}")
    assert not faults, f"{len(faults)} of {2 * len(calls)} checks failed:\n" + "\n".join(
        faults[:10]
    )
    assert not late or SMS != 132, f"beside {compiles} compiles made ahead: {late}"


# ---- the space
AWKWARD = (
    Case(57, 4120, 4104, BF16, layout="nt"),  # few rows, K cut
    Case(1931, 2744, 523, F16, layout="tn"),  # many tiles, A copied first
)
SAMPLE = 48  # configs of a shape, beside the extremes of every field


def sample(space: Space[HopperConfig]) -> list[HopperConfig]:
    """Configs at even distances, and for every field the first ones that have its least and its
    greatest value.
    """
    valid = [config for config in space.configs() if space.invalid_reason(config) is None]
    chosen = valid[:: -(-len(valid) // SAMPLE)]
    for name in vars(valid[0]):
        values = {getattr(config, name) for config in valid}
        ends = (min(values), max(values)) if len(values) > 1 else ()
        chosen += [next(config for config in valid if getattr(config, name) == end) for end in ends]
    return list(dict.fromkeys(chosen))


def space_of(case: Case) -> Space[HopperConfig]:
    return gemm.space(
        example(case.dtype, case.out_dtype, case.layout, (case.M, case.N, case.K)),
        machines.reference(90),
    )


@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_configs_of_the_space_are_right(case: Case, ahead: Ahead, late: list[str]) -> None:
    chosen = sample(space_of(case))
    compiles = ahead((of_case(case), config) for config in chosen)
    exact, faults = Exact(case, "cuda"), []
    for config in chosen:
        result = exact(caller(KERNEL, config))
        if not result.ok:
            faults.append(f"{configs.brief(config)}: {result.message}")
            exact = Exact(case, "cuda")  # the operands may be spoilt
    assert not faults, f"{len(faults)} of {len(chosen)} configs failed:\n" + "\n".join(faults[:10])
    assert not late or SMS != 132, f"beside {compiles} compiles made ahead: {late}"


# ---- NaN and Inf
SPECIAL = (
    Case(300, 264, 1000, BF16, layout="nt"),
    Case(301, 263, 999, F16, layout="nn"),
    Case(300, 264, 1000, BF16, layout="tn", out_dtype=FP32, out_layout="t"),
    Case(300, 264, 1000, BF16, layout="nt", addend="matrix", alpha=2.0, beta=-0.5),
    Case(
        300, 264, 1000, F16, layout="tt", addend="matrix", alpha=0.5
    ),  # C is NaN, and must not be read
    Case(20, 264, 1000, BF16, layout="nt", batch_a=(3,), batch_b=(3,)),
)
OVERFLOW = Case(300, 264, 1024, F16, layout="nt")


@pytest.fixture(scope="session")
def _special(ahead: Ahead) -> None:
    ahead(
        (of_case(case), config_of(way, case))
        for case in (*SPECIAL, OVERFLOW)
        for way in ("rule", *LEVERS)
    )


# Of each operand: where, in halves of its extents or counted from their ends, and what.
PLACED = {
    "a": ((1, 0, "nan"), (2, 0.5, "inf"), (0.5, 0, "inf"), (0.5, -1, "-inf"), (-1, -1, "inf")),
    "b": ((-1, 0.5, "nan"), (0, 2, "inf"), (0.5, 3, "-inf"), (-1, 3, "inf")),
    "c": ((0, 0, "nan"), (-1, -1, "inf"), (0.5, 1, "-inf"), (5, 3, "inf")),
}


def filled(case: Case, places: str) -> Call:
    """Normal data with NaN and Inf in the operands named. A and B have a 0 each where the other may
    have Inf.
    """

    def fill(name: str) -> Any:
        def fill_one(t: torch.Tensor, generator: torch.Generator) -> None:
            t.normal_(generator=generator)
            if name != "c":
                t[..., 0 if name == "a" else -1, 0] = 0.0
            for row, column, value in PLACED[name] if name in places else ():
                at = [
                    n // 2 if i == 0.5 else int(i)
                    for i, n in zip((row, column), t.shape[-2:], strict=True)
                ]
                t[..., at[0], at[1]] = float(value)

        return fill_one

    return prepare(case, "cuda", fill("a"), fill("b"), fill("c"))


def by_torch(call: Call) -> torch.Tensor:
    """In fp32."""
    a, b, case = call.a.armed.float(), call.b.armed.float(), call.case
    if call.c is None:
        return a @ b
    return torch.addmm(call.c.armed.float(), a, b, alpha=case.alpha, beta=case.beta)


def kinds(t: torch.Tensor) -> torch.Tensor:
    """0 where a value is finite, else which of NaN, Inf and -Inf it is."""
    return t.isnan() * 1 + t.isposinf() * 2 + t.isneginf() * 3


@pytest.mark.usefixtures("_special")
@pytest.mark.parametrize("way", ["rule", *LEVERS])
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_nan_and_inf_stand_where_torch_has_them(case: Case, way: str) -> None:
    for places in ("", "a", "b", "c", "ab", "abc"):
        call = filled(case, places)
        call.run(runner(way, case))
        got, want = kinds(call.out.view), kinds(by_torch(call))
        wrong = (got != want).nonzero()
        assert not len(wrong), (
            f"special values in {places or 'nothing'}: {len(wrong)} of {want.count_nonzero()} are "
            "wrong, the first at "
            f"{wrong[0].tolist()}: kind {int(got[tuple(wrong[0])])}, expected "
            f"{int(want[tuple(wrong[0])])}"
        )
        assert not call.violations()
        assert bool(want.any()) == any(name in places for name in ("abc" if case.beta else "ab"))


@pytest.mark.usefixtures("_special")
@pytest.mark.parametrize("way", ["rule", *LEVERS])
def test_fp16_becomes_inf_where_torch_rounds_to_it(way: str) -> None:
    """Sums of integers, exact in fp32, some of them too large for fp16."""
    integers = [lambda t, generator: t.random_(-64, 65, generator=generator)] * 3
    call = prepare(OVERFLOW, "cuda", *integers)
    call.run(runner(way, OVERFLOW))
    want = call.product(slice(None)).to(F16)
    assert torch.equal(call.out.view, want)
    assert 0 < int(want.isinf().sum()) < want.numel() // 2


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
    ahead((of_case(case), config_of(way, case)) for case, way in MIXED)
    mixed = Mixed()
    torch.cuda.synchronize()
    for stream in range(STREAMS):
        for kind in 3 * [*range(len(MIXED))]:
            mixed.compared(stream, kind)
    torch.cuda.synchronize()
    before, until, each = (
        torch.cuda.memory_allocated(),
        time.monotonic() + SECONDS,
        STREAMS // threads,
    )
    with ThreadPoolExecutor(threads) as pool:
        parts = [range(first, first + each) for first in range(0, STREAMS, each)]
        made = sum(pool.map(lambda streams: mixed.work(streams, CALLS // threads, until), parts))
    torch.cuda.synchronize()
    wrong = [
        (stream, str(MIXED[kind][0]), MIXED[kind][1])
        for stream, kind in mixed.wrong.nonzero().tolist()
    ]
    assert not wrong, f"other bits than those of the first call: {wrong}"
    assert torch.cuda.memory_allocated() == before
    assert made == CALLS, f"{made} calls in {SECONDS} s"


# ---- host threads
THREADS, ROUNDS = 4, 12
GROWING = ((64, 64, 4096), (128, 192, 4096), (520, 512, 4096), (1024, 1032, 8192))
CUT = ("split_k", "small_split_k", "stream_k", "small_stream_k")


@contextmanager
def external():
    """A stream of the driver's, whose handle a later one may have: it is destroyed while its
    kernels run.
    """
    library, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert library.cuStreamCreate(ctypes.byref(handle), 1) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        yield
    assert library.cuStreamDestroy_v2(handle) == 0


def stream_of_a_thread():
    return torch.cuda.stream(torch.cuda.ExternalStream(2))


@pytest.mark.parametrize(
    "kind", ["one stream", "the default stream", "streams of threads", "streams that end"]
)
def test_calls_of_host_threads_do_not_share_partial_sums(kind: str, ahead: Ahead) -> None:
    """Each with more of them than the last, on any one stream. Nothing is allocated but workspaces:
    the allocator takes a handle for a stream.
    """
    calls = []
    for lever, (M, N, K) in itertools.product(CUT, GROWING):
        a, b = (torch.randint(-4, 5, shape, device="cuda").bfloat16() for shape in ((M, K), (N, K)))
        config = configs.from_text(gemm.Config, LEVERS[lever])
        calls.append((a, b.t(), config, (a.double() @ b.double().t()).bfloat16()))
    ahead((problem(a, b, want), config) for a, b, config, want in calls)
    for a, b, config, want in calls:
        assert torch.equal(outblas.matmul(a, b, kernel=KERNEL, config=config), want)
    rounds = 3 if kind == "streams that end" else ROUNDS
    outs = [
        [[torch.full_like(want, torch.nan) for *_, want in calls] for _ in range(rounds)]
        for _ in range(THREADS)
    ]
    shared = torch.cuda.Stream()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "one stream": lambda: torch.cuda.stream(shared),
        "the default stream": nullcontext,
        "streams of threads": stream_of_a_thread,
        "streams that end": external,
    }
    around = contexts[kind]
    workspace._workspaces.clear()
    torch.cuda.synchronize()
    together = threading.Barrier(THREADS)

    def work(number):
        torch.cuda.current_stream().query()  # so that the thread has a context
        for turn in outs[number]:
            together.wait(60)
            with around():
                for (a, b, config, _), out in zip(calls, turn, strict=True):
                    outblas.matmul(a, b, out=out, kernel=KERNEL, config=config)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    torch.cuda.synchronize()
    wrong = [
        (number, at, CUT[i // len(GROWING)], GROWING[i % len(GROWING)])
        for number, rows in enumerate(outs)
        for at, turn in enumerate(rows)
        for i, (out, call) in enumerate(zip(turn, calls, strict=True))
        if not torch.equal(out, call[-1])
    ]
    assert not wrong, (
        f"{len(wrong)} wrong results, of thread, round, config and shape: {wrong[:10]}"
    )
    streams = sum(held.done is not None for held in workspace._workspaces.values())
    assert (streams > 0) == (kind in ("streams of threads", "streams that end"))
    assert streams <= workspace.FOREIGN


# ---- rows of any batch
LARGEST = 4096
EXTENTS = sorted(
    {*range(1, 65), *range(65, LARGEST, 61)}
    | {127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096}
)


def invariant(a: torch.Tensor, b: torch.Tensor) -> Asked:
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    given = problem(a, b, out, batch_invariant=True)
    return given, by_rule(given)


@pytest.mark.parametrize(("N", "K"), [(1024, 4096), (4104, 520)])
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_rows_have_the_same_bits_in_all_batches(
    layout: str, N: int, K: int, ahead: Ahead, late: list[str]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(LARGEST, K, device="cuda", generator=generator).to(BF16)
    b = torch.randn(K, N, device="cuda", generator=generator).to(BF16)
    b = b.t().contiguous().t() if layout == "nt" else b
    slices = [rows for M in EXTENTS for rows in (slice(M), slice(LARGEST - M, None))]
    ahead(invariant(a[rows], b) for rows in slices)
    with outblas.batch_invariant():
        whole = outblas.matmul(a, b)
        differ = [
            rows for rows in slices if not torch.equal(outblas.matmul(a[rows], b), whole[rows])
        ]
    assert not differ, f"{len(differ)} of {len(slices)} slices have other bits: {differ[:10]}"
    assert not late or SMS != 132


# ---- more than 2³¹ elements Those of test_gpu.py have odd rows, which are copied and written one
# by one: of these TMA reads and writes all.
HUGE = (
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", out_layout="t"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", addend="matrix", alpha=2.0, beta=-0.5),
    Case(2**15 + 8, 2**14 + 8, 16, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
    Case(2**25 + 8, 8, 72, BF16, layout="nt"),
    Case(8, 2**25 + 8, 72, BF16, layout="nt"),
    Case(2**26 + 8, 8, 40, BF16, layout="tn"),
    Case(8, 2**26 + 8, 40, BF16, layout="nn"),
    Case(2**14 + 8, 8, 2**15 + 8, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
)


@pytest.mark.parametrize("case", HUGE, ids=str)
def test_more_than_two_to_the_31_aligned_elements(case: Case) -> None:
    result = check(KERNEL, case)
    assert result.ok, result.message


# ---- sanitizers
SANITIZED = f"""
import torch, outblas
from outblas.core import configs
from outblas.hopper import gemm
a = torch.randint(-4, 5, (520, 520), device="cuda").bfloat16()
b = torch.randint(-4, 5, (776, 520), device="cuda").bfloat16().t()
want = (a.double() @ b.double()).bfloat16()
for way, text in {LEVERS}.items():
    config = configs.from_text(gemm.Config, text)
    assert torch.equal(outblas.matmul(a, b, kernel="{KERNEL}", config=config), want), way
    print("right:", way)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    sanitizer.finds_nothing(tool, SANITIZED, len(LEVERS))
