"""How `make docs` builds the site: pages and notebooks of the repository, without network.

Notebooks have their outputs, which the site shows; the tests run them.
"""

project = "fedjaxsim"
author = copyright = "The fedjaxsim authors"
root_doc = "index"
include_patterns = [
    "[iR]*.md", "[CS]*.md", "docs/**", "notebooks/**", "*/*/README.md", "experiments/*.md",
    "benchmarks/*.md",
]  # fmt: skip
exclude_patterns = [".venv", "build"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "sphinx_book_theme"
html_title = "fedjaxsim"
# The search of the sidebar is the only one.
html_theme_options = {"show_toc_level": 2, "navbar_persistent": []}
html_static_path = ["site"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
nb_execution_mode = "off"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
