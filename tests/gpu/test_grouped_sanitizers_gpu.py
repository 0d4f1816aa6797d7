"""compute-sanitizer over grouped products that gather, scatter, and have an epilogue, several tiles
one after the other on each SM.
"""

import pytest
from support import sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(600)]

FEW_SMS = """
import torch, outblas
from support.grouped_calls import check_equal, draw, empty_aux

N, K = 784, 1168  # more tiles than SMs, and more k tiles than stages
CALLS = [
    ("ragged_m", ("bias", "residual", "a_index", "scatter_index", "scatter_weights"), "reglu"),
    ("ragged_m", ("bias", "residual"), "relu"),
    ("ragged_k", ("bias", "residual"), "relu"),
]
for form, names, activation in CALLS:
    call = draw(form, *names, activation=activation, M=200, N=N, K=K)
    x, want, on_gpu = call.x(), call.expected(), call.on("cuda")
    aux = empty_aux(on_gpu)
    if form == "ragged_k":  # TMA loads rows that are contiguous where groups do not divide them
        columns = on_gpu.tensors["mat_a"].t().contiguous()
        on_gpu = on_gpu.replaced(mat_a=columns.t())
    with outblas.sm_carveout(torch.cuda.get_device_properties(0).multi_processor_count - 4):
        check_equal(on_gpu.run(kernel="hopper.grouped").cpu(), want)
        check_equal(on_gpu.run(kernel="hopper.grouped", aux=aux).cpu(), want)
    check_equal(aux.cpu(), x)
    print("right:", form)
"""


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str, pytestconfig: pytest.Config) -> None:
    before = f"import sys; sys.path.insert(0, {str(pytestconfig.rootpath / 'tests')!r})\n"

    sanitizer.finds_nothing(tool, before + FEW_SMS, 3)
