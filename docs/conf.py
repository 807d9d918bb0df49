"""Configuration of the documentation's site: `make docs` builds it offline, and every warning is an error."""

import datetime
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# The site documents the package of this checkout; on the machine that builds it JAX needs no accelerator.
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import orbax_t5x

project = "orbax-t5x"
author = "The orbax-t5x authors"
copyright = f"{datetime.date.today().year}, {author}"
release = version = orbax_t5x.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "docstrings",
    "labels",
    "scripts",
]
exclude_patterns = ["_ext", "_build"]
# A reference that leads nowhere is a warning, and so an error.
nitpicky = False
show_warning_types = True

# Markdown. Every heading has an anchor, of GitHub's form, so that a link works there and here.
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are executed by the tests; the site shows their stored outputs.
nb_execution_mode = "off"

# Docstrings are Google's form, with Markdown's backticks (docs/_ext/docstrings.py).
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
napoleon_preprocess_types = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "orbax-t5x"
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "sbt-sidebar-nav.html"]}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_domain_indices = False
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
# What a reader copies is the input, never an output.
copybutton_selector = "div:not(.highlight-output):not(.highlight-text) > div.highlight > pre"
