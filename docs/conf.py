"""The documentation site: `python -m sphinx -W docs site` writes it into site/, and any warning is an error.

Sphinx, MyST and Furo come with `pip install '.[docs]'`. The pages are Markdown as GitHub shows them; docs/api/ is made
from docstrings.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import rpg_jax  # noqa: E402

project = "rpg_jax"
author = "The rpg_jax authors"
version = release = rpg_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["tables/data/*.json*", "log/*"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_dmath_allow_digits = False  # $10,200 is money, as on GitHub
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "member-order": "bysource", "no-value": True}
suppress_warnings = ["ref.python"]  # a word of a docstring that several classes have as a field
autodoc_typehints = "none"  # the docstrings say dtype and shape; signatures keep their names and defaults
default_role = "code"  # docstrings put names into single backticks, as Markdown does

html_theme = "furo"
html_title = f"rpg_jax {release}"
html_static_path = ["style"]
html_css_files = ["wide_tables.css"]
html_show_sphinx = False


def as_rest(app, what, name, obj, options, lines):
    """Docstrings are plain text with `names`, and indented tables.

    A table becomes a literal block, and what reStructuredText would take for its own markup is escaped.
    """
    made, literal = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith("    ")
        if indented and not before and next((above for above in reversed(made) if above), " ")[0] != " ":
            made += ["::", ""]
            literal = True
        literal = literal and (indented or not line)
        if not literal:
            parts = re.split(r"(`[^`]*`)", line)
            parts[::2] = [re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
            line = "".join(parts)
        made.append(line)
    lines[:] = made


def skipped(app, what, name, obj, skip, options):
    """The fields of a named tuple have no docstrings but Python's "Alias for field number"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def out_of_the_site(app, docname, source):
    """README.md and CONTRIBUTING.md at the top of the repository, and the log, are no pages of the site.

    A link gives the file; a place in the file, after #, works on GitHub alone.
    """
    source[0] = re.sub(r"\]\((\.\./[A-Z]+\.md|(?:\.\./)?log/[\w-]+\.md)(?:#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app):
    app.connect("source-read", out_of_the_site)
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon, at 500
