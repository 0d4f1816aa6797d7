"""Calls with an epilogue on guarded operands, judged against float64: for the tests of every kernel
that has one.
"""

from dataclasses import dataclass
from typing import Any

import torch

import outblas
from outblas.core.epilogue import GATED, apply, glu_split
from outblas.verify.guards import Guarded
from outblas.verify.oracle import ulp

EXACT = None, "relu", "reglu"  # integers stay integers
UNIT = 2.0**-24  # roundoff of fp32
SLOPE = 1.13  # of any activation, at most
INPUTS = "a", "b", "c", "bias", "residual"


def run(
    a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, kernel: str | None, **extra: Any
) -> None:
    if c is None:
        outblas.matmul(a, b, out=out, out_dtype=out.dtype, kernel=kernel, **extra)
    else:
        outblas.addmm(c, a, b, alpha=alpha, beta=beta, out=out, kernel=kernel, **extra)


@dataclass(frozen=True)
class Fused:
    """A call whose output is [*batch, M, N], with an addend if beta is not 0. `bias`, `residual`:
    "", "matrix", or a "row" or "column", repeated by stride 0. `layout`: of A, B, and the rest: n
    by rows, t by columns, s with gaps. `pad`: elements between rows and between matrices; `offset`:
    before them.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    activation: str | None = None
    bias: str = ""
    residual: str = ""
    aux: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    layout: str = "nnn"
    batch: tuple[int, ...] = ()
    out_dtype: torch.dtype | None = None
    pad: int = 0
    offset: int = 0

    def operands(self, device: str) -> dict[str, Guarded]:
        M, N, K, wide = self.M, self.N, self.K, self.N * glu_split(self.activation or "")
        sizes = {"a": (M, K), "b": (K, wide), "out": (M, N), "residual": (M, N)}
        forms = {
            "a": "matrix",
            "b": "matrix",
            "out": "matrix",
            "bias": self.bias,
            "residual": self.residual,
        }
        forms |= {"c": "matrix" * (self.beta != 0), "aux": "matrix" * self.aux}
        generator, found = torch.Generator(device).manual_seed(K), {}
        for name, form in ((name, form) for name, form in forms.items() if form):
            size, letter = sizes.get(name, (M, wide)), self.layout["ab".find(name)]
            stored = [n + self.pad for n in (*self.batch, *size[:: -1 if letter == "t" else 1])]
            *outer, m, n = (
                step * (1 + (letter == "s")) for step in torch.empty(stored, device="meta").stride()
            )
            strides = [*outer, n, m] if letter == "t" else [*outer, m, n]
            if form != "matrix":
                strides = [
                    *[0] * len(outer),
                    strides[-2] * (form == "column"),
                    strides[-1] * (form == "row"),
                ]
            dtype, output = (
                self.dtype if name in "abc" else self.out_dtype or self.dtype,
                name in ("out", "aux"),
            )
            each = Guarded(
                name,
                (*self.batch, *size),
                strides,
                dtype,
                device,
                offset=self.offset,
                output=output,
            )
            found[name] = each
            if not output:
                values = torch.randn(each.cells.shape, generator=generator, device=device)
                each.cells.copy_((3 * values).round() if self.activation in EXACT else values)
            each.arm()
        return found

    def check(self, kernel: str | None, device: str = "cpu", run: Any = run) -> None:
        """Runs the call: every element of `out` and `aux` is right, and nothing else was
        written.
        """
        guarded = self.operands(device)
        t: dict[str, Any] = {name: each.view for name, each in guarded.items()}
        extra = {name: t.get(name) for name in ("bias", "residual", "aux")}
        run(
            t["a"],
            t["b"],
            t.get("c"),
            t["out"],
            self.alpha,
            self.beta,
            kernel,
            activation=self.activation,
            **extra,
        )
        a, b, c, bias, residual = (
            t[name].double() if name in t else torch.zeros(()) for name in INPUTS
        )
        x = self.alpha * (a @ b) + self.beta * c + bias
        want = apply(x, self.activation or "", residual)
        slack = abs(self.alpha) * (a.abs() @ b.abs()) + (self.beta * c).abs() + bias.abs()
        slack = 2 * (self.K + 2) * UNIT * slack
        error = SLOPE * slack + 4 * UNIT * x.abs()
        if self.activation in GATED:
            (gate, other), (of_gate, _), (_, of_other) = (
                x.chunk(2, -1),
                error.chunk(2, -1),
                slack.chunk(2, -1),
            )
            error = of_gate * (other.abs() + of_other) + gate.abs() * of_other
        error = error + 4 * UNIT * (want.abs() + 2 * residual.abs())
        for name, right, allowed in [("out", want, error), ("aux", x, slack)][: 1 + self.aux]:
            got = t[name]
            wrong = got != right.float().to(got.dtype)
            if self.activation not in EXACT:
                wrong = ~(
                    (got.double() - right).abs()
                    <= allowed + ulp(right.abs() + allowed, got.dtype) / 2
                )
            assert not bool(wrong.any()), (
                self,
                name,
                int(wrong.sum()),
                got[wrong][:3],
                right[wrong][:3],
            )
        written = {
            name: each.violation(writable=name in ("out", "aux")) for name, each in guarded.items()
        }
        assert not any(written.values()), (self, written)
