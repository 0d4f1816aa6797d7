"""What .ci/run runs."""

from support.paths import ROOT

MARKERS = ("mark.oldest_triton", "mark.versions")


def test_the_step_of_the_oldest_triton_names_every_file_that_has_tests_for_it() -> None:
    named = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.name != "test_ci.py"
        and any(marker in path.read_text(encoding="utf-8") for marker in MARKERS)
    ]

    assert marked, "no test is marked"
    assert [path for path in marked if path not in named] == []
