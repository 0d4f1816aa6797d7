"""Our product as a choice of Inductor's, in a process of its own: what it registers stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import torch, outblas
from torch._inductor import config, select_algorithm
from outblas.inductor import outblas_mm

outblas.inductor_choice()
outblas.inductor_choice()
assert config.external_matmul == [outblas_mm]
called, product, real = [], outblas.api.matmul, select_algorithm.AlgorithmSelectorCache.__call__

def ours_alone(self, name, choices, *args, **kwargs):
    kept = [choice for choice in choices if choice.name.startswith("outblas_mm")]
    return real(self, name, kept, *args, **kwargs)

select_algorithm.AlgorithmSelectorCache.__call__ = ours_alone
config.max_autotune_gemm = True
a, b = torch.randint(-8, 9, (64, 48)).float(), torch.randint(-8, 9, (48, 32)).float()
outblas.api.matmul = lambda *a, **k: called.append(k) or product(*a, **k)
got = torch.compile(lambda a, b: torch.mm(a, b) + 1)(a, b)
assert torch.equal(got, a @ b + 1)
print(list(called[-1]))
"""


def test_inductor_measures_and_takes_it(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout == "['out']\n", done.stderr[-2000:]
