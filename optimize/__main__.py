"""``python -m optimize`` is the ``optimize`` command: neither imports what lies by chance in the current folder."""

import contextlib
import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with contextlib.suppress(FileNotFoundError):  # the folder is gone, as ``main`` says
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [_HOME]:
        del sys.path[0]  # which ``python -m`` has put there; ``named.find`` looks there for what the user names

from optimize.cli import main  # noqa: E402

main()
