"""The command line, as tests run it."""

from typer.testing import CliRunner

from outblas.cli import app


def invoke(*arguments, code=None):
    """With this exit code, if one is given."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert code is None or done.exit_code == code, done.output
    return done


def refuses(message, *arguments, code=2) -> None:
    """By default as an error of usage, however the box breaks the message."""
    said = invoke(*arguments, code=code).stderr.replace("│", "")
    assert "".join(message.split()) in "".join(said.split())
