"""``optimize targets``: the backends, what each supports, and what can be used here."""

from __future__ import annotations

import json

import click

from optimize.cli import options


@options.command("targets")
@options.output("--json", "as_json", is_flag=True, help="Print records instead of the table.")
def list_targets(as_json: bool) -> None:
    """List the targets: whether each can be used here, its version, what it supports, and what to install."""
    from optimize import registry
    from optimize.report.console import show
    from optimize.report.listings import target_record, tell_targets

    targets = registry.targets()
    if as_json:
        click.echo(json.dumps([target_record(target) for target in targets.values()], indent=2))
    else:
        show(tell_targets(targets))
