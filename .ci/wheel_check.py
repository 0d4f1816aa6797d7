"""The installed wheel: one GEMM, checked, and the command."""

import subprocess
import sys
from pathlib import Path

import torch

import outblas

a, b = torch.randint(-8, 9, (70, 50)).half(), torch.randint(-8, 9, (50, 33)).half()
product = outblas.matmul(a, b, kernel="portable")
assert torch.equal(product.double(), a.double() @ b.double())
print(f"{outblas.__file__}: {tuple(product.shape)} checked")

command = [Path(sys.executable).with_name("outblas"), "list", "hopper"]
kernels = subprocess.run(command, check=True, capture_output=True, text=True).stdout
assert "hopper.hilbert" in kernels, kernels
print("outblas list: the command is in the wheel")
