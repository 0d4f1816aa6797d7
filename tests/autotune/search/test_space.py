"""Search spaces, what keeps a config out of a sweep, and the model that puts the others in order:
no GPU needed.
"""

import functools
import itertools
import math
import random
import re
from dataclasses import replace
from typing import Any, cast

import pytest
from support import faulty_kernel
from support.steps import steps_of

from outblas.autotune.search import cost_model, gpu, prune, rank
from outblas.autotune.search.plan import plan as plan_of
from outblas.autotune.search.target import TuneTarget, of
from outblas.autotune.store.records import Workload
from outblas.core import registry
from outblas.core.configs import from_text, to_text
from outblas.core.machines import MACHINES, Machine, find
from outblas.core.problem import Problem
from outblas.core.space import Footprint, Space
from outblas.hopper import gemm, hilbert
from outblas.hopper.core import host
from outblas.hopper.gemm.variant import example_variant
from outblas.kernels import portable_config

NAMES = tuple(name for names in registry.LADDERS.values() for name in names)
SHAPES = ((4096, 4096, 4096), (16, 4096, 4096), (257, 129, 65))
ALL_SHAPES = (
    *SHAPES,
    (1, 1, 1),
    (1, 16384, 1),
    (4096, 1, 4096),
    (8192, 8192, 1024),
    (16384, 16384, 16384),
)
H100 = find("h100")
SQUARE = Workload(*SHAPES[0])
HILBERT, PORTABLE = of("hopper.hilbert"), of("portable")


def runs_on(name: str) -> list[Machine]:
    record = registry.find(name)
    return [
        m for m in MACHINES.values() if record.min_arch <= m.arch <= (record.max_arch or m.arch)
    ]


def machine_for(name: str) -> Machine:
    return H100 if H100 in runs_on(name) else runs_on(name)[0]


def precisions(name: str, machine: Machine = H100) -> tuple[str, ...]:
    """The dtypes of operands that a kernel takes on a machine, and tf32 where it takes that."""
    if name.startswith("turing.") and machine.arch < 80:
        return ("float16",)
    return (*registry.find(name).dtypes, *(["tf32"] if name == "portable" else []))


def workload(name: str, shape: tuple[int, int, int] = SHAPES[0], dtype: str = "") -> Workload:
    return Workload(*shape, dtype or precisions(name)[0], layout=registry.layout_of(name))


def space(name: str, asked: Workload | None = None, machine: Machine | None = None) -> Space[Any]:
    """By default at 4096, on an H100 where the kernel runs on one."""
    return (
        of(name).load().space(prune.problem(asked or workload(name)), machine or machine_for(name))
    )


def valid(found: Space[Any]) -> list[Any]:
    """The configs that a sweep would try."""
    return [config for config in found.configs() if found.invalid_reason(config) is None]


def some(name: str, found: Space[Any], most: int) -> list[Any]:
    """A few of them."""
    return list(
        itertools.islice((c for c in _shuffled(name) if found.invalid_reason(c) is None), most)
    )


@functools.cache
def _shuffled(name: str) -> list[Any]:
    configs = list(space(name).configs())
    random.Random(name).shuffle(configs)
    return configs


