"""Rewrites the generated parts of README.md from the files in this folder: python results/render.py [--check]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START, END = "<!-- generated from results/{name} -->\n", "<!-- end -->"


def ladder_table(report: dict) -> str:
    """One row a provider: burst figures and the ratio to cuBLAS in the same rounds."""
    e = report["environment"]
    lines = ["| kernel | check | µs | TFLOP/s | × cuBLAS (10th–90th percentile) |", "|---|---|---|---|---|"]
    for r in report["results"]:
        spread = f"{r['ratio']:.3f} ({r['ratio_low']:.3f}–{r['ratio_high']:.3f})"
        lines.append(f"| {r['provider']} | {r['check']} | {r['us']:.1f} | {r['tflops']:.0f} | {spread} |")
    M, N, K = report["results"][0]["shape"]
    versions = f"driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, CuTe DSL {e['nvidia-cutlass-dsl']}"
    lines += ["", f"{M}×{N}×{K} bf16, layout nt, burst (idle, one warm call, 8 timed): {e['gpu']}, {versions}."]
    return "\n".join(lines) + "\n"


def rendered(text: str) -> str:
    """The README with every generated part made anew."""
    for path in sorted(HERE.glob("*.json")):
        start = START.format(name=path.name)
        if start in text:
            before, rest = text.split(start, 1)
            after = rest.split(END, 1)[1]
            text = before + start + ladder_table(json.loads(path.read_text())) + END + after
    return text


if __name__ == "__main__":
    now = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit("README.md is out of date: run python results/render.py" if rendered(now) != now else 0)
    README.write_text(rendered(now), encoding="utf-8")
