"""How `make docs` builds the site: pages and notebooks of the repository, without network."""

project = "fedjaxsim"
author = copyright = "The fedjaxsim authors"
root_doc = "docs/index"
include_patterns = ["README.md", "C*.md", "docs/**", "notebooks/**", "benchmarks/peers/README.md"]
exclude_patterns = [".venv", "build"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "sphinx_book_theme"
html_title = "fedjaxsim"
html_theme_options = {"show_toc_level": 2}
myst_heading_anchors = 3
nb_execution_mode = "off"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
