"""How Sphinx builds the site; ``sphinx-build -W --keep-going -b html docs OUT``, without a network."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "_ext")]

import optimize  # noqa: E402

project = "optimize"
author = "the authors of optimize"
release = version = optimize.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated", "notebooks"]
exclude_patterns = ["_ext", "_build"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
root_doc = "index"

# Notebooks come executed, by docs/_ext/notebooks.py.
nb_execution_mode = "off"

# Headings are linked to as on a forge.
myst_heading_anchors = 4
# Options keep their two hyphens, and text its plain quotes.
smartquotes = False

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"optimize {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False
html_permalinks_icon = "#"
