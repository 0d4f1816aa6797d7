"""ncu's counters read from a recording, and how the launches of a call add up.

`data/ncu_h100.csv` has 49 columns of what ncu 2025.3.1 printed on an H100, those that are read and
those that say what ran where: 4096³ and then 16×4096×4096 in bf16, each by cuBLAS, portable and
hopper.tma_wgmma; at the second shape cuBLAS launches two kernels.
"""

from dataclasses import replace
from typing import ClassVar

import pytest
from support.ncu_recording import RECORDING, recorded

from outblas.inspect import counters
from outblas.inspect.counters import Counters, Launch, combine, in_range, parse

FLOP = 2 * 4096**3  # of the first shape


def of_cublas(shape: str) -> list[Launch]:
    return in_range(recorded(shape), "cublas")


def check(found: Counters, **figures: float) -> None:
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures)


class TestTheRecording:
    """Launches as ncu printed them."""

    @pytest.fixture
    def launches(self) -> list[Launch]:
        """Of both shapes."""
        return parse(RECORDING.read_text())

    def test_has_each_launch_in_the_range_of_its_provider(self, launches: list[Launch]) -> None:
        providers = ["cublas", "portable", "hopper.tma_wgmma"]

        ranges = [launch.ranges for launch in launches]

        assert ranges == [(provider,) for provider in (*providers, "cublas", *providers)]

    def test_has_names_of_kernels(self, launches: list[Launch]) -> None:
        product, reduction = launches[0], launches[4]

        assert product.kernel == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
        assert reduction.kernel.startswith("void cublasLt::splitKreduce_kernel<32, 16, int")

    def test_has_grids_and_blocks(self, launches: list[Launch]) -> None:
        assert (launches[0].grid, launches[0].block) == ((2, 66, 1), (384, 1, 1))

    @pytest.mark.parametrize(
        ("metric", "value"),
        [
            pytest.param(counters.TIME, 179.040, id="time in µs"),
            pytest.param("dram__bytes_read.sum", 150_959_872, id="bytes"),
            pytest.param("lts__t_sector_hit_rate.pct", 0.7254, id="a share"),
            pytest.param(counters.REGISTERS, 168, id="registers"),
            pytest.param(counters.stall("barrier"), 6.17, id="cycles of stalls"),
        ],
    )
    def test_is_read_in_base_units(self, launches: list[Launch], metric: str, value: float) -> None:
        assert launches[0].values[metric] == pytest.approx(value)


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


class TestOneLaunch:
    """The product of 4096³ by cuBLAS."""

    DRAM_BYTES = 150_959_872 + 28_364_800

    @pytest.fixture
    def found(self) -> Counters:
        """Its counters."""
        return combine(of_cublas("4096"), FLOP)

    def test_has_its_time_and_its_rates(self, found: Counters) -> None:
        gbs = self.DRAM_BYTES / 179.04e-6 / 1e9

        check(found, us=179.04, tensor_active=0.9472, ipc=0.47, dram_gbs=gbs)

    def test_has_flop_per_byte_of_each_level(self, found: Counters) -> None:
        check(
            found,
            flop_per_dram_byte=FLOP / self.DRAM_BYTES,
            flop_per_l2_byte=FLOP / 1_610_624_896,
        )

    def test_has_registers_and_no_ffma(self, found: Counters) -> None:
        assert (found.registers, found.ffma) == (168, 0)

    def test_says_nothing_of_what_was_not_recorded(self, found: Counters) -> None:
        assert (found.l1_gbs, found.l2_gbs, found.global_load_requests) == (None, None, None)

    def test_has_wavefronts_of_shared_memory_and_their_excess(self, found: Counters) -> None:
        assert found.shared["st"].wavefronts == 660_937
        assert found.shared["st"].excess == pytest.approx(141_824 / 660_937)

    def test_has_all_18_stalls(self, found: Counters) -> None:
        assert set(found.stalls) == set(counters.STALLS)
        assert len(found.stalls) == 18
        assert found.stalls["gmma"] == pytest.approx(3.66)

    def test_has_the_share_of_warps_that_were_ready_and_not_selected(self, found: Counters) -> None:
        share = found.stalls["not_selected"] / (1 + sum(found.stalls.values()))

        check(found, not_selected_share=share)


class TestACallOfTwoAlikeLaunches:
    """With counters that the recording does not have."""

    EXTRA: ClassVar = {
        "l1tex__t_bytes.sum": 2e9,
        "lts__t_bytes.sum": 1e9,
        "sm__sass_thread_inst_executed_op_ffma_pred_on.sum": 1.25 * 4096**3,
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 100.0,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 400.0,
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": 10.0,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 320.0,
    }

    @pytest.fixture
    def found(self) -> Counters:
        """The counters of both."""
        (launch,) = of_cublas("4096")
        full = replace(launch, values={**launch.values, **self.EXTRA})
        return combine([full, full], 2 * FLOP)

    def test_asks_ncu_for_these_counters(self) -> None:
        assert set(self.EXTRA) <= set(counters.metrics(75))

    def test_has_rates_of_both_caches(self, found: Counters) -> None:
        check(found, l1_gbs=2e9 / 179.04e-6 / 1e9, l2_gbs=1e9 / 179.04e-6 / 1e9)

    def test_has_the_ffma_of_each_product_of_two_numbers(self, found: Counters) -> None:
        check(found, ffma_per_mnk=1.25)

    def test_has_the_sum_of_requests_and_sectors(self, found: Counters) -> None:
        assert (found.global_load_requests, found.global_load_sectors) == (200, 800)
        assert (found.global_store_requests, found.global_store_sectors) == (20, 640)


