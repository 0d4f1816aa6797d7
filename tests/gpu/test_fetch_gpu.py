"""`addmm` in pingpong where the addend comes late: from the host's memory it takes longer than a
tile's products.
"""

import pytest
import torch

from outblas import addmm
from outblas.base import configs
from outblas.hopper import gemm

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

WIDE = (
    "tile_m=128,tile_n=192,tile_k=64,stages=5,consumers=2,pingpong=True,cluster_m=1,epilogue_stages=1,"
    "producer_registers=24,consumer_registers=240"
)
ELASTIC = (
    "tile_m=128,tile_n=200,tile_k=64,stages=4,consumers=2,pingpong=True,cluster_m=1,epilogue_stages=2,variable_tile_n=True,"
    "producer_registers=24,consumer_registers=240"
)
SHAPES = {
    "2560 nn": ((2560, 2560, 2560), "nn", ELASTIC),
    "2560 nt": ((2560, 2560, 2560), "nt", ELASTIC),
    "8192x8192x1024 nn": ((8192, 8192, 1024), "nn", WIDE),
    "8192x8192x1024 nt": ((8192, 8192, 1024), "nt", WIDE),
}


class OnDevice:
    """Memory of the host under the address at which the GPU reads it."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(pinned.shape),
            "typestr": "<i2",
            "data": (pinned.data_ptr(), False),
            "strides": None,
        }


def mapped(t: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor of bfloat16 whose memory is the host's."""
    pinned = t.cpu().contiguous().view(torch.int16).pin_memory()
    tensor = torch.as_tensor(OnDevice(pinned), device="cuda").view(torch.bfloat16)
    assert tensor.data_ptr() == pinned.data_ptr()
    return tensor


def integers(*shape: int, most: int = 3) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
def test_an_addend_that_comes_late_is_added_and_never_multiplied(name: str) -> None:
    """From the host's memory, from the GPU's, and in place."""
    (M, N, K), layout, text = SHAPES[name]
    torch.manual_seed(0)
    a, b = integers(M, K), integers(N, K).t() if layout == "nt" else integers(K, N)
    c = integers(M, N, most=100)
    expected = (torch.mm(a.float(), b.float()) + c.float()).to(torch.bfloat16)
    config = configs.from_text(gemm.Config, text)

    for addend in (mapped(c), c):
        for call in range(5):
            result = addmm(addend, a, b, kernel="hopper.gemm", config=config)
            assert torch.equal(result, expected), f"call {call}"
    in_place = mapped(c)
    addmm(in_place, a, b, out=in_place, kernel="hopper.gemm", config=config)
    assert torch.equal(in_place.cpu(), expected.cpu())
