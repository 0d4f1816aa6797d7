"""The command line, as tests run it."""

from typer.testing import CliRunner, Result

from outblas.cli import app


def invoke(*arguments: object, code: int | None = None) -> Result:
    """With this exit code, if one is given."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert code is None or done.exit_code == code, done.output
    return done


def refuses(message: str, *arguments: object, code: int = 2) -> Result:
    """By default as an error of usage, however the box breaks the message."""
    done = invoke(*arguments, code=code)
    assert squeezed(message) in squeezed(done.stderr.replace("│", ""))
    assert "Traceback" not in done.stderr
    return done


def squeezed(text: str) -> str:
    """A text without white space, however a terminal breaks it."""
    return "".join(text.split())
