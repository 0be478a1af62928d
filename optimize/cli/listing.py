"""``optimize passes``: what there is."""

from __future__ import annotations

from optimize.cli import options


@options.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize import registry
    from optimize.report.console import show
    from optimize.report.listings import tell_passes

    show(tell_passes(registry.passes()))
