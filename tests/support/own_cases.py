"""The calls of `tests/test_against_torch.py`: those it lists, or those of the command line."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outblas.base import registry
from outblas.base.shapes import LAYOUTS, parse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT = "default"  # stands for a call that names no kernel

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
}

# Triton's interpreter walks through every block in Python, so its shapes are small. A cube that all
# tiles divide comes first; then sizes that none divides, and vectors.
ALIGNED = 256 if DEVICE == "cuda" else 64
SHAPES = {
    "cuda": ((256, 256, 256), (128, 384, 512), (65, 127, 40), (1, 64, 96), (33, 1, 17)),
    "cpu": ((64, 64, 64), (17, 33, 65), (1, 40, 24), (33, 1, 17)),
}[DEVICE]


@dataclass(frozen=True)
class Call:
    """A product of an M×K by a K×N matrix by one kernel, `DEFAULT` for the dispatcher's choice.

    `layout` says of A and then of B whether it is stored row-major ("n") or transposed ("t").
    """

    kernel: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}-{self.M}x{self.N}x{self.K}-{dtype}-{self.layout}"

    def run(
        self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """`function` of tensors by this call's kernel; skips the test where the kernel says that it
        does not take the call.
        """
        if self.kernel == DEFAULT:
            return function(*tensors, **arguments)
        try:
            return function(*tensors, **arguments, kernel=self.kernel)
        except ValueError as error:
            if str(error).startswith(f"kernel {self.kernel!r}"):
                pytest.skip(str(error))
            raise


def add_options(parser: pytest.Parser) -> None:
    """What `conftest.py` adds to pytest's command line."""
    group = parser.getgroup(
        "outblas", "cases of tests/test_against_torch.py (each may be repeated)"
    )
    group.addoption("--kernel", action="append", help="a kernel of `outblas list`, or default")
    group.addoption("--shape", action="append", help="MxNxK, or N for a cube")
    group.addoption("--dtype", action="append", help="bfloat16, float16 or float32")
    group.addoption("--layout", action="append", help=f"one of {', '.join(LAYOUTS)}")


def narrowed(config: pytest.Config) -> bool:
    """Whether the command line names cases."""
    return any(config.getoption(name) for name in ("--kernel", "--shape", "--dtype", "--layout"))


def runnable() -> tuple[str, ...]:
    """Kernels that run on this machine, and `DEFAULT` where that is not torch's own product."""
    if DEVICE == "cpu":
        return ("portable",)
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    fit = [
        kernel.name
        for kernel in registry.ladder()
        if kernel.min_arch <= arch and (kernel.max_arch is None or arch <= kernel.max_arch)
    ]
    return (DEFAULT, *fit)


def kernels(config: pytest.Config) -> Sequence[str]:
    """The kernels to be tested. Raises pytest.UsageError where one cannot run here."""
    here = runnable()
    for kernel in config.getoption("--kernel") or ():
        if kernel not in here:
            _usage(registry.find, kernel)
            raise pytest.UsageError(
                f"--kernel is {kernel!r}, which does not run on this machine: {', '.join(here)} can"
            )
    return config.getoption("--kernel") or here


def _usage(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns; its ValueError is one of usage."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise pytest.UsageError(f"--{error}") from None


def _options(config: pytest.Config, name: str, choices: Iterable[str]) -> Sequence[str]:
    """The values of an option. Raises pytest.UsageError for one that is none of the choices."""
    values: list[str] = config.getoption(name) or []
    for value in values:
        if value not in choices:
            raise pytest.UsageError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return values


def calls(config: pytest.Config) -> list[Call]:
    """The calls to be tested. Raises pytest.UsageError that names a bad option."""
    texts = config.getoption("--shape") or ()
    shapes: list[tuple[int, int, int]] = [
        shape for text in texts for shape in _usage(parse, text, "shape")
    ]
    layouts = _options(config, "--layout", LAYOUTS)
    dtypes = dict.fromkeys(DTYPES[name] for name in _options(config, "--dtype", DTYPES) or DTYPES)
    selected = []
    for kernel in kernels(config):
        taken = dtypes if kernel == DEFAULT else registry.find(kernel).dtypes
        usual = "nt" if kernel == DEFAULT else registry.layout_of(kernel)
        cases = [(shape, layout) for shape in shapes or SHAPES for layout in layouts or (usual,)]
        if not (shapes or layouts):
            cases += [(SHAPES[0], layout) for layout in LAYOUTS if layout != usual]
        for dtype in dtypes:
            if dtype in taken or str(dtype).removeprefix("torch.") in taken:
                selected += [Call(kernel, *mnk, dtype, layout) for mnk, layout in cases]
    if not selected:
        raise pytest.UsageError(f"--dtype is {config.getoption('--dtype')}, which no kernel takes")
    return selected


def stored(
    call: Call, make: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and C of a call's shapes; `make` makes a row-major tensor of a shape."""
    a = make(call.M, call.K) if call.layout[0] == "n" else make(call.K, call.M).t()
    b = make(call.K, call.N) if call.layout[1] == "n" else make(call.N, call.K).t()
    return a, b, make(call.M, call.N)


def difference(result: torch.Tensor, exact: torch.Tensor) -> str:
    """How many elements differ, and the first of them."""
    if result.shape != exact.shape:
        return f"the shape is {tuple(result.shape)}, expected {tuple(exact.shape)}"
    wrong = (result != exact) | result.isnan()
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ; the first at [{row}, {column}]: "
        f"{result[row, column].item()}, expected {exact[row, column].item()}"
    )
