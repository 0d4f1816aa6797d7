"""What the help of every command ends with: commands to copy, and what each does."""

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
    "demo": (("outblas demo --save demo.json", "keep the times in a file"),),
    "list": (
        ("outblas list", "every kernel and its idea"),
        ("outblas list hopper --long", "one ladder with parents, GPUs and sources"),
    ),
    "doctor": (
        ("outblas doctor", "problems come first"),
        ("outblas doctor --json", "for a bug report"),
    ),
    "verify": (
        ("outblas verify portable --shapes quick", "one kernel at a few shapes"),
        ("outblas verify --shapes 640x72x96 --dtype float16", "a shape of your own"),
    ),
    "bench": (
        ("outblas bench --shapes 4096,16x4096x4096", "time all kernels at two shapes"),
        ("outblas bench --kernels outblas --shapes suite --save old.json", "keep"),
        ("outblas bench --kernels outblas --shapes suite --against old.json", "compare"),
        ("outblas bench --kernels outblas --shapes decode:llama-3-8b", "cold weights"),
        ("outblas bench --kernels outblas --epilogue bias+gelu+residual", "an epilogue"),
        ("outblas bench --kernels hopper.gemm[tile_n=128] --shapes 2048", "a config"),
        ("outblas bench --op grouped --shapes moe:mixtral-8x7b", "a model's experts"),
        ("outblas bench --op grouped --dtype fp8-block --shapes deepgemm", "in fp8"),
    ),
    "bench-host": (
        ("outblas bench-host", "compare with the recorded figures"),
        ("outblas bench-host --against ../other --check", "compare two checkouts"),
    ),
    "inspect": (
        ("outblas inspect hopper.gemm", "registers, spills, instructions"),
        ("outblas inspect --arch 80", "every kernel that runs on sm_80"),
        ("outblas inspect simt.naive --arch 80 --sass", "the machine code"),
    ),
    "tune": (
        ("outblas tune --shapes 4096 --budget 20m", "the fastest config of a shape"),
        ("outblas tune --shapes 64 --gpus cpu --trials 4", "try it on a CPU"),
        ("outblas tune --explain 4096x4096x4096 --gpu H100", "what matmul chooses"),
    ),
    "cache ls": (("outblas cache ls", "list what was tuned"),),
    "cache show": (("outblas cache show 4096 --limit 20", "the fastest trials of a shape"),),
    "cache export": (("outblas cache export results.jsonl", "take results elsewhere"),),
    "cache import": (("outblas cache import results.jsonl", "add another machine's results"),),
    "cache verify": (("outblas cache verify", "look for damage"),),
    "cache prune": (
        ("outblas cache prune --stale --dry-run", "count what would be removed"),
        (
            "outblas cache prune --older-than 30d --compiled",
            "remove old ones",
        ),
    ),
    "pack build": (
        ("outblas pack build --model llama-3-8b -o llama.outblas", "a model's layers"),
        ("outblas pack build --shapes products.txt -o mine.outblas", "your products"),
    ),
    "pack show": (("outblas pack show llama.outblas", "its products and versions"),),
    "pack verify": (("outblas pack verify llama.outblas", "check every byte"),),
    "report ladder": (
        ("outblas report ladder --ladder hopper", "rung by rung"),
        ("outblas report ladder --html ladder.html", "as a page"),
    ),
    "report sizes": (("outblas report sizes hopper.gemm", "square products, 512 to 16384"),),
    "report roofline": (("outblas report roofline --html roofline.html", "as a page"),),
    "report raster": (("outblas report raster --shapes 4096", "compare tile orders at one shape"),),
    "report accesses": (("outblas report accesses", "bank conflicts and coalescing"),),
    "report readme": (("outblas report readme --check", "check that the pages are up to date"),),
    "report tune": (("outblas report tune --html tune.html", "a sweep as a page"),),
}


def epilog(command: str) -> str:
    """The examples of a command as its help shows them: a paragraph a line."""
    lines = (f"$ {line}  # {what}".replace("[", "\\[") for line, what in EXAMPLES[command])
    return "\n\n".join(["Examples:", *lines])
