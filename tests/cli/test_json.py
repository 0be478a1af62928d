"""``--json`` and the words that several commands share: one shape of record, one name a thing, old names as before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import click
import pytest
import torch

import optimize
from optimize.cli import COMMANDS
from tests.test_cli import NET, net

Typed = Callable[..., CompletedProcess[str]]
HEAD = ("schema_version", "created", "command", "files", "environment")
SHORT = ("--max-seconds", "0.5", "--min-sqnr", "0")
PAIR = ("base.onnx", "other.onnx")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files of one small net."""
    folder = tmp_path_factory.mktemp("pair")
    program = optimize.capture(net(), (torch.zeros(1, 3, 16, 16),))
    for name in PAIR:
        optimize.export(program, "onnx", folder / name)
    return folder


@pytest.fixture
def folder(pair: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(pair, tmp_path / "pair"))


@pytest.mark.parametrize(
    "words",
    [
        ("run", *NET, "--to", "torchscript", "--out", "out"),
        ("bench", *PAIR, "--runs", "2", "--restarts", "1", "--out", "out"),
        ("check", *PAIR, *SHORT),
        ("compare", *PAIR),
        ("profile", *NET),
        ("advise", *NET, "--no-try"),
        ("show", *NET),
        ("passes",),
        ("targets",),
    ],
    ids=lambda words: words[0],
)
def test_every_record_has_one_head_and_stands_alone_on_standard_output(
    words: tuple[str, ...], folder: Path, typed: Typed
) -> None:
    done = typed(*words, "--json", "-", "--quiet", cwd=folder)
    record = json.loads(done.stdout)
    assert set(HEAD) <= set(record) and record["schema_version"] == 1 and record["command"].startswith("optimize ")
    assert record["environment"]["versions"]["torch"] and isinstance(record["created"], str)
    read = [word for word in words if word in (*PAIR, NET[0])]
    assert [Path(name).name for name in record["files"]] == read


def test_a_record_does_not_replace_what_it_is_made_from(folder: Path, typed: Typed) -> None:
    before = (folder / PAIR[0]).read_bytes()
    done = typed("compare", *PAIR, "--json", PAIR[0], cwd=folder)
    assert done.returncode == 2 and "is named twice" in done.stderr
    assert (folder / PAIR[0]).read_bytes() == before


def test_a_record_replaces_records_alone(folder: Path, typed: Typed) -> None:
    """Weights, pictures and data may be read without being words of the line."""
    (folder / "net.bin").write_bytes(b"\x01weights")
    done = typed("compare", *PAIR, "--json", "net.bin", cwd=folder)
    assert done.returncode == 1 and "'net.bin' is no result of a command, and would be written over" in done.stderr
    assert (folder / "net.bin").read_bytes() == b"\x01weights"
    for text in (None, "", '{\n\t"schema_version": 1}'):  # no file, an empty one, one that a formatter put in order
        if text is not None:
            (folder / "d.json").write_text(text)
        done = typed("compare", *PAIR, "--json", "d.json", "-q", cwd=folder)
        assert done.returncode == 0 and "Outputs" in done.stdout
        assert json.loads((folder / "d.json").read_text())["files"] == list(PAIR)


def test_a_baseline_of_the_gate_is_kept(folder: Path, typed: Typed) -> None:
    (folder / "kept.json").write_text(text := '{\n "schema_version": 1,\n "name": "net"\n}\n')
    for words in (("compare", *PAIR, "--json"), ("check", *PAIR, "--junit")):
        done = typed(*words, "kept.json", cwd=folder)
        assert "'kept.json' is a baseline of the gate, and would be written over" in done.stderr, done.stderr
    assert (folder / "kept.json").read_text() == text
    done = typed("check", *PAIR, "--save-baseline", "-", cwd=folder)
    assert done.returncode == 2 and "'-' stands for no file here" in done.stderr


def test_pages_and_drawings_of_somebody_else_are_not_replaced(folder: Path, typed: Typed) -> None:
    for name, text in (("page.html", "<!doctype html>\n<html><body>mine"), ("logo.svg", '<svg viewBox="0 0 9 9">')):
        (folder / name).write_text(text)
        done = typed("show", *NET, "--out", name, cwd=folder)
        assert done.returncode == 1 and f"'{name}' is no result of a command" in done.stderr, done.stderr
        assert (folder / name).read_text() == text
        (folder / name).unlink()
        for _ in range(2):  # its own is replaced
            done = typed("show", *NET, "--out", name, cwd=folder)
            assert done.returncode == 0, done.stderr


def test_what_a_configuration_names_is_not_replaced(folder: Path, typed: Typed) -> None:
    (folder / "base.json").write_text(text := '{\n "schema_version": 1,\n "created": ""\n}\n')
    case = f'[[tool.optimize.check.cases]]\nbase = "base.json"\ncandidate = "{PAIR[1]}"\n'
    (folder / "pyproject.toml").write_text(f"[tool.optimize.check]\n{case}")
    for option in ("--json", "--junit"):
        done = typed("check", option, "base.json", cwd=folder)
        assert done.returncode == 2 and "'base.json' is named twice" in done.stderr, done.stderr
    assert (folder / "base.json").read_text() == text


@pytest.mark.parametrize("name", ["report.json", "recipe.yaml", "base.float32.onnx"])
def test_a_record_takes_no_name_of_a_result(name: str, folder: Path, typed: Typed) -> None:
    done = typed(PAIR[0], "--to", "onnx", "--out", "build", "--json", Path("build") / name, cwd=folder)
    assert done.returncode == 2 and f"{name}' lies in 'build', where a result gets its name" in done.stderr, done.stderr
    assert not (folder / "build").exists()


def test_names_of_old_still_work(folder: Path, typed: Typed) -> None:
    """Numbers as a range, and a bare ``--json``; ``--affinity`` and ``--threshold``, used elsewhere, are not shown."""
    assert "There is no processor 999 here" in typed("bench", *PAIR, "--cpus", "999-999,999", cwd=folder).stderr
    assert json.loads(typed("targets", "--json").stdout)["found"]
    shown = {name for command in COMMANDS for option in command.params for name in option.opts}
    assert {"--cpus", "--min-sqnr", "--json"} <= shown and not {"--affinity", "--threshold"} & shown


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_takes_what_all_take(command: click.Command) -> None:
    assert {"--json", "--quiet", "--debug"} <= {name for option in command.params for name in option.opts}


def test_a_record_on_standard_output_is_no_command_to_a_terminal_or_a_log(folder: Path, typed: Typed) -> None:
    name = "ba\u202ese\u009b2J ##[error]µ.onnx"
    (folder / "base.onnx").rename(folder / name)
    done = typed("compare", name, "other.onnx", "--json", "-", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "").isprintable() and "##[" not in done.stdout and "µ" in done.stdout
    assert any(str(file).endswith(name) for file in json.loads(done.stdout)["files"])
