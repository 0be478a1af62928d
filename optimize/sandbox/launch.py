"""Starts another program of this package with its files confined: ``python -m optimize.sandbox.launch FOLDER MODULE``.

It comes first so that the process has one thread when it gives up its rights; the rest of them it gives up itself, when
its libraries are imported (`confine`).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from optimize.sandbox.confine import confine_files, end_with_parent


def main(folder: str, module: str) -> None:
    """Confine this process to a folder and run a module as its program."""
    end_with_parent()
    confine_files(Path(folder))
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
