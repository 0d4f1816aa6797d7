"""The machines whose figures are known: peaks, names of devices, references of architectures."""

import pytest

from outblas.base import machines


@pytest.mark.parametrize(
    ("name", "dtype", "data_sheet"),
    [
        ("T4", "float16", 65),
        ("T4", "float32", 8.1),
        ("A100", "bfloat16", 312),
        ("A100", "tf32", 156),
        ("A100", "float32", 19.5),
        ("H100", "bfloat16", 989.4),
        ("H100", "tf32", 494.7),
        ("H100", "fp8", 1978.9),
        ("GH200", "float16", 990),
        ("H200", "bfloat16", 989.5),
        ("h100 pcie", "bfloat16", 756),
        ("h20", "bfloat16", 148),
        ("h20", "fp8", 296),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, dtype: str, data_sheet: float) -> None:
    assert machines.find(name).peak_tflops(dtype) == pytest.approx(data_sheet, rel=0.006)


def test_a_peak_follows_the_clock() -> None:
    assert machines.find("h100").peak_tflops("bfloat16", 1500) == pytest.approx(811.0, rel=1e-3)


def test_a_machine_without_the_dtype_says_which_it_has() -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16', expected for T4: float16, float32"):
        machines.find("T4").peak_tflops("bfloat16")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_device_is_a_machine_whose_figures_are_known(device: str, name: str | None) -> None:
    found = machines.of_device(device)

    assert (found.name if found else None) == name


@pytest.mark.parametrize(("arch", "name"), [(75, "T4"), (80, "A100"), (90, "H100")])
def test_an_architecture_has_a_reference(arch: int, name: str) -> None:
    assert machines.reference(arch).name == name


def test_an_unknown_machine_is_refused() -> None:
    expected = "machine is 'V100', expected one of: T4, A100, H100, GH200, H200"
    with pytest.raises(ValueError, match=expected):
        machines.find("V100")


def test_an_architecture_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="arch is 89, expected one of: 75, 80, 90"):
        machines.reference(89)
