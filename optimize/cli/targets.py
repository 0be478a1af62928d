"""``optimize targets``: the backends, what each supports, and what can be used here."""

from __future__ import annotations

from optimize.cli import options


@options.command("targets")
def list_targets() -> None:
    """List the targets: whether each can be used here, its version, what it supports, and what to install."""
    from optimize import registry
    from optimize.report.listings import listed, target_record, tell_targets

    targets = registry.targets()
    options.tell(tell_targets(targets), lambda: listed(map(target_record, targets.values()), options.command_line()))