def fields_of(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


# Spaces.


@pytest.mark.parametrize("name", NAMES)
def test_configs_say_why_not_or_pass_the_kernels_own_checks(name: str) -> None:
    """The space may refuse more than the kernel, never less."""
    machine, module = machine_for(name), of(name).load()
    for shape, dtype in itertools.zip_longest(SHAPES, precisions(name), fillvalue=""):
        asked = workload(name, shape or SHAPES[0], dtype)
        found, given = space(name, asked), prune.problem(asked)
        configs = list(found.configs())
        assert configs[0] == found.own
        assert len(set(configs)) == len(configs) < 6000
        for config in configs:
            reason = found.invalid_reason(config)
            if reason is None:
                assert own_reason(name, module.unsupported, config, given, machine) is None
            else:
                assert _explains(reason), reason
        for config in configs[:: len(configs) // 50 + 1]:
            assert from_text(module.Config, to_text(config)) == config


def own_reason(name: str, unsupported: Any, config: Any, given: Problem, machine: Machine) -> Any:
    """What the kernel itself has against a config; `unsupported`: its module's."""
    if name == "portable":
        return portable_config.invalid_reason(config, given.dtype, machine.shared_memory_per_cta)
    if name.startswith("hopper."):
        return unsupported.args[0].invalid_reason(config)
    rung = unsupported.__self__
    return rung._invalid(config, machine.shared_memory_per_cta) or rung.unsupported_reason(
        given, config, machine.arch
    )


def _explains(reason: str) -> bool:
    """One line with a number, that says what was expected or what there is; no whole config."""
    wanted = re.search(
        r"expected .|, the device has \d|, an SM has at most \d|too few for \d|needs .*\d", reason
    )
    return bool(wanted and re.search(r"\d", reason) and reason.isprintable() and len(reason) < 160)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_kernel_takes_by_itself_is_tried(name: str) -> None:
    """With few rows too, where a cluster cannot pay: a call without tuning takes it."""
    for machine in runs_on(name):
        for dtype, shape in itertools.product(precisions(name, machine), SHAPES[:2]):
            found = space(name, workload(name, shape, dtype), machine)
            assert found.invalid_reason(found.own) is None


def test_footprints_say_what_configs_ask_for() -> None:
    for name in NAMES:
        machine, found = machine_for(name), space(name)
        for config in some(name, found, 30):
            f = found.footprint(config)
            assert f.shared_memory <= machine.shared_memory_per_cta
            assert f.threads % 32 == 0
            assert 32 <= f.threads <= machine.max_threads_per_cta
            assert f.registers >= f.tile_m * f.tile_n // f.threads // f.groups // 4
            assert (
                min(f.tile_m, f.tile_n, f.tile_k, f.stages, f.groups, f.cluster_m, f.cluster_n) >= 1
            )
            if name.startswith("hopper."):
                assert f.threads == 128 * (config.consumers + (f.threads // 128 > config.consumers))
                assert f.shared_memory == config.shared_memory_bytes


def test_hopper_footprints_count_the_producer() -> None:
    f = space("hopper.hilbert").footprint(hilbert.Config())
    assert (f.threads, f.cluster_m, f.cluster_n, f.persistent) == (384, 2, 1, True)


@pytest.mark.parametrize("ladder", registry.LADDERS)
def test_every_value_is_of_use_somewhere(ladder: str) -> None:
    unused = {}
    for name, shape in itertools.product(reversed(registry.LADDERS[ladder]), SHAPES[:2]):
        found = space(name, workload(name, shape))
        for axis, values in found.axes.items():
            unused.setdefault(
                fields_of(axis), {(value,) if isinstance(axis, str) else value for value in values}
            )
        axes = [fields for fields in map(fields_of, found.axes) if unused[fields]]
        for config in valid(found) if axes else ():
            for fields in axes:
                unused[fields].discard(tuple(getattr(config, field) for field in fields))
    assert not any(unused.values()), unused


def test_hopper_configs_of_one_compile():
    """`compile_key` is what the compile cache goes by: the order of tiles and the SMs are a
    table's.
    """
    found, given = space("hopper.hilbert"), prune.problem(SQUARE)
    compiled = {config: found.compile_key(config) for config in valid(found)}
    for config, shared in compiled.items():
        assert host._variant("hopper.hilbert", given, config).config == shared
        scheduled = {name: getattr(config, name) for name in ("order", "group_m", "group_n", "sms")}
        assert replace(shared, **scheduled) == config
    assert len(set(compiled.values())) * 2 == len(compiled)  # with 128 SMs, and with all


@pytest.mark.parametrize(
    "asked",
    [
        Workload(1024, 1024, 1024),
        Workload(1536, 1536, 1536, layout="nn"),
        Workload(16, 4096, 4096, layout="nn"),
    ],
    ids=str,
)
def test_gemm_configs_of_one_compile(asked: Workload) -> None:
    found, given = space("hopper.gemm", asked), prune.problem(asked)
    compiled = {}
    for config in valid(found):
        variant = example_variant(cast(functools.partial, gemm.plan).args[0], given, config)
        assert compiled.setdefault(found.compile_key(config), variant) == variant


def test_a_space_has_only_the_axes_that_a_rung_knows() -> None:
    def axes(name: str) -> set[str]:
        return {field for axis in space(name).axes for field in fields_of(axis)}

    assert axes("hopper.tma_wgmma") == {"tile_m", "tile_n"}
    assert "cluster_m" not in axes("hopper.lean_barriers")
    assert {"cluster_m", "cluster_n"} <= axes("hopper.cluster_multicast")
    assert "epilogue_stages" in axes("hopper.hilbert")
    assert "block_k" not in axes("simt.naive")
    assert {"block_k", "group_m"} <= axes("simt.pipelined")
    assert "stages" in axes("turing.cp_async")


@pytest.mark.parametrize(
    "text", ["stages=2,tile_n=128,epilogue_stages=2", "sms=132", "cluster_m=2", "epilogue_stages=1"]
)
def test_what_cannot_pay(text: str) -> None:
    """Configs that run, and cannot be the fastest."""
    config = from_text(hilbert.Config, f"cluster_m=1,sms=0,{text}")
    problem = prune.problem(Workload(64, 4096, 4096))
    assert hilbert.unsupported(problem, config) is None
    assert hilbert.space(problem, H100).invalid_reason(config) is not None


def test_interpreted_portable_varies_what_the_interpreter_sees() -> None:
    found = PORTABLE.load().space(prune.problem(Workload(64, 64, 64, "float32", layout="nn")), None)
    assert set(found.axes) == {"block_m", "block_n", "block_k"}
    assert all(
        found.invalid_reason(config) is None
        for config in found.configs()
        if config.accumulators <= 128
    )


# Pruning.


def planned(*targets, asked=SQUARE, trials=None):
    return plan_of(targets, asked, gpu.imagined("h100"), trials=trials)


SYNTHETIC = TuneTarget("synthetic", "support.faulty_kernel")


def test_a_plan_rates_each_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "10000")
    rated = 0

    def ranker(*of: Any) -> float:
        nonlocal rated
        rated += 1
        return prune.by_model(*of)

    plan = plan_of((SYNTHETIC,), SQUARE, gpu.imagined("h100"), ranker=ranker)

    assert rated == plan.generated >= 10000


def test_the_steps_of_a_plan_grow_with_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the configs: about 8 times the calls of functions, and not 64 times."""

    def steps(configs: int) -> int:
        monkeypatch.setenv("FAULTY_CONFIGS", str(configs))
        return steps_of(lambda: planned(SYNTHETIC))

    steps(1)  # what is computed once
    small, large = steps(250), steps(2000)

    assert large < 12 * small


def test_ten_thousand_configs_are_ranked_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "10000")

    plan = planned(HILBERT, PORTABLE, SYNTHETIC)

    assert plan.generated > 15000
    assert plan.generated == len(plan.ranked) + sum(pruned.count for pruned in plan.pruned)
    assert {candidate.target for candidate in plan.ranked} >= {HILBERT, PORTABLE}
    times = [candidate.predicted_us for candidate in plan.ranked]
    assert times == sorted(times)


def test_plan_keeps_the_best_of_each_kernel_and_its_own() -> None:
    whole, few = planned(HILBERT, PORTABLE), planned(HILBERT, PORTABLE, trials=5)
    assert few.valid == whole.valid == len(whole.ranked)
    for target in (HILBERT, PORTABLE):
        best, kept = ([c for c in plan.ranked if c.target == target] for plan in (whole, few))
        assert kept[:5] == best[:5]
        assert all(c.own for c in kept[5:])
        assert sum(c.own for c in kept) == 1
    assert [c for c in whole.ranked if c in few.ranked] == list(few.ranked)


def test_rules_are_counted_with_an_example() -> None:
    found = planned(HILBERT).pruned
    counts = [pruned.count for pruned in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] > 0
    assert len({pruned.rule for pruned in found}) == len(found) < 15
    assert all(
        not re.search(r"\d", pruned.rule) and re.search(r"\d", pruned.example) for pruned in found
    )


def test_a_kernel_that_cannot_take_the_operands_is_not_compiled() -> None:
    """TMA needs rows of 16 bytes: no config of a Hopper kernel takes K = 65, and none may
    be tried.
    """
    plan = planned(HILBERT, PORTABLE, asked=Workload(257, 129, 65))
    assert {candidate.target.name for candidate in plan.ranked} == {"portable"}
    assert any("TMA needs" in pruned.example for pruned in plan.pruned)


@pytest.mark.parametrize(
    ("name", "machine", "message"),
    [
        (
            "hopper.hilbert",
            "a100",
            "kernel 'hopper.hilbert' needs sm_90 to sm_90, and NVIDIA A100.* is sm_80",
        ),
        ("turing.cp_async", "t4", "needs sm_80 or newer, and .*T4 is sm_75"),
        (
            "hopper.hilbert",
            "h100",
            "needs operands of dtype bfloat16 or float16, and was given float32",
        ),
        (
            "simt.naive",
            "",
            "needs an NVIDIA GPU, and was given the CPU: portable alone is interpreted there",
        ),
    ],
)
def test_kernels_that_do_not_fit(name: str, machine: str, message: str) -> None:
    target = gpu.imagined(machine) if machine else gpu.current()
    with pytest.raises(ValueError, match=message):
        plan_of((of(name),), Workload(64, 64, 64, "float32"), target)


# The model.


@functools.cache
def samples() -> list[tuple[Footprint, Workload, Machine]]:
    """A few of each kernel, on each machine, at each shape."""
    dice = random.Random(0)
    found = []
    for name in NAMES:
        for machine in runs_on(name):
            asked = workload(name, dtype=precisions(name, machine)[0])
            tried = space(name, asked, machine)
            configs = some(name, tried, 12)
            for shape in ALL_SHAPES:
                at = workload(name, shape, asked.dtype)
                for config in dice.sample(configs, min(2, len(configs))):
                    found.append((tried.footprint(config), at, machine))
    return found


def us(f: Footprint, asked: Workload, machine: Machine) -> float:
    return cost_model.predict(f, asked, machine).us


def test_predictions_are_shares_and_times_that_a_machine_can_reach() -> None:
    assert len(samples()) > 1000
    for f, asked, machine in samples():
        found = cost_model.predict(f, asked, machine)
        peak = max(machine.flops_per_sm_clock.values()) * machine.sms * machine.boost_mhz
        assert max(cost_model.LAUNCH_US, 2 * math.prod(asked.shape) / peak) <= found.us < math.inf
        assert 0 < found.waves < math.inf
        assert 0 < found.wave_efficiency <= 1
        assert found.wave_efficiency == cost_model.wave_efficiency(f, asked, machine)
        assert all(
            0 <= share <= 1 for share in (found.tensor, found.l2, found.latency, found.store)
        )
        assert "waves" in found.limits


def cut() -> list[tuple[Footprint, Workload, Machine]]:
    """Every fifth config whose CTAs share tiles, where such are tried."""
    found = []
    for shape in (*SHAPES[:2], (512, 512, 512), (128, 512, 8192)):
        asked = Workload(*shape)
        tried = space("hopper.gemm", asked)
        configs = [config for config in valid(tried) if config.split]
        found += [(tried.footprint(config), asked, H100) for config in configs[::5]]
    return found


def without_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on pieces of K are combined in no time."""
    monkeypatch.setattr(cost_model, "COMBINE", 0.0)
    monkeypatch.setattr(cost_model, "SUMS", math.inf)


def test_half_the_terms_take_about_half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what combines pieces of K, and where L2 holds all operands of the smaller call."""
    without_sums(monkeypatch)
    shared = cut()
    assert any(f.split_k > 1 for f, _, _ in shared)
    assert any(f.stream_k for f, _, _ in shared)
    for f, asked, machine in samples() + shared:
        machine = replace(machine, l2_bytes=0)
        long, half, quarter = (
            us(f, replace(asked, K=K), machine) for K in (1 << 18, 1 << 17, 1 << 16)
        )
        assert (
            1.9 < (long - half) / (half - quarter) < 2.1
        )  # whatever does not depend on K left out


def test_combining_takes_as_long_for_any_number_of_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DRAM is not what takes the time. Nothing where no CTAs share a tile."""
    cases = [
        (f, replace(asked, K=K), replace(machine, dram_gbs=1e12))
        for f, asked, machine in samples() + cut()
        for K in (65536, 32768)
    ]
    whole = [us(*case) for case in cases]
    without_sums(monkeypatch)
    taken = [time - us(*case) for time, case in zip(whole, cases, strict=True)]
    for (f, _, _), long, half in zip(cases[::2], taken[::2], taken[1::2], strict=True):
        assert long == pytest.approx(half, abs=1e-6)
        assert (long > 0.1) if f.split_k > 1 or f.stream_k else long == 0


def test_fewer_stages_are_never_faster() -> None:
    for f, asked, machine in samples():
        times = [us(replace(f, stages=stages), asked, machine) for stages in (1, 2, 3, 4, 6, 8)]
        assert all(fewer >= more * (1 - 1e-12) for fewer, more in itertools.pairwise(times)), times


def test_rows_inside_of_lines_are_never_faster() -> None:
    for f, asked, machine in samples():
        whole, one, both = (
            us(replace(f, cache_lines=lines), asked, machine) for lines in ((1, 1), (1, 2), (2, 2))
        )
        assert whole <= one <= both


@pytest.mark.parametrize(("size", "inside"), [(2048, False), (2056, True)])
def test_clusters_pay_where_rows_begin_inside_of_lines(size: int, inside: bool) -> None:
    """H100: 2048 takes 25.6 µs without clusters and 26.6 with; 2048 x 2048 x 2056 takes 35.5 and
    26.1.
    """
    asked = Workload(2048, 2048, size)
    found = space("hopper.gemm", asked)
    alone, pairs = (us(found.footprint(gemm.Config(cluster_m=m)), asked, H100) for m in (1, 2))
    assert (pairs < alone) is inside
    lines = space("portable", asked).footprint(portable_config.PortableConfig()).cache_lines
    assert lines == found.footprint(gemm.Config()).cache_lines == ((2, 2) if inside else (1, 1))


def test_a_larger_gpu_is_never_slower() -> None:
    """With SMs, L2 and memory in proportion: SMs alone would share the same L2. Kernels without a
    pipeline are allowed a little, as fewer CTAs of an SM cover each other's waits then.
    """
    for f, asked, machine in samples():
        doubled = {
            name: 2 * getattr(machine, name) for name in ("sms", "l2_bytes_per_clock", "dram_gbs")
        }
        allowed = 1.2 if f.stages == 1 else 1 + 1e-12
        larger = us(f, asked, replace(machine, **doubled))
        assert larger <= us(f, asked, machine) * allowed, (f, asked, machine.name)


def test_clusters_take_no_more_from_l2() -> None:
    """Where L2 is all that counts, and both kinds of cluster fill the GPU alike."""
    found = space("hopper.hilbert")
    starved = replace(H100, l2_bytes_per_clock=8, sms=128)
    for config in valid(found):
        if config.cluster == 1 and 4096 % (2 * config.tile_m) == 4096 % (2 * config.tile_n) == 0:
            alone = found.footprint(config)
            for cluster in (replace(alone, cluster_m=2), replace(alone, cluster_n=2)):
                assert us(cluster, SQUARE, starved) < us(alone, SQUARE, starved)


def test_a_config_that_leaves_sms_idle_is_slower() -> None:
    f = space("hopper.hilbert").footprint(hilbert.Config())
    assert us(replace(f, sms=64), SQUARE, H100) > 1.5 * us(f, SQUARE, H100)
    assert us(replace(f, issue=0.5), SQUARE, H100) > us(f, SQUARE, H100)


def test_resident_ctas() -> None:
    def resident(**changes: Any) -> int:
        return cost_model.resident(
            replace(faulty_kernel.footprint(faulty_kernel.Config()), **changes), H100
        )

    assert resident(shared_memory=100 << 10) == 2
    assert resident(shared_memory=228 << 10) == 0
    assert resident(shared_memory=0, threads=256, registers=128) == 2
    assert resident(shared_memory=0, threads=1024, registers=16) == 2
    assert resident(persistent=True) == 1
    assert resident(shared_memory=0, registers=16, threads=32) == 32


def test_a_config_that_no_kernel_runs_is_not_in_the_space() -> None:
    config = from_text(hilbert.Config, "cluster_m=1,sms=0,tile_m=256,tile_n=256")
    found = hilbert.space(prune.problem(Workload(64, 4096, 4096)), H100)
    assert "accumulator registers" in str(found.invalid_reason(config))


def test_predictions_that_are_all_equal_have_no_order() -> None:
    with pytest.raises(ValueError, match=r"predicted has 1\.0 only, expected values that differ"):
        rank.spearman([1.0, 1.0], [1.0, 2.0])


# Compiles.


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", ["simt.pipelined", "portable", "turing.cp_async", "hopper.hilbert"]
)
def test_a_valid_config_compiles(name: str) -> None:
    found = space(name)
    config = min(some(name, found, 8), key=lambda config: found.footprint(config).registers)
    of(name).load().precompile(prune.problem(workload(name)), config, 90)
