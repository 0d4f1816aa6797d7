"""What commands share: options, output, usage errors."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType

from outblas.base import shapes
from outblas.base.filesystems import replacing
from outblas.base.ownership import shown
from outblas.base.shapes import Shape
from outblas.base.terminal import printable as printable
from outblas.cli import tables

if TYPE_CHECKING:
    import torch

    from outblas.base.registry import Kernel

NO_GPU = 3  # exit code of commands that have nothing to measure on
NONE = "–"

parse_shapes = shapes.parse

SHAPES_HELP = (
    "Shapes, comma-separated: N for N×N×N, MxNxK, suite, grid (60 shapes), decode and prefill "
    "(layers of language models; decode:MODEL for one model), or deepgemm (those of DeepSeek-V3)."
)
ShapesOption = Annotated[str, typer.Option(help=SHAPES_HELP)]
LayoutOption = Annotated[
    str,
    typer.Option(help="nt, nn, tn or tt: how A and B are stored, n row-major, t transposed."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
SaveOption = Annotated[Path | None, typer.Option(help="Write the JSON to a file.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")]
ChartOption = Annotated[
    Path | None, typer.Option(help="Draw a chart to a .png, .svg or .pdf file.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", help="The file with the results. Default: tuning.sqlite in the cache directory."
    ),
]

PIPED_WIDTH = 140  # where no terminal and no COLUMNS says how wide a line may be
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)


# ---- output
def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def give(value: Any, show: Callable[[], None], *, json: bool, save: Path | None = None) -> None:
    """Writes the value to the file if there is one, and prints it as JSON or else shows it."""
    if save is not None:
        save_json(save, value)
    if json:
        print_json(value)
    else:
        show()


def save_json(path: Path, value: Any) -> None:
    """Writes indented JSON. The file is replaced at once: whoever is interrupted leaves the old one
    or the new one.
    """
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that have a value: readers take a missing figure for null."""
    return {name: value for name, value in record.items() if value is not None}


def note(text: str, style: str | None = "dim", *, highlight: bool | None = None) -> None:
    """A line beside the tables, as it is, with control characters as escapes."""
    console.print(printable(text, keep="\n"), markup=False, highlight=highlight, style=style)


def say(text: object, *, err: bool = False) -> None:
    """A line that may have names in it which others chose."""
    typer.echo(printable(str(text), keep="\n"), err=err)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table; cells are shown as they are, not as markup."""
    console.print(make_table(title, columns, rows))


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]
) -> RenderableType:
    """A table as wide as the terminal allows."""
    return tables.make_table(title, columns, rows, console.width)


def number_of(count: int, noun: str) -> str:
    """Returns a count and what is counted: "1 compiled kernel", "2 compiled kernels"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    """The value times `scale` in a format such as ".3f"; a dash where nothing was measured."""
    return NONE if value is None else format(value * scale, form)


# ---- errors of usage
# Parameters of the library that are options of the same name and meaning.
_OPTIONS = {
    *("address", "arch", "budget", "config", "dtype", "engine", "epilogue", "gpus", "layout"),
    *("out_dtype", "shapes", "sms", "store", "strategy", "top_k", "trials"),
}


@contextmanager
def usage_errors(
    *others: type[Exception], options: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A ValueError, an error of another kind named, and a path that is too long are of usage: one
    line, exit code 2.

    Where the message begins with a parameter of the library, it is given the name of its option: in
    `options` are those of this command besides `_OPTIONS`.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        message = _by_option(str(error), options or {})
        raise typer.BadParameter(printable(message, keep="\n")) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise typer.BadParameter(f"{shown(error.filename)}: {error.strerror}") from None


def _by_option(message: str, options: Mapping[str, str]) -> str:
    """`gpus is '9', ...` as `--gpus is '9', ...`."""
    names = {name: f"--{name.replace('_', '-')}" for name in _OPTIONS} | dict(options)
    return re.sub(r"^(\w+)(?= (is|has) )", lambda name: names.get(name[1], name[1]), message)


def check_length(path: Path) -> None:
    """Raises OSError for a path that is longer than the system allows; `Path.exists` and its like
    say of such a path that it is not there.
    """
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise


def check_writable(path: Path | None, option: str = "--save") -> None:
    """Raises ValueError for a file that could not be written once the work is done, and OSError for
    a path that is too long.
    """
    if path is None:
        return
    check_length(path)
    if path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(
            f"{option} is {str(path)!r}, expected a file in a folder that exists and is writable"
        )


def check_files(save: Path | None, html: Path | None, chart: Path | None) -> None:
    """The same of all three, and of charts that could not be drawn."""
    from outblas.bench.plotting import check_chart

    for path, option in ((save, "--save"), (html, "--html"), (chart, "--chart")):
        check_writable(path, option)
    check_chart(chart)
    if html is not None:
        check_chart(html.with_suffix(".svg"), "--html")


def check_given(option: str, value: str | None) -> None:
    """Raises ValueError for an option that is there and empty, as an unset variable of a shell
    makes it.
    """
    if value is not None and not split(value):
        raise ValueError(f"{option} is {value!r}, expected a value, or no {option}")


def one_shape(text: str, *, least: int = 1) -> Shape:
    """The shape that --shapes is. Raises ValueError for none and for several."""
    sizes = parse_shapes(text, least=least)
    if len(sizes) != 1:
        raise ValueError(f"--shapes is {text!r}, expected one shape")
    return sizes[0]


def check_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError."""
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}, expected one of {', '.join(allowed)}")


def check_runs(kernel: Kernel, device: torch.device) -> None:
    """Raises ValueError for a kernel that the device rules out."""
    from outblas.call import launcher

    if reason := launcher.unsupported_device_reason(kernel, device):
        raise ValueError(f"kernel {kernel.name!r} {reason}")


def check_dtype(dtype: str, kernel: str, dtypes: Sequence[str]) -> None:
    """Raises ValueError for operands that a kernel does not take."""
    if dtype not in dtypes:
        raise ValueError(f"--dtype is {dtype!r}, expected {' or '.join(dtypes)} for {kernel}")


def split(text: str) -> list[str]:
    """A comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]
