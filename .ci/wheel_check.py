"""The installed wheel: one product, checked, and a report on the results that it carries."""

import subprocess
import sys
from pathlib import Path

import torch

import outblas

a, b = torch.randint(-8, 9, (70, 50)).half(), torch.randint(-8, 9, (50, 33)).half()
product = outblas.matmul(a, b, kernel="portable")
assert torch.equal(product.double(), a.double() @ b.double())
print(f"{outblas.__file__}: {tuple(product.shape)} checked")

command = [Path(sys.executable).with_name("outblas"), "report", "sizes", "hopper.hilbert"]
report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
assert "16384" in report, report
print("outblas report sizes: the results are in the wheel")