def with_counts(launch: Launch, sectors: float, active: float) -> Launch:
    """A launch with sectors of L2, none of L1, and active cycles."""
    extra = {
        "lts__t_sectors.sum": sectors,
        "l1tex__t_sectors.sum": 0.0,
        "sm__cycles_active.avg": active,
    }
    return replace(launch, values={**launch.values, **extra})


class TestSplitKAndItsReduction:
    """Two launches of cuBLAS for one product."""

    PARTITIONS, REDUCTION = 29_347, 8_779  # cycles

    @pytest.fixture
    def found(self) -> Counters:
        """The counters of both."""
        return combine(of_cublas("16x4096x4096"), 1.0)

    def weighted(self, of_partitions: float, of_reduction: float) -> float:
        """The mean by cycles."""
        total = self.PARTITIONS + self.REDUCTION
        return (of_partitions * self.PARTITIONS + of_reduction * self.REDUCTION) / total

    def test_have_the_sum_of_times_and_bytes(self, found: Counters) -> None:
        check(found, us=15.936 + 4.448)
        assert found.dram_read_bytes == 33_707_264 + 532_992
        assert found.l2_to_sm_bytes == 37_748_736 + 524_288

    def test_have_shares_weighted_by_cycles(self, found: Counters) -> None:
        check(found, tensor_active=self.weighted(0.0891, 0.0025))
        assert found.stalls["long_scoreboard"] == pytest.approx(self.weighted(14.78, 12.94))

    def test_have_the_most_registers_of_both(self, found: Counters) -> None:
        assert found.registers == 168

    def test_have_the_excess_of_all_wavefronts(self, found: Counters) -> None:
        assert found.shared["st"].excess == pytest.approx(168 / 13_989)
        assert found.shared["ld"].excess == 0

    def test_have_no_hit_rate_without_sectors_to_weigh_it_by(self, found: Counters) -> None:
        assert found.l2_hit_rate is None

    def test_have_shares_weighted_by_sectors_and_active_cycles_where_there_are_some(self) -> None:
        split, reduce = of_cublas("16x4096x4096")

        found = combine([with_counts(split, 300, 20_000), with_counts(reduce, 100, 5_000)], 1.0)

        check(found, l2_hit_rate=(0.0602 * 3 + 0.6660) / 4)
        check(found, tensor_active=(0.0891 * 4 + 0.0025) / 5)
        assert found.l1_hit_rate is None, "a hit rate of no sectors"


class TestMissingColumns:
    """They lead to None, and not to zero."""

    @pytest.fixture
    def launches(self) -> list[Launch]:
        """The recording without four of its columns."""
        text = RECORDING.read_text()
        for name in (
            "dram__bytes_read.sum",
            "sm__cycles_elapsed.max",
            counters.conflicts("st"),
            counters.stall("wait"),
        ):
            assert f'"{name}"' in text
            text = text.replace(f'"{name}"', '"other"')
        return parse(text)

    def test_are_none_and_so_is_what_is_computed_from_them(self, launches: list[Launch]) -> None:
        found = combine(launches[:1], 1.0)

        assert (found.dram_read_bytes, found.flop_per_dram_byte) == (None, None)
        assert found.stalls["wait"] is None

    def test_leave_what_other_columns_say(self, launches: list[Launch]) -> None:
        shared = combine(launches[:1], 1.0).shared

        assert (shared["st"].wavefronts, shared["st"].excess) == (660_937, None)
        assert (shared["gmma"].wavefronts, shared["gmma"].excess) == (None, None)

    def test_of_cycles_leave_the_shares_of_one_launch(self, launches: list[Launch]) -> None:
        """It needs no weight."""
        assert combine(launches[:1], 1.0).tensor_active == pytest.approx(0.9472)

    def test_of_cycles_take_the_shares_of_two_launches(self, launches: list[Launch]) -> None:
        assert combine(launches[3:5], 1.0).tensor_active is None


def test_no_counter_is_asked_for_twice() -> None:
    hopper = counters.metrics(90)

    assert len(set(hopper)) == len(hopper)


def test_counters_of_wgmma_are_asked_for_on_hopper_alone() -> None:
    hopper, ampere = set(counters.metrics(90)), set(counters.metrics(80))

    of_wgmma = {counters.stall("gmma"), counters.wavefronts("gmma"), counters.conflicts("gmma")}
    assert hopper - ampere == of_wgmma
    assert {name for name in hopper if "gmma" in name} == of_wgmma
