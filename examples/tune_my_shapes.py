"""A first sweep: which config of a kernel is the fastest for a shape of yours?

On a GPU it tunes `outblas.matmul` for the shape, and later calls take the winner, in other
programs too. Without one it tunes the kernel `portable` on the CPU through Triton's interpreter:
nothing that is measured so says anything of a GPU, but all steps are those of a real sweep.

    python examples/tune_my_shapes.py
    python examples/tune_my_shapes.py --shape 16x4096x4096 --budget 120
"""

import argparse
import tempfile
from pathlib import Path

import torch

import outblas
from outblas.autotune import BestConfig, Progress, sweep


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Tune a product of your own.")
    parser.add_argument("--shape", default="512x4096x4096" if on_gpu else "16x16x16")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--trials", type=int, default=None if on_gpu else 2)
    given = parser.parse_args()

    if on_gpu:
        m, n, k = map(int, given.shape.split("x"))
        a = torch.randn(m, k, device="cuda").bfloat16()
        weight = torch.randn(n, k, device="cuda").bfloat16()
        winner = outblas.tune(a, weight.T, budget=given.budget, trials=given.trials)
        show(winner)
        outblas.matmul(a, weight.T)  # takes the winner
        return

    with tempfile.TemporaryDirectory() as folder:
        # [sweep]
        found = sweep(
            "portable",
            given.shape,  # as on the command line: MxNxK, several with commas
            dtype="float32",
            gpus="cpu",
            budget=given.budget,
            trials=given.trials,
            compile_workers=1,
            store=Path(folder) / "tuning.sqlite",
            progress=Stages(),
        )
        # [end]
    for trial in found.outcomes[0].trials:
        time = "-" if trial.us is None else f"{trial.us / 1e3:.1f} ms"
        print(f"  {trial.status:4} {time:>9}  {trial.config} {trial.reason}".rstrip())
    for winner in found.winners:
        show(winner)
    assert found.winners, found.failures


def show(winner: BestConfig) -> None:
    print(f"{winner.workload}: {winner.kernel} [{winner.config}]")
    print(f"  {winner.us:.1f} µs after {winner.screened} of {winner.valid} valid configs")
    if winner.gpu.arch:
        print(f"  {winner.ratio:.3f} times as fast as cuBLAS")


class Stages:
    """Prints the stages of a sweep as it comes to them."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.last:
            self.last = progress.stage
            print(f"[{progress.elapsed:4.1f} s] {progress.stage}")


if __name__ == "__main__":
    main()
