"""Whatever stops a command: one paragraph, a defined exit code, and the traceback to who asks for it."""

import errno
import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import optimize
from optimize import pipeline
from optimize.cli import COMMANDS, failures
from optimize.errors import Refused
from optimize.load.pickles import TRUST_HINT
from optimize.report import console

Typed = Callable[..., subprocess.CompletedProcess[str]]


def os_error(number: int, name: str | None = None) -> OSError:
    return OSError(number, "the system's words", name)


#: What is raised, the exit code, and words of the paragraph.
RAISED: dict[str, tuple[BaseException, int, str]] = {
    "a defect": (KeyError("dim"), 70, "KeyError: 'dim', while running the command. This is a defect of optimize"),
    "no memory": (MemoryError(), 1, "not enough memory"),
    "no memory in torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1"), 1, "not enough memory"),
    "depth": (RecursionError("maximum recursion depth"), 1, "nested too deeply"),
    "a full disk": (os_error(errno.ENOSPC, "out/a.onnx"), 1, "no space left to write 'out/a.onnx'"),
    "open files": (os_error(errno.EMFILE), 1, "Too many files are open"),
    "processes": (os_error(errno.EAGAIN), 1, "no process, thread or memory left"),
    "threads": (RuntimeError("can't start new thread"), 1, "no process, thread or memory left"),
    "a long name": (os_error(errno.ENAMETOOLONG, "n" * 5000), 2, "is too long"),
    "another of the system": (os_error(errno.EIO, "disk"), 1, "The system refused 'disk': the system's words"),
    "a flood": (Refused("has " + "'a\x1b', " * 10_000), 1, "has 'a"),
    "letters": (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "no"), 1, r"'\udcff', which cannot be written as utf-8"),
    "bytes": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), 1, "not utf-8 text"),
    "an exit": (SystemExit(0), 1, "Code that the command ran raised SystemExit: 0, while"),
    "of ours": (Refused("No\n::error::way.", hint="Go\non."), 1, r"No\n\x3a:error::way."),
}


@pytest.mark.parametrize("name", RAISED)
def test_every_failure_is_one_paragraph(name: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    error, code, words = RAISED[name]

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(console, "show", fail)
    done = typed("passes")
    lines = done.stderr.splitlines()
    assert done.returncode == code and done.stdout == ""
    assert lines[0].startswith("optimize: ") and words in lines[0] and len(lines) <= 3, lines
    assert all(line.startswith("  ") for line in lines[1:])
    assert max(map(len, lines)) < (3100 if name == "a flood" else 600)
    for told in (typed("--debug", "passes"), typed("passes", "--debug")):
        assert told.stderr.startswith("Traceback") and told.stderr.endswith(done.stderr)


def test_what_wants_trust_is_told_as_a_command_to_paste(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Refused("'net.pt' holds code.", hint=TRUST_HINT)

    monkeypatch.setattr(console, "show", fail)
    assert typed("passes", "--json", "a b.json").stderr.splitlines()[2:] == [
        "  optimize passes --json 'a b.json' --trust"
    ]
    for words in (("passes", "--"), ("passes", "--json", "a" * 400)):
        assert len(typed(*words).stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("compare", "a.onnx", "b.onnx", "--eval", "d.npz"), "  Did you mean --data? "),
        (("check", "a.onnx", "b.onnx", "--calib", "d.npz"), "  Did you mean --data or --eval? "),
        (("run", "net.pt", "--fuze"), "'--fuse'"),
        (("run", "net.pt", "--max-latency", "5ms"), "'--latency'"),
        (("run", "net.pt", "--preproces", "size=8"), "\n  Did you mean '--preprocess'? 'optimize run"),
        (("run", "net.pt", "--format", "onnx"), "  Did you mean --to? "),
        (("bench", "net.onnx", "--format", "onnx"), "No such option '--format'"),
    ],
    ids=lambda words: words[0],
)
def test_an_option_of_another_command_is_answered_with_what_takes_the_same(
    words: tuple[str, ...], meant: str, typed: Typed
) -> None:
    assert meant in typed(*words).stderr


def test_a_defect_names_the_step() -> None:
    with pytest.raises(AttributeError) as caught:
        pipeline._excess(None, 1.0)  # type: ignore[arg-type]
    assert "while running the passes (optimize.pipeline)" in failures.explained(caught.value).what


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_takes_debug(command: str, typed: Typed) -> None:
    assert "--debug" in typed(command, "--help").stdout
    for words in ((command, "--debug", "--bogus"), ("--debug", command, "--bogus")):
        done = typed(*words)
        assert done.returncode == 2 and "No such option '--bogus'" in done.stderr and "Traceback" in done.stderr
    assert "Traceback" not in typed(command, "--bogus").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no folder is removed there while a process is in it")
