"""``optimize targets``: a table that a narrow terminal shows, and records for scripts."""

import json
from dataclasses import dataclass
from typing import cast

import pytest
from click.testing import CliRunner

from optimize import registry
from optimize.cli.listing import list_targets
from optimize.report.listings import target_record, tell_targets
from optimize.targets.base import Availability, Support, Target
from optimize.targets.eager import Eager
from tests.report.test_golden import on_console
from tests.test_cli import Typed

GOLDEN = """\
Target     Here     What it is
────────────────────────────────────────────────────────────────────────────────
openvino   writes   Runs on CPU
           runs     float32, bfloat16, int8, int8-bfloat16
                    free: batch, height, width. Needs AMX.
                    options: hint, cache
                    openvino 2026.4.1, torch 2.13.0

tensorrt   writes   Engines
                    float32, int8, int8-dynamic, int8-weights, int8-float16,
                    int8-bfloat16
                    free: batch
                    nothing installed
                    no GPU
                    pip install tensorrt
"""


@dataclass(frozen=True)
class Present:
    hint: str = "latency"
    cache: str = ""

    name = "openvino"
    suffix = ".xml"
    summary = "Runs on CPU."
    support = Support(("float32", "bfloat16"), ("static",), ("bfloat16",), remark="Needs AMX.")

    def available(self) -> Availability:
        return Availability(export=True, run=True, version={"openvino": "2026.4.1", "torch": "2.13.0"})


class Absent:
    name = "tensorrt"
    suffix = ".engine"
    summary = "Engines"
    support = Support(int8=("static", "dynamic", "weights"), mixed=("float16", "bfloat16"), free="batch")

    def available(self) -> Availability:
        return Availability(export=True, run=False, reason="no GPU", install="pip install tensorrt")


STANDINS = cast(dict[str, Target], {"openvino": Present(), "tensorrt": Absent()})


def test_the_table_fits_80_columns() -> None:
    assert on_console(tell_targets(STANDINS), 80) == GOLDEN


def test_a_record_says_all_that_the_table_says() -> None:
    record = target_record(STANDINS["tensorrt"])
    assert (record["writes"], record["runs"]) == (True, False)
    assert (record["reason"], record["install"]) == ("no GPU", "pip install tensorrt")
    assert record["int8"] == ["static", "dynamic", "weights"] and record["mixed"] == ["float16", "bfloat16"]
    assert target_record(STANDINS["openvino"])["options"] == ["hint", "cache"]
    assert json.loads(json.dumps(record)) == record


def test_every_target_says_what_it_supports() -> None:
    assert all(target.support.floats for target in registry.targets().values())


def test_nothing_is_wider_than_the_terminal_for_the_real_targets() -> None:
    text = on_console(tell_targets(registry.targets()), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in registry.targets())


def test_a_target_of_another_package_is_listed_with_what_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_targets", dict(registry.targets()))  # what is registered now goes with the test

    @registry.register_target
    class Foreign(Eager):
        """Registered outside this package."""

        name = "foreign"
        suffix = ".foreign"
        summary = "Runs elsewhere"
        support = Target.support

    done = [CliRunner().invoke(list_targets, words, catch_exceptions=False) for words in ([], ["--json"])]
    shown, records = done[0].stdout, json.loads(done[1].stdout)["found"]
    assert shown.rstrip().splitlines()[-4].split() == ["foreign", "writes", "Runs", "elsewhere"]
    assert "precisions unknown" in shown and "free: unknown" in shown
    assert records[-1]["name"] == "foreign" and records[-1]["free_dimensions"] == "unknown"
    assert (records[-1]["floats"], records[-1]["int8"], records[-1]["mixed"]) == ([], [], [])
    assert len(records) == len(registry.targets())


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_command_lists_all(words: list[str], typed: Typed) -> None:
    done = typed("targets", *words)
    assert done.returncode == 0, done.stderr
    found = {record["name"] for record in json.loads(done.stdout)["found"]} if words else done.stdout
    assert all(name in found for name in registry.targets())
