"""``python -m optimize`` is the ``optimize`` command."""

from optimize.cli import main

main()