@pytest.mark.parametrize("safe", [(), ("-P",)], ids=["", "safe path"])
def test_a_current_folder_that_is_gone(safe: tuple[str, ...], tmp_path: Path) -> None:
    words = shlex.join([sys.executable, *safe, "-m", "optimize", "passes"])
    there = {**os.environ, "PYTHONPATH": str(Path(optimize.__file__).parents[1])}
    gone = ["sh", "-c", f'rmdir "$PWD" && exec {words}']
    done = subprocess.run(gone, cwd=tmp_path, env=there, capture_output=True, text=True)
    told = "optimize: The current folder was removed.\n  Change to one that is there: cd\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_debug_alone_asks_for_help(typed: Typed) -> None:
    assert "Usage: optimize" in typed("--debug").stdout and typed("--debug").returncode == 0


@pytest.mark.parametrize("asked", [False, True])
def test_libraries_are_heard_by_who_asks(asked: bool, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def chatter(*_: object) -> None:
        warnings.warn("old", stacklevel=1)
        logging.getLogger("library").error("old")

    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("library"), "handlers", [handler])
    monkeypatch.setattr(console, "show", chatter)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert typed("passes", *(["--debug"] if asked else [])).returncode == 0
    assert (bool(warned), bool(heard)) == (asked, asked)
    assert logging.root.manager.disable == 0


@pytest.mark.parametrize(
    "word, message",
    [
        ("a\0b", "holds a NUL"),
        ("a\udcff", "is not UTF-8"),
        ("\udcc3\udcb6", "'ö' cannot be read"),
        ("a" * 20_000, "20,000 letters"),
        ("a" * 5000, ""),
    ],
)
@pytest.mark.parametrize("option", ["model", "--out", "--model", "--input-shape"])
def test_words_that_name_nothing(word: str, message: str, option: str, tmp_path: Path, typed: Typed) -> None:
    words = (word,) if option == "model" else ("net.pt", option, word)
    done = typed("run", *words, "--to", "onnx", cwd=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr and len(done.stderr) < 1500
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, message",
    [
        (("profile", "m", "--threads", 1_000_000), "1000000 is out of range: threads may be 1 to "),
        (("bench", "m", "--threads", 1_000_000), "out of range: threads"),
        (("check", "m", "n", "--threads", 1_000_000), "out of range: threads"),
        (("advise", "m", "--threads", 0), "out of range: threads"),
        (("sensitivity", "m", "--threads", "9" * 5000), "out of range: threads"),
        (("run", "m", "--to", "onnx", "--threads", -1), "out of range: threads"),
        (("run", "m", "--to", "onnx", "--static-batch", 10**9), "out of range: samples in one run"),
        (("bench", "m", "--streams", "1,100000"), "callers at the same time may be"),
        (("bench", "m", "--batch", "1,x"), "'x' is not a whole number"),
        (("bench", "m", "--restarts", 10**9), "out of range: restarts"),
        (("bench", "m", "--runs", 10**12), "out of range: timed runs"),
        (("bench", "m", "--seed", -1), "out of range: the seed"),
        (("check", "m", "n", "--cpus", "0-99999999999"), "out of range: a processor's number"),
    ],
)
def test_counts_are_bounded(words: tuple[object, ...], message: str, tmp_path: Path, typed: Typed) -> None:
    done = typed(*words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr) < 1000, done.stderr


_MISTAKES = {
    "nets:Net --to onx": "There is no target 'onx'",
    "nowhere.pt --to onnx": "There is no file 'nowhere.pt'",
    "nets:Net(6) --to onnx": "'nets:Net(6)' is a call, and a name is wanted.\n  It is called without arguments; wrap",
    "nets:Net --to onnx --eval nets:data()": "'nets:data()' is a call, and a name is wanted.\n  Write nets:data.",
    "show nowhere.pt": "There is no file 'nowhere.pt'",
    "profile nowhere.onnx": "There is no file 'nowhere.onnx'",
    "compare nowhere.onnx other.onnx": "There is no file 'nowhere.onnx'",
    "nets:Net --to onnx --int8 --calib nowhere.npz": "There is no data 'nowhere.npz'",
    "nets:Net --to onnx --eval nowhere/": "There is no data 'nowhere/'",
    "nets:Net --to onnx --input-shape 3,x": "'x' is not a whole number",
    "nets:Net --recipe nowhere.yaml": "There is no file 'nowhere.yaml'",
    "nets:Net --to onnx --fuze": "No such option '--fuze'",
    "nets:Net --to onnx --int8 dynamic": "Did you mean --int8=dynamic?",
    "nets:Net --to onnx --int8 4": "For weights of fewer bits: --weights 4bits.",
    "nets:Net --to onnx --int8=3bits": "dynamic, weights. For weights of fewer bits: --weights 3bits.\n",
}


def test_a_mistyped_word_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """It took five seconds to say that a file is not there."""
    script = (
        "import json, sys\nfrom optimize.cli import cli, failures\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try:\n        cli.main(line.split(), standalone_mode=False)\n"
        "    except Exception as error:\n        failures.tell(error)\n"
        "    print(line, 'torch' in sys.modules)\n"
    )
    words = [sys.executable, "-c", script, json.dumps(list(_MISTAKES))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [f"{line} False" for line in _MISTAKES]
    assert [message for message in _MISTAKES.values() if message not in done.stderr] == []
