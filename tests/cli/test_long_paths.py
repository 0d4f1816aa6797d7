"""A path that is longer than the system allows is an error of usage, before any work is done."""

import pytest
from support import commands

LONG = "/" + "a" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("cache", "ls", "--store", LONG), id="a store to read"),
        pytest.param(("tune", "--store", LONG, "--dry-run"), id="a store to write"),
        pytest.param(("report", "tune", "--store", LONG), id="a store to report on"),
        pytest.param(
            ("verify", "portable", "--shapes", "16", "--save", LONG), id="a file to write"
        ),
        pytest.param(("report", "roofline", "--html", LONG), id="a page to write"),
    ],
)
def test_a_path_that_is_too_long_is_an_error_of_usage(arguments: tuple[str, ...]) -> None:
    done = commands.invoke(*arguments, code=2)

    assert "File name too long" in done.output
    assert LONG[:1000] not in done.output
