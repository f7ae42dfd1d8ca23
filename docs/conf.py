"""The site: English by default, Chinese with `-D language=zh_CN`; `make docs` builds both."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "src")]

from pygments.lexers.special import TextLexer  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from stretto.versions import __version__  # noqa: E402

project = "Stretto"
author = "the authors of Stretto"
copyright = f"{author}, Apache License 2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinxcontrib.typer",
    "sphinx_llms_txt",
    # in _extensions
    "chinese_search",
    "docstrings",
    "live",
    "mathml",
    "predict",
    "repository_links",
]
exclude_patterns = ["_*"]

# Markdown as GitHub renders it, with formulas and directives
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
html_math_renderer = "mathml"
# a block without a language is what a command prints
highlight_language = "none"

# docstrings are prose with literals in single backticks
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False

language = "en"
locale_dirs = ["locale"]
gettext_compact = False
gettext_uuid = False
gettext_location = False

html_theme = "furo"
html_title = "Stretto"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sphinx = False
html_copy_source = True
napoleon_use_ivar = True
html_theme_options = {"top_of_page_buttons": ["view"]}

llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"
llms_txt_summary = "Plan, draw, prove and run hybrid-parallel training of large models on PyTorch."


def setup(app: Sphinx) -> None:
    app.add_lexer("csv", TextLexer)
    # a list of pages names some in their order and ends with all others, of which there may be none
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(
        lambda record: "didn't match any documents" not in str(record.msg)
    )
