"""The command `outblas`."""

import typer

from . import (
    bench,
    bench_host,
    cache,
    demo,
    doctor,
    inspect,
    listing,
    profile,
    report,
    report_tune,
    tune,
    verify,
)

app = typer.Typer(
    name="outblas",
    help="GEMM kernels in Python DSLs, checked and measured against cuBLAS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("list")(listing.list_kernels)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("bench-host")(bench_host.bench_host)
app.command("profile")(profile.profile)
app.command("inspect")(inspect.inspect)
app.command("tune")(tune.tune)
report.app.command("tune")(report_tune.tune)
app.add_typer(cache.app, name="cache")
app.add_typer(report.app, name="report")
