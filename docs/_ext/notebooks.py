"""The Sphinx extension that executes notebooks: the tree holds them without outputs, the site shows them with.

Each is executed whenever its page is read, in a kernel and a folder of its own, from which the repository's ``models/``
is where it is from ``docs/notebooks``. A cell that fails ends the build.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from sphinx.application import Sphinx
from traitlets.config import Config

_ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a cell may take.
_LIMIT_S = 300


def execute(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a notebook's outputs, and a link to the notebook without them, on its page."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    notebook = nbformat.reads(source[0], as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / path.parent.relative_to(_ROOT)
        place.mkdir(parents=True)
        (Path(folder) / "models").symlink_to(_ROOT / "models")
        kernel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}  # no port is opened
        client = NotebookClient(
            notebook,
            timeout=_LIMIT_S,
            resources={"metadata": {"path": str(place)}},
            config=Config(KernelManager=kernel),
        )
        client.execute(env={**os.environ, "PYTHONPATH": str(_ROOT)})
    link = f"{{download}}`Download this notebook <{path.name}>`."
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(link))
    source[0] = nbformat.writes(notebook)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    logging.getLogger("traitlets").setLevel(logging.WARNING)  # a build tells what is wrong alone
    app.connect("source-read", execute)
    return {"parallel_read_safe": True}
