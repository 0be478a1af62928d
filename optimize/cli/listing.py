"""``optimize passes`` and ``optimize targets``: what there is, and what can be used here."""

from __future__ import annotations

import click


@click.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize import registry
    from optimize.report.console import show_passes

    show_passes(registry.passes())


@click.command("targets")
def list_targets() -> None:
    """List the targets, whether each can be used here, and what to install."""
    from optimize import registry
    from optimize.report.console import show_targets

    show_targets(registry.targets())
