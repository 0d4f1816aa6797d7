"""The operators as `import outblas` leaves them: all are defined, and a deferred kernel is imported
by whatever calls it first.
"""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.fresh_torch import run_beside_torch

from outblas.torch_ops import schema

X, W, OFFS = "torch.ones(6, 4)", "torch.full((2, 4, 3), .5)", "torch.tensor([2, 6]).int()"
MM = f"torch.ops.outblas.grouped_mm({X}, {W}, {OFFS})"
F8 = "torch.ones(16, 16).to(torch.float8_e4m3fn)"
ONE = "torch.ones(())"
MOE = "torch.ones(6, 8), torch.ones(4, 8, 32), torch.ones(4, 16, 8)"
# What calls a deferred kernel first, and prints what it gave.
FIRST_CALLS = {
    "eager": f"print({MM})",
    "the public function": f"print(outblas.grouped_mm({X}, {W}, offs={OFFS}))",
    "autograd": f"""
w = {W}.requires_grad_()
torch.ops.outblas.grouped_mm({X}, w, {OFFS}).sum().backward()
print(w.grad)""",
    "a fake tensor": f"""
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    print({MM})""",
    "meta tensors": f"""
with torch.device("meta"):
    print({MM})""",
    "a compiler": f"""
call = torch.compile(torch.ops.outblas.grouped_mm, backend="aot_eager", fullgraph=True)
print(call({X}, {W}, {OFFS}))""",
    "a lazy view": f"""
aux = torch._neg_view(torch.zeros(6, 3))
print(torch.ops.outblas.grouped_gemm_to_aux(aux, {X}, {W}, {OFFS}, activation="relu"), aux)""",
    "inference mode": f"""
with torch.inference_mode():
    print({MM})""",
    "autocast": f"""
with torch.autocast("cpu", torch.bfloat16):
    print({MM})""",
    "scaled_mm": f"print(torch.ops.outblas.scaled_mm({F8}, {F8}.t(), {ONE}, {ONE}))",
    "quantize": "print(torch.ops.outblas.quantize(torch.ones(2, 16), 'rowwise'))",
    "moe_mlp": f"""
torch.manual_seed(0)
weights, index = torch.rand(6, 4).topk(2)
print(torch.ops.outblas.moe_mlp({MOE}, index, weights))""",
}
START = "import sys, torch, warnings; warnings.simplefilter('ignore'); import outblas\n"
IMPORTED = "".join(f"import {module}\n" for module in {*schema._DEFERRED.values()})


def said(code: str) -> str:
    """What a program prints that begins with outblas imported."""
    done = run_beside_torch(START + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_defines_all_operators_and_imports_few_modules() -> None:
    later = {*schema._DEFERRED.values(), "outblas.torch_ops.aten", "outblas.call.shape_recorder"}
    names = "".join(f"torch.ops.outblas.{operator}.default\n" for operator in schema.SCHEMAS)

    assert said(f"{names}print({later} & {{*sys.modules}})").strip() == "set()"


@pytest.mark.long
@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_deferred_kernel_is_there_for_its_first_call(call: str) -> None:
    assert said(FIRST_CALLS[call]) == said(IMPORTED + FIRST_CALLS[call]) != ""


class Grouped(torch.nn.Module):
    """A program that calls a deferred operator."""

    def forward(self, mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.outblas.grouped_mm(mat_a, mat_b, offs)
        return result


@pytest.mark.long
def test_an_exported_program_is_loaded_where_the_kernel_is_deferred(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    operands = torch.ones(6, 4), torch.full((2, 4, 3), 0.5), torch.tensor([2, 6]).int()
    torch.export.save(torch.export.export(Grouped(), operands), path)

    result = said(f"print(torch.export.load({str(path)!r}).module()({X}, {W}, {OFFS}).sum())")

    assert result.strip() == "tensor(36.)"


def test_threads_that_call_first_at_once_all_get_the_kernel() -> None:
    code = f"""
import concurrent.futures, threading
at_once = threading.Barrier(8)
def call(_):
    at_once.wait()
    return {MM}.sum().item()
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(*pool.map(call, range(8)))"""

    assert said(code).split() == ["36.0"] * 8


def test_each_deferred_kernel_is_implemented_by_its_module() -> None:
    for module in {*schema._DEFERRED.values()}:
        import_module(module)

    assert [slot for slot, kernel in schema._kernels.items() if kernel is None] == []


def test_a_kernel_at_a_key_that_is_not_deferred_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing of moe_mlp is deferred at FuncTorchBatched"):
        schema.implement("moe_mlp", "FuncTorchBatched", lambda *given: None)
