"""``optimize passes`` and ``optimize targets``: what there is, what each supports, and what can be used here."""

from __future__ import annotations

from optimize.cli import options


@options.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize.registry import passes
    from optimize.report.listings import listed, pass_record, tell_passes

    found = passes()
    options.tell(tell_passes(found), lambda: listed(map(pass_record, found.values()), options.command_line()))


@options.command("targets")
def list_targets() -> None:
    """List the targets: whether each can be used here, its version, what it supports, and what to install."""
    from optimize.registry import targets
    from optimize.report.listings import listed, target_record, tell_targets

    found = targets()
    options.tell(tell_targets(found), lambda: listed(map(target_record, found.values()), options.command_line()))
