"""The command line, as tests run it."""

from typer.testing import CliRunner, Result

from outblas.cli import app


def invoke(*arguments: object, code: int | None = None) -> Result:
    """With this exit code, if one is given."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert code is None or done.exit_code == code, done.output
    return done


def refuses(message: str, *arguments: object, code: int = 2) -> None:
    """By default as an error of usage, however the box breaks the message."""
    done = invoke(*arguments, code=code)
    said = done.stderr.replace("│", "")
    assert "".join(message.split()) in "".join(said.split())
    assert "Traceback" not in said
