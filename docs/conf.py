"""Settings of Sphinx for these pages: `make docs` builds them into build/html."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import torch
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

import outblas.cli  # noqa: E402 (which `typer` looks for as an attribute)
from outblas.torch_ops.schema import SCHEMAS  # noqa: E402

project = "outblas"
author = "The outblas contributors"
project_copyright = "The outblas contributors"
version = release = outblas.__version__

extensions = [
    "myst_nb",
    "rungs",  # of _ext/
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxcontrib.typer",
]
exclude_patterns = ["_build"]
default_role = "py:obj"  # of docstrings: `outblas.matmul` links to it, and other names are code
suppress_warnings = ["config.cache"]

# Pages are Markdown. Headings get anchors, so that `page.md#heading` works here as on GitHub.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test runs the notebook; its page shows the outputs stored in it

# Docstrings are in Google style, and types stand in the signature.
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of dataclasses in a list: autodoc documents no member twice
python_display_short_literal_types = True
maximum_signature_line_length = 88  # longer ones have a line for each parameter
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

# References into other projects are looked up where there is a network; without one they stay text.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
intersphinx_timeout = 5
if "offline" in tags:  # type: ignore[name-defined]  # noqa: F821 (Sphinx defines it)
    intersphinx_mapping = {}

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "outblas"
html_static_path = ["_static"]
html_css_files = ["outblas.css"]
html_copy_source = False
linkcheck_anchors = False

# Links that leave docs/, such as ../WORKLOG.md, lead to the repository. On GitHub they work as is.
# Pictures are left alone: Sphinx copies them from where they lie.
REPOSITORY = "https://github.com/outblas/outblas"
_LINK = re.compile(
    r"(?P<picture>!\[[^\]]*)?(?P<before>\]\()(?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?(?=\))"
)


def _to_repository(page: Path, link: re.Match[str]) -> str:
    """A link of a page, with an address in the repository where its file lies outside docs/."""
    target = (page.parent / link["path"]).resolve()
    if link["picture"] or target.is_relative_to(HERE) or not target.exists():
        return link[0]  # Sphinx finds the first two, and warns of the third
    kind = "tree" if target.is_dir() else "blob"
    path = target.relative_to(HERE.parent).as_posix()
    return f"{link['before']}{REPOSITORY}/{kind}/main/{path}{link['anchor'] or ''}"


def _on_source_read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md":
        source[0] = _LINK.sub(lambda link: _to_repository(page, link), source[0])
    if name == "reference/api":
        schemas = (getattr(torch.ops.outblas, name).default._schema for name in SCHEMAS)
        listed = "\n".join(f"- `{str(schema).removeprefix('outblas::')}`" for schema in schemas)
        source[0] = source[0].replace("<!-- operators -->", listed)
    if name == "decisions/README":  # which GitHub shows too, as the page of its folder
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def _copy_sample_report(app: Sphinx, error: Exception | None) -> None:
    """The sample report lies beside the page that links to it, as it does in docs/."""
    if error is None and app.builder.format == "html":
        name = "tuning/sample-report.html"
        shutil.copyfile(HERE / name, Path(app.outdir) / name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _on_source_read)
    app.connect("build-finished", _copy_sample_report)
