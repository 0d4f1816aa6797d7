"""What the help of a command ends with: lines to copy, and what each does."""

from __future__ import annotations

from collections.abc import Mapping

Example = tuple[str, str]  # a command line, and what it does

EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    "": (
        ("outblas doctor", "check this machine"),
        ("outblas demo", "take a first look, with or without a GPU"),
        ("outblas bench --shapes 4096", "time the kernels beside cuBLAS"),
        ("outblas --install-completion", "complete commands in your shell"),
    ),
    "list": (("outblas list hopper --long", "one ladder with parents, GPUs and sources"),),
    "doctor": (("outblas doctor --json", "for a bug report"),),
    "verify": (
        ("outblas verify portable --shapes quick", "one kernel at a few shapes"),
        ("outblas verify --shapes 640x72x96 --dtype float16", "a shape of your own"),
    ),
    "bench": (
        ("outblas bench --shapes 4096,16x4096x4096", "time all kernels at two shapes"),
        ("outblas bench --kernels outblas --shapes suite --save suite.json", "a file"),
        ("outblas bench --kernels outblas --epilogue bias+gelu+residual", "an epilogue"),
        ("outblas bench --kernels hopper.gemm[tile_n=128] --shapes 2048", "a config"),
        ("outblas bench --op grouped --shapes moe:mixtral-8x7b", "a model's experts"),
    ),
    "inspect": (
        ("outblas inspect hopper.gemm", "registers, spills, instructions"),
        ("outblas inspect simt.naive --arch 80 --sass", "the machine code"),
    ),
    "tune": (
        ("outblas tune --shapes 4096 --budget 20m", "the fastest config of a shape"),
        ("outblas tune --shapes 64 --gpus cpu --trials 4", "try it on a CPU"),
        ("outblas tune --explain 4096x4096x4096 --gpu H100", "what matmul chooses"),
        ("outblas tune --report --html tune.html", "a sweep as a page"),
    ),
    "cache ls": (("outblas cache ls", "list what was tuned"),),
    "cache show": (("outblas cache show 4096 --limit 20", "the fastest trials of a shape"),),
    "cache export": (("outblas cache export results.jsonl", "take results elsewhere"),),
    "cache import": (("outblas cache import results.jsonl", "add another machine's results"),),
    "cache prune": (("outblas cache prune --stale --dry-run", "count what would be removed"),),
    "pack build": (
        ("outblas pack build --model llama-3-8b -o llama.outblas", "a model's layers"),
        ("outblas pack build --shapes products.txt -o mine.outblas", "your own shapes"),
    ),
}


def epilog(command: str) -> str | None:
    """The examples of a command as its help shows them: a paragraph a line."""
    lines = (f"$ {line}  # {what}" for line, what in EXAMPLES.get(command, ()))
    text = "\n\n".join(["Examples:", *lines]).replace("[", "\\[")
    return text if command in EXAMPLES else None
