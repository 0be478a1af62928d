"""What the terminal gets: hostile names made visible, bars only where somebody watches."""

import io
from typing import cast

from rich.console import Console

import optimize
from optimize.report import console
from optimize.report.model import Report, Row
from optimize.targets.base import Availability, Target


def test_markup_and_control_characters_in_names_do_nothing(report: Report) -> None:
    row = Row(target="on[red]nx\x1b[2J", status="failed", reason="[bold]died\x07")
    output = io.StringIO()
    console.show(report.model_copy(update={"rows": (row,), "trace": ()}), console=Console(file=output, width=120))
    assert "on[red]nx�[2J float32 – failed: [bold]died�" in output.getvalue()
    assert "\x1b" not in output.getvalue()


def test_phases_show_a_bar_each_on_a_terminal() -> None:
    output = io.StringIO()
    with console.Phases(console=Console(file=output, force_terminal=True, width=80)) as phases:
        phases.update("load", 0.0)
        phases.update("measure", 0.5)
    assert "load" in output.getvalue() and "measure" in output.getvalue()


def test_phases_are_silent_off_a_terminal_and_when_quiet() -> None:
    for terminal, quiet in ((False, False), (True, True)):
        output = io.StringIO()
        with console.Phases(quiet=quiet, console=Console(file=output, force_terminal=terminal)) as phases:
            phases.update("load", 1.0)
        assert output.getvalue() == ""


def test_passes_are_listed_with_their_promise() -> None:
    output = io.StringIO()
    console.show_passes({"FuseConvBN": optimize.FuseConvBN}, console=Console(file=output, width=200))
    row = output.getvalue().splitlines()[2]
    assert row.split()[:3] == ["FuseConvBN", "graph", "exact"] and optimize.FuseConvBN.summary() in row


def test_targets_are_listed_with_what_is_missing() -> None:
    class Absent:
        summary = "A backend of another machine."

        def available(self) -> Availability:
            return Availability(export=True, run=False, reason="no GPU", install="pip install gpu")

    output = io.StringIO()
    targets = cast(dict[str, Target], {"absent": Absent()})
    console.show_targets(targets, console=Console(file=output, width=100))
    assert output.getvalue().splitlines()[2].split()[:3] == ["absent", "yes", "no"]
    assert "no GPU; pip install gpu" in output.getvalue()
