"""One call under test: the guarded operands of a `Case`, and its reference product in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from outblas.verify.cases import Case
from outblas.verify.guards import Guarded

# run(a, b, c, out, alpha, beta) writes alpha · a @ b + beta · c into out; c is None without an
# addend.
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, float, float], None]
Fill = Callable[[torch.Tensor, torch.Generator], object]

CHUNK = 1 << 23  # elements of a float64 temporary


@dataclass(frozen=True)
class GuardedCall:
    """The buffers of one call. `c` is None without an addend, and is `out` itself when the call
    adds in place.
    """

    case: Case
    a: Guarded
    b: Guarded
    c: Guarded | None
    out: Guarded

    def run(self, run: Run) -> None:
        """Runs the kernel; returns when the device has finished."""
        c = self.c.view if self.c else None
        with _fp32_precision(self.case):
            run(self.a.view, self.b.view, c, self.out.view, self.case.alpha, self.case.beta)
            if self.out.storage.is_cuda:
                torch.cuda.synchronize(self.out.storage.device)

    def row_chunks(self) -> Iterator[slice]:
        """Yields ranges of the product's rows that are small enough for float64 temporaries."""
        case = self.case
        step = max(1, CHUNK // max(1, prod(case.batch) * max(case.N, case.K)))
        for start in range(0, case.M, step):
            yield slice(start, min(start + step, case.M))

    def product(self, rows: slice, *, absolute: bool = False) -> torch.Tensor:
        """Returns rows of alpha · A B + beta · C in float64, from the operands before the run.

        `absolute`: uses the absolute values of all factors and terms. The shape is [*batch, rows,
        N].
        """
        case = self.case
        magnitude = torch.abs if absolute else torch.positive
        a, b = (magnitude(t.double()) for t in (self.a.armed[..., rows, :], self.b.armed))
        result = (a @ b).mul_(abs(case.alpha) if absolute else case.alpha)
        if self.c and case.beta:
            addend = self.c.armed.expand(case.M, case.N)[rows].double() * case.beta
            result += magnitude(addend)
        return result

    def torch_product(self) -> torch.Tensor:
        """Returns torch's product, in the dtype of the product and on the same device."""
        with _fp32_precision(self.case):
            if self.c is not None:
                return torch.addmm(
                    self.c.armed,
                    self.a.armed,
                    self.b.armed,
                    alpha=self.case.alpha,
                    beta=self.case.beta,
                )
            if self.case.result_dtype == self.case.dtype:
                return self.a.armed @ self.b.armed
            return self._widened()

    def chained_product(self) -> torch.Tensor:
        """Returns the result of one chain of fp32 FMAs along K for every output, in the dtype of
        the product.

        float64 holds a product of two fp32 values exactly. A sum is rounded to float64 before it is
        rounded to fp32, which changes the result in about one of 2²⁹ steps.
        """
        case = self.case
        a, b = self.a.armed.double(), self.b.armed.double()
        total = torch.zeros(*case.batch, case.M, case.N, device=a.device)
        for k in range(case.K):
            total = torch.addcmul(total.double(), a[..., k, None], b[..., k, None, :]).float()
        total *= case.alpha
        if self.c and case.beta:
            total += case.beta * self.c.armed.expand(case.M, case.N).float()
        return total.to(case.result_dtype)

    def _widened(self) -> torch.Tensor:
        """Returns the fp32 product of 16-bit operands. On a GPU it comes from cuBLAS's kernels for
        that; the CPU has no equivalent.
        """
        case, (a, b) = self.case, (self.a.armed, self.b.armed)
        if not a.is_cuda:
            return a.float() @ b.float()
        a, b = (t.expand(*case.batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
        return torch.bmm(a, b, out_dtype=case.result_dtype).reshape(*case.batch, case.M, case.N)

    def violations(self) -> list[str]:
        """Returns a message for every stray write of the run."""
        inputs = [self.a, self.b, *([self.c] if self.c and self.c is not self.out else [])]
        found = [
            self.out.violation(writable=True),
            *(guarded.violation(writable=False) for guarded in inputs),
        ]
        return [text for text in found if text]


def prepare(
    case: Case, device: torch.device | str, fill_a: Fill, fill_b: Fill, fill_c: Fill
) -> GuardedCall:
    """Allocates the buffers of a case. Fills a, b and c from its seed (c with NaN if beta is 0),
    and poisons out.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(case.seed)
    a = _matrix(
        "a", case, case.batch_a, (case.M, case.K), case.layout[0], device, expand=case.expand == "a"
    )
    b = _matrix(
        "b", case, case.batch_b, (case.K, case.N), case.layout[1], device, expand=case.expand == "b"
    )
    out = _matrix("out", case, case.batch, (case.M, case.N), case.out_layout, device, output=True)
    c = None
    match case.addend:
        case "matrix":
            c = _matrix("c", case, (), (case.M, case.N), "n", device)
        case "row":
            c = Guarded("c", (case.N,), (1,), case.dtype, device, offset=case.offset)
        case "column":
            c = _matrix("c", case, (), (case.M, 1), "n", device)
        case "out":
            c = out
    fill_a(a.cells, generator)
    fill_b(b.cells, generator)
    if c is not None and case.beta:
        fill_c(c.cells, generator)
    call = GuardedCall(case, a, b, c, out)
    for guarded in (a, b, out, *([c] if c else [])):
        guarded.arm()
    return call


def _matrix(
    name: str,
    case: Case,
    batch: tuple[int, ...],
    shape: tuple[int, int],
    letter: str,
    device: torch.device,
    *,
    expand: bool = False,
    output: bool = False,
) -> Guarded:
    stored_rows, stored_columns = shape if letter == "n" else shape[::-1]
    lead = max(1, stored_columns + case.pad)
    inner = (0 if expand else lead, 1)
    strides, step = (
        list(inner if letter == "n" else inner[::-1]),
        lead * (1 if expand else max(1, stored_rows)),
    )
    for size in reversed(batch):
        strides.insert(0, step)
        step *= size
    # If a kernel writes a whole tile row beyond the edge (128 rows, or as many as are affordable,
    # at least one), the writes must land inside the guard.
    guard = 256 + max(lead, min(128 * lead, 1 << 20))
    dtype = case.result_dtype if output else case.dtype
    return Guarded(
        name,
        (*batch, *shape),
        strides,
        dtype,
        device,
        offset=case.offset,
        guard=guard,
        output=output,
    )


@contextmanager
def _fp32_precision(case: Case) -> Iterator[None]:
    """Sets tf32 as the case requires, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
