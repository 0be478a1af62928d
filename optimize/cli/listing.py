"""``optimize passes``: what there is."""

from __future__ import annotations

from optimize.cli import options


@options.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize import registry
    from optimize.report.listings import listed, pass_record, tell_passes

    passes = registry.passes()
    records = (pass_record(name, entry) for name, entry in passes.items())
    options.tell(tell_passes(passes), lambda: listed(records, options.command_line()))
