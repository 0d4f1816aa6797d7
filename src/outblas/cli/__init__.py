"""The command `outblas`."""

import inspect as python_inspect
from typing import Annotated

import typer

from outblas import __version__
from outblas.cli import (
    bench,
    cache,
    demo,
    doctor,
    inspect,
    listing,
    pack,
    tune,
    verify,
)
from outblas.cli.examples import epilog

app = typer.Typer(
    name="outblas",
    epilog=epilog(""),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outblas {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """GEMM kernels in Python DSLs, checked and measured against cuBLAS."""


app.command("demo")(demo.demo)
app.command("list")(listing.list_kernels)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("inspect")(inspect.inspect)
app.command("tune")(tune.tune)
app.add_typer(cache.app, name="cache")
app.add_typer(pack.app, name="pack")


def _give_help(commands: typer.Typer, prefix: str = "") -> None:
    """Lets the help of every command be its docstring, which the terminal may wrap anywhere, and
    end with its examples.
    """
    for command in commands.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        paragraphs = (python_inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(part.split()) for part in paragraphs)
        command.epilog = epilog(prefix + name)


_give_help(app)
_give_help(cache.app, "cache ")
_give_help(pack.app, "pack ")
