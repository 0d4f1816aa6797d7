"""Builds the packs that the wheel carries, in src/outblas/packs, without a GPU.

    python -m tools.wheel_packs [KIND ...]            all kinds by default
    python -m tools.wheel_packs --dry-run [KIND ...]  what they would have, without compiling

Of each kind of linear layer (`KINDS`: a dtype or fp8 formats, and a kind of epilogue) a pack has
the kernels of `MOST_CONFIGS` configs. They are those with which all layers of `MODELS`, at 1 to
8192 rows, lose the least time by the model of `rule_cycles`; a layer of any other size has them to
choose from as well. Experts have the configs of the rule, which are few.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
from rich.console import Console

from outblas.base import cache, machines, pack
from outblas.base.configs import to_text
from outblas.base.machines import Machine
from outblas.call.default_kernel import rows_of_choice
from outblas.call.problem import Problem
from outblas.call.products import Products, parse_line
from outblas.hopper import grouped
from outblas.hopper.gemm import heuristic, packed, packed_choice
from outblas.hopper.gemm.rule_cycles import rates
from outblas.hopper.parts.config import HopperConfig
from outblas.packing import build, examples

MOST_CONFIGS = 24
MOST_ROWS = 8192
GPU = "H100"
WORST = 10.0  # times the best, where no config of a set takes a layer

# Hidden and inner size, columns of queries, of keys, and of the vocabulary.
MODELS = {
    "llama-3.2-1b": (2048, 8192, 2048, 512, 128256),
    "llama-3.2-3b": (3072, 8192, 3072, 1024, 128256),
    "llama-3-8b": (4096, 14336, 4096, 1024, 128256),
    "llama-3-70b": (8192, 28672, 8192, 1024, 128256),
    "llama-3-405b": (16384, 53248, 16384, 1024, 128256),
    "qwen3-0.6b": (1024, 3072, 2048, 1024, 151936),
    "qwen3-1.7b": (2048, 6144, 2048, 1024, 151936),
    "qwen3-4b": (2560, 9728, 4096, 1024, 151936),
    "qwen3-8b": (4096, 12288, 4096, 1024, 151936),
    "qwen3-14b": (5120, 17408, 5120, 1024, 151936),
    "qwen3-32b": (5120, 25600, 8192, 1024, 151936),
    "mistral-7b": (4096, 14336, 4096, 1024, 32768),
    "mistral-nemo": (5120, 14336, 4096, 1024, 131072),
    "mistral-small": (5120, 32768, 4096, 1024, 131072),
    "mixtral-8x22b": (6144, 16384, 6144, 1024, 32768),
    "gpt-oss": (2880, 2880, 4096, 512, 201088),
    "bert-base": (768, 3072, 768, 768, 30522),
    "bert-large": (1024, 4096, 1024, 1024, 30522),
    "vit-huge": (1280, 5120, 1280, 1280, 1000),
}
# The projections of latent attention and the dense and shared layers of DeepSeek-V3: N and K.
DEEPSEEK = (
    *((2112, 7168), (1536, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384)),
    *((36864, 7168), (18432, 7168), (7168, 18432), (4096, 7168), (2048, 7168), (7168, 2048)),
    (129280, 7168),
)
# Experts, how many a token takes, hidden and inner size of each, and the epilogue of gate and up.
EXPERTS = {
    "mixtral-8x7b": (8, 2, 4096, 14336, "swiglu"),
    "mixtral-8x22b": (8, 2, 6144, 16384, "swiglu"),
    "qwen3-30b-a3b": (128, 8, 2048, 768, "swiglu"),
    "qwen3-235b-a22b": (128, 8, 4096, 1536, "swiglu"),
    "gpt-oss-20b": (32, 4, 2880, 2880, "bias"),
    "gpt-oss-120b": (128, 4, 2880, 2880, "bias"),
    "deepseek-v3": (256, 8, 7168, 2048, "swiglu"),
}
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
PLAIN = ("", "bias", *ACTIVATIONS, *(f"bias+{activation}" for activation in ACTIVATIONS))
GATED = ("swiglu", "geglu", "geglu_tanh")
FP8 = ("fp8-e4m3 tensorwise", "fp8-e4m3 rowwise", "fp8-e4m3 1x128:128x128")


@dataclass(frozen=True)
class Kind:
    """Layers that choose from one set of configs: the words of their line, and their epilogues."""

    words: str
    epilogues: tuple[str, ...]

    def products(self, size: tuple[int, int], epilogue: str) -> Products:
        """Returns the products of a layer, N and K, at 1 to 8192 rows."""
        dtype, _, scaling = self.words.partition(" ")
        N, K = size
        return parse_line(f"1-{MOST_ROWS}x{N}x{K} {dtype} nt {epilogue} {scaling}")


KINDS = {
    "bfloat16": Kind("bfloat16", PLAIN),
    "bfloat16-gated": Kind("bfloat16", GATED),
    "float16": Kind("float16", PLAIN),
    "float16-gated": Kind("float16", GATED),
    "fp8-tensorwise": Kind(FP8[0], ("", "bias")),
    "fp8-rowwise": Kind(FP8[1], ("", "bias")),
    "fp8-blocks": Kind(FP8[2], ("", "bias")),
}
KINDS_OF_EXPERTS = {
    "bfloat16-experts": "bfloat16",
    "float16-experts": "float16",
    "fp8-blocks-experts": FP8[2],
}


NAMES = (*KINDS, *KINDS_OF_EXPERTS)


def sizes(kind: Kind) -> list[tuple[int, int]]:
    """Returns N and K of the layers of a kind, N with both halves of gated pairs."""
    if kind.epilogues == GATED:
        pairs = [(2 * inner, hidden) for hidden, inner, *_ in MODELS.values()]
        return list(dict.fromkeys([*pairs, (36864, 7168), (4096, 7168)]))
    layers = [
        layer
        for hidden, inner, queries, keys, vocabulary in MODELS.values()
        for layer in (
            (queries + 2 * keys, hidden),
            *((queries, hidden), (keys, hidden), (hidden, queries)),
            *((2 * inner, hidden), (inner, hidden), (hidden, inner), (vocabulary, hidden)),
        )
    ]
    in_fp8 = kind.words.startswith("fp8")  # whose K has whole blocks, and N whole 16 bytes
    return [
        (N, K)
        for N, K in dict.fromkeys((*layers, *DEEPSEEK))
        if not (in_fp8 and (N % 16 or K % 128))
    ]


def rows_of_choices() -> list[int]:
    """Returns the numbers of rows at which configs are chosen."""
    return sorted({rows_of_choice(rows) for rows in range(1, MOST_ROWS + 1)})


def problems(kind: Kind, epilogue: str, rows: Sequence[int]) -> Iterator[Problem]:
    """Yields the problems of all layers of a kind at these numbers of rows."""
    ranges = tuple((M, M) for M in rows)
    for size in sizes(kind):
        yield from examples.problems(replace(kind.products(size, epilogue), rows=ranges))


# ---- the configs of a kind
def relative_times(
    posed: Sequence[Problem], machine: Machine
) -> tuple[np.ndarray[Any, Any], list[HopperConfig]]:
    """Returns the modelled time of each problem (rows) with each compile key (columns), in units of
    the best, at most `WORST`; and the keys.
    """
    gpu, numbers = rates(machine), dict[HopperConfig, int]()
    entries: list[tuple[int, int, float]] = []
    for row, problem in enumerate(posed):
        call = heuristic.call_of(problem, gpu)
        cycles = heuristic.cycles_in(call)
        dram = 2 * call.problem.K * (call.M + call.N) / gpu.dram_bytes_per_clock
        for candidate in heuristic.candidates(call):
            needed = cycles(candidate, call, math.inf)
            if call.streams:  # the model has what CTAs would need if DRAM were no limit
                needed = (needed**4 + dram**4) ** 0.25
            entries.append((row, numbers.setdefault(candidate.key, len(numbers)), needed))
    times = np.full((len(posed), len(numbers)), np.inf)
    for row, column, needed in entries:
        times[row, column] = min(times[row, column], needed)
    return np.minimum(times / times.min(axis=1, keepdims=True), WORST), list(numbers)


def least_regret(times: np.ndarray[Any, Any], count: int) -> list[int]:
    """Returns the columns of `count` configs whose best has the least mean time: one after the
    other, then each exchanged for a better one until none is.
    """
    chosen: list[int] = []
    for _ in range(min(count, times.shape[1])):
        reached = times[:, chosen].min(axis=1, initial=WORST)
        chosen.append(int(np.minimum(reached[:, None], times).mean(axis=0).argmin()))
    mean = times[:, chosen].min(axis=1).mean()
    changed = True
    while changed:
        changed = False
        for i in range(len(chosen)):
            others = chosen[:i] + chosen[i + 1 :]
            reached = times[:, others].min(axis=1, initial=WORST)
            means = np.minimum(reached[:, None], times).mean(axis=0)
            if means.min() < mean - 1e-9:
                chosen[i], mean, changed = int(means.argmin()), means.min(), True
    return chosen


# ---- their kernels
def variants(
    kind: Kind, keys: frozenset[HopperConfig], posed: Sequence[Problem], machine: Machine
) -> list[Any]:
    """Returns the kernels that all layers of a kind launch at 1 to 8192 rows with these configs.
    `posed`: the problems of its layers at the numbers of rows at which configs are chosen.

    Between two such numbers a kernel changes only with the number of waves, which the first and the
    last show, and where scales have blocks with the alignment of columns of scales.
    """
    gpu, ends = rates(machine), rows_of_choices()
    chosen = [heuristic.config(problem, gpu, keys) for problem in posed]
    found: dict[Any, None] = {}
    for epilogue in kind.epilogues:
        for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            others = (2, 4) if "128" in kind.words else ()
            for rows in {min(first + n, last) for n in (1, *others, last)}:
                of_layers = problems(kind, epilogue, [rows])
                for problem, config in zip(of_layers, chosen[i :: len(ends)], strict=True):
                    found |= dict.fromkeys(packed.variants(problem, config, machine))
    return list(found)


def expert_variants(words: str, machine: Machine) -> list[Any]:
    """Returns the kernels of the experts of all models, with the configs of the rule: gate with up,
    and down, whose rows are gathered and scattered, or lie together.
    """
    dtype, _, scaling = words.partition(" ")
    found: dict[Any, None] = {}
    for count, top, hidden, inner, epilogue in EXPERTS.values():
        bias, forms = "bias" * (epilogue == "bias"), ("", "gathered")
        layers = [(2 * inner, hidden, epilogue, form) for form in forms if not (scaling and form)]
        layers += [(hidden, inner, bias, form) for form in ("", "scattered weighted")]
        # The last before a choice, too: scales of rows lie otherwise.
        tokens = {n for last in rows_of_choices() for n in (last, max(1, last - 1))}
        ranges = tuple((top * n, top * n) for n in sorted(tokens))
        for N, K, steps, form in layers:
            line = f"{top}x{N}x{K} {dtype} nt {steps} {scaling} groups:{count} {form}"
            products = replace(parse_line(line), rows=ranges)
            assert products.groups is not None
            for problem in examples.grouped_problems(products, products.groups):
                if grouped.unsupported(problem) is None:
                    launched = grouped.pack_problem(problem)
                    found[grouped.pack_variant(launched, None, machine)] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.wheel_packs", description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *NAMES], help="by default all")
    parser.add_argument("--dry-run", action="store_true", help="compile nothing")
    given, console = parser.parse_args(), Console()
    machine = machines.find(GPU)
    for name in given.kinds or NAMES:
        about: dict[str, Any] = {
            "outblas": metadata.version("outblas"),
            "gpu": machines.device_name(machine),
        }
        if name in KINDS:
            kind = KINDS[name]
            posed = list(problems(kind, kind.epilogues[0], rows_of_choices()))
            times, keys = relative_times(posed, machine)
            chosen = least_regret(times, MOST_CONFIGS)
            selected = frozenset(keys[i] for i in chosen)
            about["configs"] = {packed_choice.kind(posed[0]): sorted(map(to_text, selected))}
            wanted = variants(kind, selected, posed, machine)
            regret = times[:, chosen].min(axis=1).mean() - 1
            console.print(
                f"{name}: {len(chosen)} of {len(keys)} configs, by the model {regret:.2%} slower "
                f"in the mean of {len(posed)} GEMMs"
            )
        else:
            wanted = expert_variants(KINDS_OF_EXPERTS[name], machine)
        console.print(f"{name}: {len(wanted)} kernels")
        if given.dry_run:
            continue
        facts = build.compiled(wanted, None, lambda text: None)
        pack.SHIPPED.mkdir(exist_ok=True)
        path = pack.SHIPPED / f"{name}.pack"
        pack.write(path, about, [(each, cache.packed_object(each)) for each in facts])
        console.print(f"  {path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
