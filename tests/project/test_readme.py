"""The README's examples of a PyTorch program run as they stand."""

import re
from typing import Any

import pytest
from support.paths import ROOT

README = ROOT / "README.md"


@pytest.mark.filterwarnings("ignore")
def test_examples_of_a_pytorch_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what offers Inductor a choice for good."""
    import outblas

    monkeypatch.setattr(outblas, "inductor_choice", lambda: None)
    section = (
        README.read_text(encoding="utf-8").split("## In a PyTorch program")[1].split("\n## ")[0]
    )
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert names["pre"].isfinite().all()
