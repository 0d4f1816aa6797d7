"""ncu's counters read from a recording, and how the launches of a call add up.

`data/ncu_h100.csv` has 49 columns of what ncu 2025.3.1 printed on an H100, those that are read and
those that say what ran where: 4096³ and then 16×4096×4096 in bf16, each by cuBLAS, portable and
hopper.tma_wgmma; at the second shape cuBLAS launches two kernels.
"""

from dataclasses import replace

import pytest
from support.ncu_recording import RECORDING, recorded

from outblas.inspect import counters
from outblas.inspect.counters import Counters, Launch, combine, in_range, parse

FLOP = 2 * 4096**3  # of the first shape


def of_cublas(shape: str) -> list[Launch]:
    return in_range(recorded(shape), "cublas")


def check(found: Counters, **figures: float) -> None:
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures)


def test_the_recording_is_read_in_base_units() -> None:
    launches = parse(RECORDING.read_text())
    providers = ["cublas", "portable", "hopper.tma_wgmma"]
    assert [launch.ranges for launch in launches] == [
        (p,) for p in (*providers, "cublas", *providers)
    ]
    cublas = launches[0]
    assert cublas.kernel == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert (cublas.grid, cublas.block) == ((2, 66, 1), (384, 1, 1))
    assert cublas.values[counters.TIME] == pytest.approx(179.040)
    assert cublas.values["dram__bytes_read.sum"] == 150_959_872
    assert cublas.values["lts__t_sector_hit_rate.pct"] == pytest.approx(0.7254)
    assert cublas.values[counters.REGISTERS] == 168
    assert cublas.values[counters.stall("barrier")] == 6.17
    assert launches[4].kernel.startswith("void cublasLt::splitKreduce_kernel<32, 16, int")


@pytest.mark.parametrize(
    ("unit", "cell", "value"),
    [
        ("us", "1,234.5", 1234.5),
        ("msecond", "2", 2000.0),
        ("ns", "n/a", None),
        ("ns", "nan", None),
        ("s", "", None),
    ],
)
def test_units_and_values(unit: str, cell: str, value: float | None) -> None:
    header = '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum"'
    text = (
        f'{header}\n"","","","","{unit}"\n==PROF== Disconnected\n"0","k","(1, 1, 1)","(2, 3, '
        f'4)","{cell}"\n'
    )
    assert parse(text) == [Launch((), "k", (2, 3, 4), (1, 1, 1), {counters.TIME: value})]


def test_an_unknown_unit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the unit of dram__bytes_read\.sum is 'furlong'"):
        parse(RECORDING.read_text().replace('"byte"', '"furlong"'))


@pytest.mark.parametrize(
    "text", ["", "==WARNING== No kernels were profiled.\n", '"ID","Kernel Name"\n']
)
def test_output_without_launches(text: str) -> None:
    assert parse(text) == []


def test_counters_of_one_launch() -> None:
    c = combine(of_cublas("4096"), FLOP)
    dram = 150_959_872 + 28_364_800
    check(c, us=179.04, tensor_active=0.9472, ipc=0.47, dram_gbs=dram / 179.04e-6 / 1e9)
    check(c, flop_per_dram_byte=FLOP / dram, flop_per_l2_byte=FLOP / 1_610_624_896)
    check(c, not_selected_share=c.stalls["not_selected"] / (1 + sum(c.stalls.values())))
    assert (c.registers, c.ffma) == (168, 0)
    assert (c.l1_gbs, c.l2_gbs, c.global_load_requests) == (None, None, None), (
        "the recording has none"
    )
    assert c.shared["st"].wavefronts == 660_937
    assert c.shared["st"].excess == pytest.approx(141_824 / 660_937)
    assert c.stalls["gmma"] == pytest.approx(3.66)
    assert set(c.stalls) == set(counters.STALLS)
    assert len(c.stalls) == 18


def test_counters_of_memory_and_of_ffma() -> None:
    (launch,) = of_cublas("4096")
    extra = {
        "l1tex__t_bytes.sum": 2e9,
        "lts__t_bytes.sum": 1e9,
        "sm__sass_thread_inst_executed_op_ffma_pred_on.sum": 1.25 * 4096**3,
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 100.0,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 400.0,
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": 10.0,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 320.0,
    }
    assert set(extra) <= set(counters.metrics(75))
    full = replace(launch, values={**launch.values, **extra})
    c = combine([full, full], 2 * FLOP)
    check(c, l1_gbs=2e9 / 179.04e-6 / 1e9, l2_gbs=1e9 / 179.04e-6 / 1e9, ffma_per_mnk=1.25)
    assert (c.global_load_requests, c.global_load_sectors) == (200, 800)
    assert (c.global_store_requests, c.global_store_sectors) == (20, 640)


def test_split_k_and_its_reduction_add_up() -> None:
    split, reduce = of_cublas("16x4096x4096")
    c = combine([split, reduce], 1.0)
    assert c.dram_read_bytes == 33_707_264 + 532_992
    assert c.l2_to_sm_bytes == 37_748_736 + 524_288
    first, second = 29_347 / (29_347 + 8_779), 8_779 / (29_347 + 8_779)  # of the cycles
    check(c, us=15.936 + 4.448, tensor_active=0.0891 * first + 0.0025 * second)
    assert c.stalls["long_scoreboard"] == pytest.approx(14.78 * first + 12.94 * second)
    assert c.registers == 168
    assert c.shared["st"].excess == pytest.approx(168 / 13_989)
    assert c.shared["ld"].excess == 0
    # The recording has no sectors: nothing says how to weigh two hit rates.
    assert c.l2_hit_rate is None

    def with_counts(launch: Launch, sectors: float, active: float) -> Launch:
        extra = {
            "lts__t_sectors.sum": sectors,
            "l1tex__t_sectors.sum": 0.0,
            "sm__cycles_active.avg": active,
        }
        return replace(launch, values={**launch.values, **extra})

    c = combine([with_counts(split, 300, 20_000), with_counts(reduce, 100, 5_000)], 1.0)
    check(c, l2_hit_rate=(0.0602 * 3 + 0.6660) / 4, tensor_active=(0.0891 * 4 + 0.0025) / 5)
    assert c.l1_hit_rate is None, "a hit rate of no sectors"


def test_missing_columns_are_none_and_not_zero() -> None:
    dropped = (
        "dram__bytes_read.sum",
        "sm__cycles_elapsed.max",
        counters.conflicts("st"),
        counters.stall("wait"),
    )
    text = RECORDING.read_text()
    for name in dropped:
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', '"other"')
    launches = parse(text)

    one = combine(launches[:1], 1.0)
    assert (one.dram_read_bytes, one.flop_per_dram_byte, one.stalls["wait"]) == (None, None, None)
    assert (one.shared["st"].wavefronts, one.shared["st"].excess) == (660_937, None)
    assert (one.shared["gmma"].wavefronts, one.shared["gmma"].excess) == (None, None)
    assert one.tensor_active == pytest.approx(0.9472), "one launch needs no weight"
    assert combine(launches[3:5], 1.0).tensor_active is None


def test_metrics_by_architecture() -> None:
    hopper, ampere = counters.metrics(90), counters.metrics(80)
    assert len(set(hopper)) == len(hopper)
    of_wgmma = {counters.stall("gmma"), counters.wavefronts("gmma"), counters.conflicts("gmma")}
    assert of_wgmma == {name for name in hopper if "gmma" in name} == set(hopper) - set(ampere)
