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
    found = torch.as_tensor(OnDevice(pinned), device="cuda").view(torch.bfloat16)
    assert found.data_ptr() == pinned.data_ptr()
    return found


def integers(*shape: int, most: int = 3) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("where", ["host", "device"])
def test_an_addend_that_comes_late_is_added_and_never_multiplied(name: str, where: str) -> None:
    (M, N, K), layout, config = SHAPES[name]
    torch.manual_seed(0)
    a, b = integers(M, K), integers(N, K).t() if layout == "nt" else integers(K, N)
    c = integers(M, N, most=100)
    want = (torch.mm(a.float(), b.float()) + c.float()).to(torch.bfloat16)
    addend = mapped(c) if where == "host" else c
    own = configs.from_text(gemm.Config, config)

    for call in range(5):
        got = addmm(addend, a, b, kernel="hopper.gemm", config=own)
        assert torch.equal(got, want), f"call {call}"


def test_an_addend_in_place_that_comes_late() -> None:
    (M, N, K), _, config = SHAPES["8192x8192x1024 nn"]
    a, b, c = integers(M, K), integers(K, N), integers(M, N, most=100)
    want = (torch.mm(a.float(), b.float()) + c.float()).to(torch.bfloat16)
    addend, own = mapped(c), configs.from_text(gemm.Config, config)

    got = addmm(addend, a, b, out=addend, kernel="hopper.gemm", config=own)

    assert torch.equal(got.cpu(), want.cpu())
