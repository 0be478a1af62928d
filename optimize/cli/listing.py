"""``optimize passes`` and ``optimize targets``: what there is, what each supports, and what can be used here."""

from __future__ import annotations

import click

from optimize.cli import options
from optimize.escaping import plain, shortened


@options.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize.registry import passes
    from optimize.report.listings import listed, pass_record, tell_passes

    found = passes()
    options.tell(tell_passes(found), lambda: listed(map(pass_record, found.values()), options.command_line()))
    _tell_broken("passes")


@options.command("targets", short_help="List the targets, and what to install for each.")
def list_targets() -> None:
    """List the targets: whether each can be used here, its version, what it supports, and what to install."""
    from optimize.registry import targets
    from optimize.report.listings import listed, target_record, tell_targets

    found = targets()
    options.tell(tell_targets(found), lambda: listed(map(target_record, found.values()), options.command_line()))
    _tell_broken("targets")


def _tell_broken(what: str) -> None:
    """Say which of other packages cannot be imported and are not in the list; beside JSON on standard error."""
    from optimize.registry import broken

    for sentence in broken(what):
        click.echo(shortened(plain(sentence)), err=options.is_printed())
