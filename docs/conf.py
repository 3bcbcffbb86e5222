"""How Sphinx builds the site: `make docs`.

Sources are the Markdown files of the whole repository, where they are: links between them work on the site as they do
in the repository. The theme, Furo, asks no other server for anything; the search needs no server at all.
"""

import logging

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import drawbar

project = "drawbar"
copyright = "the authors of drawbar"
release = version = drawbar.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    *("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("docs/**.md", "configs/**.md", "examples/*/README.md", "benchmarks/README.md"),
]
exclude_patterns = [".venv", ".git", "build", "dist", "runs", "src", "tests", "tools", "containers", "**/__pycache__"]

myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "drawbar"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["drawbar.css"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    app.add_lexer("output", TextLexer)  # the mark of what a command prints: see tests/docs/pages.py
    # the navigation has patterns for folders that need not be there
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda record: "glob pattern" not in str(record.msg))
