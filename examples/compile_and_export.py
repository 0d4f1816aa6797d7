"""`torch.compile` and `torch.export` of layers of outblas.

A call is one operator of torch, so the program stays one graph, is compiled once for all numbers
of rows, trains, and can be exported, saved and loaded again.

    python examples/compile_and_export.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import outblas


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    width, rows = (4096, (512, 768, 2048)) if on_gpu else (64, (8, 12, 32))
    torch.manual_seed(0)
    model = nn.Sequential(
        outblas.Linear(width, 2 * width, activation="gelu"),
        outblas.Linear(2 * width, width),
    ).to(device, dtype)

    # Inductor needs a compiler of C++ on a CPU; "aot_eager" traces the same graph without one.
    # [compile]
    backend = "inductor" if on_gpu else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    # [end]
    for count in rows:
        x = torch.randn(count, width, device=device, dtype=dtype, requires_grad=True)
        compiled(x).sum().backward()
        close(compiled(x), model(x))
        print(f"{count:4} rows: right")
        torch.compiler.set_stance("fail_on_recompile")  # from here on a second compile is an error
    torch.compiler.set_stance("default")

    # [export]
    example = torch.randn(rows[0], width, device=device, dtype=dtype)
    batch = torch.export.Dim("batch", min=2)
    shapes = ({0: batch},)
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes)
    # [end]
    operators = [node.target for node in program.graph.nodes if node.op == "call_function"]
    print("exported:", *(str(each) for each in operators if "outblas" in str(each)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()  # `import outblas` has registered the operators
    x = torch.randn(rows[-1], width, device=device, dtype=dtype)
    close(loaded(x), model(x))
    print(f"loaded again: right at {rows[-1]} rows")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 2e-2 * theirs.abs().max()


if __name__ == "__main__":
    main()
