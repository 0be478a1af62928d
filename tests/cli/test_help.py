"""What ``--help`` shows of each command: every option once, in the section that it belongs to."""

import re

import click
import pytest
from click.testing import CliRunner

from optimize.cli import COMMANDS, cli


def _help(command: click.Command) -> str:
    return CliRunner().invoke(cli, [str(command.name), "--help"], env={"COLUMNS": "80"}, catch_exceptions=False).output


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_option_stands_once_in_a_section_and_nothing_is_wider_than_the_terminal(command: click.Command) -> None:
    text = _help(command)
    sections = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)
    assert "Options" not in sections[1::2] and sections[-2] == "Output"
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", "".join(sections[2::2]), re.MULTILINE)
    assert sorted(listed) == sorted(set(listed)) and "--help" in listed
    shown = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert len(listed) == len(shown) + 1  # and --help
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_that_takes_a_model_takes_what_opening_it_asks_for(command: click.Command) -> None:
    """Refusals say --model, --trust and --input-shape, whichever command meets the file."""
    options = {name for entry in command.params for name in entry.opts}
    takes_model = any(isinstance(entry, click.Argument) for entry in command.params)
    assert {"--model", "--trust", "--input-shape"} <= options or not takes_model
    assert {"--mean", "--std"} <= options or "--preprocess" not in options


def test_what_belongs_together_stands_together() -> None:
    (run,) = (command for command in COMMANDS if command.name == "run")
    sections = re.findall(r"^(\w+):\n((?:  .*\n?)+)", _help(run), flags=re.MULTILINE)
    assert [name for name, _ in sections] == ["Model", "Data", "Passes", "Targets", "Judgement", "Timing", "Output"]
    told = dict(sections)
    for name, members in {
        "Data": "--calib --eval --mean",
        "Passes": "--int8 --keep",
        "Judgement": "--max-drop",
    }.items():
        assert all(f"  {member} " in told[name] for member in members.split())


def test_what_each_command_does_is_read_in_a_line() -> None:
    text = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "80"}, catch_exceptions=False).output
    lines = text.split("Commands:\n")[1].splitlines()
    assert len(lines) == len(COMMANDS) and not any(line.endswith("...") or len(line) > 80 for line in lines)
