"""One product through the installed wheel, checked."""

import torch

import outblas

a, b = torch.randint(-8, 9, (70, 50)).half(), torch.randint(-8, 9, (50, 33)).half()
product = outblas.matmul(a, b, kernel="portable")
assert torch.equal(product.double(), a.double() @ b.double())
print(f"{outblas.__file__}: {tuple(product.shape)} checked")
