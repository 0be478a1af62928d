"""A command on somebody else's file: what a model that has broken into the process that runs it can do from there."""

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import click
import pytest
import torch

from optimize import files
from optimize.cli import cli, keeper
from optimize.sandbox.confine import can_confine
from optimize.sealing import seal
from tests.slow import but_slowly
from tests.test_cli import command

pytestmark = pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock")
#: The command, in which the model breaks in as soon as rights are given up, and does what is written on standard input.
COMMAND = """
import os, pathlib, signal, subprocess, sys, time
from optimize import keeping
from optimize.cli import keeper, main
from optimize.sandbox import confine
go_on, code = keeper._go_on, sys.stdin.read()
keeper._PATIENCE_S = 1.0
confine.has_gpu_device = {"yes": lambda: True, "no": lambda: False}.get(os.environ.get("GPU"), confine.has_gpu_device)
def broken(*given):
    go_on(*given)
    exec(code, {**globals(), "ask": keeping.current()._ask, "outputs": keeping.current().outputs})
    sys.stdout.flush()
    os._exit(0)
keeper._go_on = broken
main()
"""
#: What it tries, and prints where that works.
TRIES = """
def attempt(name, function):
    try:
        function()
    except OSError:
        return
    print("did", name)
def shell(text):
    if subprocess.run(["sh", "-c", text], capture_output=True).returncode:
        raise OSError
import socket
attempt("make", lambda: open("made", "w"))
attempt("change", lambda: open("net.pt", "r+b"))
attempt("cut", lambda: os.truncate("net.pt", 0))
attempt("remove", lambda: os.unlink("net.pt"))
attempt("seal as the user", lambda: open(os.environ["XDG_STATE_HOME"] + "/optimize/key", "r+b"))
attempt("move", lambda: os.rename("net.pt", "moved"))
attempt("make a folder", lambda: os.mkdir("folder"))
attempt("link", lambda: os.symlink("net.pt", "link"))
attempt("take over", lambda: os.link("net.pt", os.environ["TMPDIR"] + "/taken"))
attempt("let another write", lambda: shell("echo x > made"))
attempt("read its keeper", lambda: open(f"/proc/{os.getppid()}/mem", "r+b"))
attempt("reach the network", lambda: socket.socket())
attempt("reach the network by itself", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
attempt("reach a service", lambda: socket.socket(socket.AF_UNIX).connect(os.environ["SERVICE"]))
attempt("set the system up", lambda: open("/proc/sys/kernel/core_pattern", "r+b"))
attempt("set its keeper up", lambda: shell("echo x > /proc/$$/cwd/made"))
attempt("write its own", lambda: open(os.environ["TMPDIR"] + "/own", "w"))
attempt("let another write there", lambda: shell("echo x > $TMPDIR/other"))
attempt("end its keeper", lambda: os.kill(os.getppid(), signal.SIGSTOP))
attempt("end everybody", lambda: os.kill(0, 0))
import fcntl
for request in (0x8901, 0x8902):
    own = os.getppid().to_bytes(4, sys.byteorder)
    attempt("let the kernel end its keeper", lambda: fcntl.ioctl(socket.socketpair()[0], request, own))
attempt("be root elsewhere", lambda: shell("unshare -Ur true"))
attempt("make older", lambda: os.utime("net.pt", (0, 0)))
os.chmod("net.pt", 0)
"""


def _mounts() -> bool:
    """Say whether this process may mount: what the superuser of a container often may not."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 21 & 1)  # CAP_SYS_ADMIN


def _arguments(command: click.Command) -> int:
    """Return how many files a command is given; two where it takes any number."""
    counts = [entry.nargs for entry in command.params if isinstance(entry, click.Argument)]
    return sum(2 if count < 0 else count for count in counts)


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start the command in a folder that holds a file, which need be no model."""
    (folder / "net.pt").write_bytes(b"somebody's")
    command = [sys.executable, "-c", COMMAND, *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")  # NumPy starts some when it is imported
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **threads}, text=True, **pipes)


def broken(folder: Path, code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command while the model does something from inside."""
    process = started(folder, *(words or ("show", "net.pt")))
    printed, errors = process.communicate(code, timeout=100)
    return subprocess.CompletedProcess(words, process.returncode, printed, errors)


#: What a command that opens files is asked beside them: whatever it reads of that, it is confined first.
ASKED = {
    "auto": ("--calib", "data.npz", "--to", "any", "--budget", "5min"),
    "run": ("--to", "onnx", "--opset", "18", "--cpu", "any", "--threads", "2"),
    "bench": ("--cpus", "0", "--data", "data.npz"),
    "check": ("--cpus", "0", "--max-drop", "1", "--data", "data.npz", "--json", "check.json"),
    "compare": ("--min-sqnr", "20", "--preprocess", "size=8"),
}


@pytest.mark.parametrize("name", [name for name, entry in cli.commands.items() if _arguments(entry)])
def test_every_command_that_opens_files_is_confined(name: str, tmp_path: Path) -> None:
    files = ["net.pt"] * _arguments(cli.commands[name])
    (tmp_path / "data.npz").touch()
    done = broken(tmp_path, "print(pathlib.Path('/proc/self/status').read_text())", name, *files, *ASKED.get(name, ()))
    assert "\nSeccomp:\t2\n" in done.stdout, done.stderr


def test_a_process_with_threads_says_that_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    code = "import threading\nthreading.Thread(target=lambda: threading.Event().wait(60), daemon=True).start()\n"
    words = [sys.executable, "-c", f"{code}from optimize.cli import main\nmain()", "show", "net.pt"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "has threads already, so that it cannot be confined" in done.stderr


@pytest.mark.parametrize("gpu", ["no", "yes"])
def test_nothing_of_the_user_is_written_and_nobody_reached(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU", gpu)
    name = f"{tempfile.mkdtemp(prefix='s-')}/s"  # short: a name of a socket has at most 107 letters
    monkeypatch.setenv("SERVICE", name)
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(name)
        service.listen()
        done = broken(tmp_path, TRIES)
    shutil.rmtree(Path(name).parent)
    assert done.stdout.splitlines() == ["did write its own", "did let another write there"], done.stderr
    assert (tmp_path / "net.pt").stat().st_mode & 0o777 and os.listdir(tmp_path) == ["net.pt"]


#: What NVIDIA's driver does when it is opened, in this process and in one that it starts.
DRIVER = """
DRIVE = (
    "import os, socket; os.memfd_create('m'); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    "s.bind(chr(0) + f'optimize-{os.getpid()}'); s.listen(); "
    "open(f'/proc/self/task/{os.getpid()}/comm', 'w').write('driver'); print('drove', flush=True)"
)
exec(DRIVE)
subprocess.run([sys.executable, "-c", DRIVE])
"""


@pytest.mark.skipif(os.geteuid() == 0 and not _mounts(), reason="the superuser, without the right to mount")
def test_a_gpu_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU", "yes")
    done = broken(tmp_path, DRIVER)
    assert done.stdout.splitlines() == ["drove", "drove"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not _mounts(), reason="nobody who may mount")
def test_another_name_of_the_system_s_settings_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    (tmp_path / "proc").mkdir()
    bound = 'mount --make-rprivate / && mount --bind /proc proc && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", bound, "sh", sys.executable, "-c", COMMAND, "show", "net.pt"]
    code = "open('proc/sys/kernel/core_pattern', 'r+b')"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    environment = {**os.environ, **threads, "GPU": "yes"}
    done = subprocess.run(words, input=code, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert "not permitted" in done.stderr or "Permission denied" in done.stderr


def test_a_command_may_write_its_results_again_and_again(tmp_path: Path) -> None:
    """As a search does, which is killed here behind the second time, in the middle of the third."""
    code = """
for number in (1, 2, 3):
    out, folder = next(iter(outputs.items()))
    for name in ("report.json", f"point-0{number}.int8.onnx"):
        (folder / name).write_text(str(number))
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    ask(do="commit", path=str(out))
    assert not os.listdir(folder)
    print(sorted(os.listdir(out)), flush=True)
    os.environ["XDG_STATE_HOME"] = os.environ["TMPDIR"]
    print(__import__("optimize.sealing").sealing.seal("a journal"), flush=True)
"""
    (tmp_path / "data.npz").touch()
    done = broken(tmp_path, code, "auto", "net.pt", "--calib", "data.npz", "--out", "out")
    assert done.stdout.splitlines() == [
        "['point-01.int8.onnx', 'report.json']",
        seal("a journal"),
        "['point-02.int8.onnx', 'report.json']",
        seal("a journal"),
    ]
    assert done.returncode and (tmp_path / "out" / "report.json").read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["data.npz", "net.pt", "out"]


def test_results_are_those_of_the_command_line_alone(tmp_path: Path) -> None:
    code = """
pathlib.Path(os.environ["TMPDIR"], "text").write_text("told")
for do, path, source in (("write", "other.html", "text"), ("append", "net.pt", "text"), ("commit", "/", ""),
                         ("write", "page.html", "../../../etc/passwd"), ("remove", "page.html", "text"),
                         ("write", "page.html", "\\0"), ("write", "page.html", "\\ud800"), ("commit", "\\0", "")):
    try:
        ask(do=do, path=path, source=source)
        print("did", do, path)
    except Exception as error:
        print(type(error).__name__)
ask(do="write", path="page.html", source="text")
"""
    done = broken(tmp_path, code, "show", "net.pt", "--out", "page.html")
    assert done.stdout.splitlines() == ["Refused"] * 8 and not done.stderr
    assert (tmp_path / "page.html").read_text() == "told" and sorted(os.listdir(tmp_path)) == ["net.pt", "page.html"]


@pytest.mark.parametrize(
    "made",
    [
        "(new / '.bashrc').touch()",
        "(new / 'setup.py').touch()",
        "(new / 'package.json').touch()",
        "[(new / f'{number}.onnx').touch() for number in range(1001)]",
        "(new / 'folder.json').mkdir()",
        "os.symlink('/etc/passwd', new / 'link.json')",
    ],
)
def test_a_folder_gets_plain_results_alone(made: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    code = f"""
((out, new),) = outputs.items()
(new / "net.onnx").touch()
{made}
for _ in range(2):
    try:
        ask(do="commit", path=str(out))
        print("did it")
    except Exception as error:
        print(error.what)
"""
    done = broken(tmp_path, code, "run", "net.pt", "--to", "onnx", "--out", "out")
    assert done.stdout.count("The model made the process") == 2, done.stdout + done.stderr
    assert "did it" not in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["net.pt", "out"] and os.listdir(tmp_path / "out") == ["kept"]


def test_what_was_taken_is_out_of_reach(tmp_path: Path) -> None:
    code = """
((out, new),) = outputs.items()
(new / "net.onnx").write_text("right")
ask(do="commit", path=str(out))
for name in ("net.onnx", "more.onnx"):
    try:
        (out / name).write_text("wrong")
        print("did write", name)
    except PermissionError:
        pass
"""
    done = broken(tmp_path, code, "run", "net.pt", "--to", "onnx", "--out", "out")
    assert (done.stdout, done.stderr) == ("", "")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("net.onnx", "right")]


def test_a_text_is_added_to_the_step_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code = f"from optimize import files; files.append_text(pathlib.Path({str(summary)!r}), 'and after')"
    done = broken(tmp_path, code, "check", "net.pt", "net.pt")
    assert not done.stderr and summary.read_text() == "before\nand after"


def test_a_text_that_nobody_keeps_is_as_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "APPENDED_BYTES", 6)
    for _ in range(2):
        files.append_text(tmp_path / "summary", "abcd\u20ac\u20ac")
    assert (tmp_path / "summary").read_text() == "abcdabcd"  # no half of a letter


def test_a_step_summary_is_not_flooded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code = f"""
pathlib.Path(os.environ["TMPDIR"], "text").write_text("x" * 300_000)
for _ in range(20):
    try:
        ask(do="append", path={str(summary)!r}, source="text")
        print("did")
    except Exception as error:
        print(type(error).__name__)
"""
    done = broken(tmp_path, code, "check", "net.pt", "net.pt")
    assert done.stdout.split() == ["did"] * 3 + ["Refused"] * 17 and not done.stderr
    assert summary.stat().st_size == len("before\n") + 900_000  # of more than 1 MiB GitHub shows nothing


def test_a_crash_is_a_sentence(tmp_path: Path) -> None:
    done = broken(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert done.returncode == 1 and "'net.pt' killed the process that opened it (signal SIGSEGV)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_does_not_hear_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    deaf = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=2)
print("deaf", flush=True)
while True: pass
"""
    process = started(tmp_path, "run", "net.pt", "--to", "onnx", "--out", "out")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(deaf)
    process.stdin.close()
    process.stdin = None
    assert process.stdout.readline() == "deaf\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130 and errors.strip().startswith("Interrupted") and os.listdir(tmp_path) == ["net.pt"]


def test_nothing_outlives_the_command(tmp_path: Path) -> None:
    left = 'print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=2).pid)'
    for code in (left, f"{left}; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"):
        done = broken(tmp_path, code)
        assert not Path("/proc", done.stdout.strip()).exists()


def test_who_forks_and_ends_again_and_again_does_not_outlive_it(tmp_path: Path) -> None:
    comets = """
until = time.monotonic() + 15
for _ in range(60):
    if not os.fork():
        while time.monotonic() < until:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(1, b"outlived")
        os._exit(0)
"""
    done = broken(tmp_path, comets)  # who still lives has its output open, which is then waited for
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_who_cannot_be_ended_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(keeper, "_ENDING_S", 0.0)
    monkeypatch.setattr(keeper, "_children", lambda: {0})
    monkeypatch.setattr(os, "kill", lambda number, signal: None)
    monkeypatch.setattr(os, "waitpid", lambda number, options: (0, 0))
    before = signal.getsignal(signal.SIGCHLD)
    keeper._end_orphans(set())
    assert "could not be ended" in capsys.readouterr().err and signal.getsignal(signal.SIGCHLD) == before


def test_a_keeper_that_is_killed_takes_the_command_along(tmp_path: Path) -> None:
    process = started(tmp_path, "run", "net.pt", "--to", "onnx", "--out", "out")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("print(os.getpid(), flush=True)\nwhile True: pass")
    process.stdin.close()
    number = process.stdout.readline().strip()
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while Path("/proc", number).exists() and "Z" not in Path("/proc", number, "stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(os.listdir(tmp_path)) == 2  # the hidden folder of a dead run ...
    broken(tmp_path, "", "run", "net.pt", "--to", "onnx", "--out", "out")
    assert os.listdir(tmp_path) == ["net.pt"]  # ... goes with the next


def test_what_grows_while_it_is_copied_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_TEXT_BYTES", 3000)
    monkeypatch.setattr(files, "APPENDED_BYTES", 3000)
    opened = keeper.left_in

    def growing(folder: Path, name: str, *, most_bytes: int | None = None) -> IO[bytes]:
        file = opened(folder, name, most_bytes=most_bytes)
        os.truncate(folder / name, 1 << 20)
        return file

    monkeypatch.setattr(keeper, "left_in", growing)
    desk = keeper._Desk(tmp_path, {"write": [tmp_path / "page.html"], "append": [tmp_path / "summary"]}, {})
    for do, name in (("write", "page.html"), ("append", "summary")):
        (tmp_path / "text").write_bytes(b"told")
        request = {"do": do, "path": str(tmp_path / name), "source": "text"}
        assert desk.answer(json.dumps(request).encode()) == {}
        assert (tmp_path / name).stat().st_size == 3000
    (tmp_path / "text").write_bytes(b"more")
    assert "error" in desk.answer(json.dumps(request).encode())  # all that is added has one end
    assert (tmp_path / "summary").stat().st_size == 3000


def test_a_step_summary_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code = f"""
pathlib.Path(os.environ["TMPDIR"], "text").write_text("after")
for do, source in (("write", "text"), ("commit", "text"), ("append", "missing")):
    try:
        ask(do=do, path={str(summary)!r}, source=source)
        print("did", do)
    except Exception as error:
        print(type(error).__name__)
"""
    done = broken(tmp_path, code, "check", "net.pt", "net.pt")
    assert done.stdout.splitlines() == ["Refused"] * 3 and summary.read_text() == "before", done.stderr


def test_what_a_shell_has_open_is_closed(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    words = ["sh", "-c", 'exec 9>open; exec "$@"', "sh", sys.executable, "-c", COMMAND, "show", "net.pt"]
    code = "print(*sorted(map(int, os.listdir('/proc/self/fd')))[:4], repr(os.read(0, 10)))"
    done = subprocess.run(words, input=code, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[:3] == ["0", "1", "2"] and "9" not in done.stdout.split()[:-1]
    assert done.stdout.split()[-1] == "b''"


def test_what_is_made_to_be_in_the_way_is_not(tmp_path: Path) -> None:
    code = """
((out, new),) = outputs.items()
os.chdir(new)
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
    for _ in range(2):
        done = broken(tmp_path, code, "run", "net.pt", "--to", "onnx", "--out", "out")
        assert (done.returncode, done.stderr) == (0, "")
    done = broken(
        tmp_path,
        "((out, new),) = outputs.items(); (new / 'a.onnx').touch(); ask(do='commit', path=str(out))",
        "run",
        "net.pt",
        "--to",
        "onnx",
        "--out",
        "out",
    )
    assert os.listdir(tmp_path / "out") == ["a.onnx"] and not done.stderr
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def test_who_asks_without_listening_is_ended(tmp_path: Path) -> None:
    deaf = """
flood = b'{"do": "write"}\\n' * 1000
while True:
    keeping.current().requests.write(flood)
"""
    done = broken(tmp_path, deaf)
    assert done.returncode == 1 and "SIGKILL" in done.stderr and "Traceback" not in done.stderr


def test_a_request_that_nobody_waits_for_is_not_heard(tmp_path: Path) -> None:
    left = """
if not os.fork():
    while True:
        os.write(keeping.current().requests.fileno(), b'{"do": "write"}\\n')
"""
    done = broken(tmp_path, left)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr


def test_processes_that_the_user_had_before_go_on(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    words = [
        "sh",
        "-c",
        'sleep 1000 >/dev/null 2>&1 & exec "$@"',
        "sh",
        sys.executable,
        "-c",
        COMMAND,
        "show",
        "net.pt",
    ]
    code = "print(pathlib.Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text().split()[0])"
    done = subprocess.run(words, input=code, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    number = int(done.stdout)
    assert Path("/proc", str(number), "comm").read_text().strip() == "sleep"
    os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize(
    "within", but_slowly([(), ("setpriv", "--no-new-privs")], {()}), ids=["freely", "without new rights"]
)
def test_what_they_leave_behind_meanwhile_goes_on_too(within: tuple[str, ...], tmp_path: Path) -> None:
    """It becomes a child of the keeper's, as what the command leaves behind does, which is ended."""
    (tmp_path / "net.pt").touch()
    service = "import os, time\nprint(os.getpid(), flush=True)\nos.close(1)\nos.close(2)\ntime.sleep(100)"
    (tmp_path / "service.py").write_text(service)
    words = [*within, "sh", "-c", '(sleep 2; setsid "$1" service.py & ) & shift; exec "$@"', "sh", sys.executable]
    left = "subprocess.Popen(['sleep', '100'], start_new_session=True, stdout=2); time.sleep(4); print('did')"
    words += [sys.executable, "-c", COMMAND, "show", "net.pt"]
    done = subprocess.run(words, input=left, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    number, did = done.stdout.split()
    assert (did, done.returncode) == ("did", 0), done.stderr
    os.kill(int(number), signal.SIGKILL)  # it is there
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_to(path, tmp_path)]


def _leads_to(link: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return "sleep" in (link.parent / "comm").read_text() and os.path.realpath(link) == str(folder)
    return False


def test_who_starts_it_may_have_ignored_how_processes_end(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    words = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", sys.executable, "-c", COMMAND, "show", "net.pt"]
    done = subprocess.run(words, input="print('did')", cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr, done.returncode) == ("did\n", "", 0)


def test_a_step_summary_that_is_a_fifo_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    os.mkfifo(summary)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code = f"""
from optimize import files
try:
    files.append_text(pathlib.Path({str(summary)!r}), "and after")
except Exception as error:
    print(type(error).__name__)
"""
    assert broken(tmp_path, code, "check", "net.pt", "net.pt").stdout == "Refused\n"


def test_a_folder_that_is_another_one_meanwhile_is_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "out").symlink_to("first")
    code = """
from optimize import transaction
print("ready", flush=True)
while os.readlink("out") == "first":
    time.sleep(0.05)
for begin in (transaction.check, lambda out: transaction.staging(out).__enter__()):
    try:
        begin(pathlib.Path("out"))
    except Exception as error:
        print(type(error).__name__, error)
"""
    process = started(tmp_path, "run", "net.pt", "--to", "onnx", "--out", "out")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(code)
    process.stdin.close()
    process.stdin = None
    assert process.stdout.readline() == "ready\n"
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").replace(tmp_path / "out")
    stdout, _ = process.communicate(timeout=100)
    assert stdout.count("Refused 'out' leads to another folder than when the command began.") == 2
    assert not any((tmp_path / "second").iterdir())


def test_torch_caches_where_nobody_else_writes(tmp_path: Path) -> None:
    """By itself it does so in a folder of a name that everybody knows, and anybody may have made."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / f"tmp/torchinductor_{getpass.getuser()}").touch()
    torch.save(torch.nn.Linear(4, 2), tmp_path / "net.pt")
    done = command("show", tmp_path / "net.pt", "--trust", TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "tmp").iterdir())) == 1


def test_a_check_of_a_configuration_is_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = 'cases = [{ base = "a.onnx" }]\n'
    for text, confined in (
        (f"[tool.optimize.check]\n{case}", True),
        (f'[tool.optimize.check]\ndata = "package.data:images"\n{case}', False),
        ('[tool.optimize]\ncheck = ["abc"]\n', True),  # which is refused
    ):
        Path("pyproject.toml").write_text(text)
        assert is_confined("check", monkeypatch) is confined


@pytest.mark.parametrize(
    ("words", "confined"),
    [
        ("show net.pt", True),
        ("net.pt --int8=static --calib calib.npz --to onnx", True),
        ("compare net.pt net.pt", True),
        ("show net.pt --trust", False),
        ("show net.pt --model models.repvgg:fashion_repvgg", False),
        ("net.pt --int8=static --calib package.data:images --to onnx", False),
        ("bench net.pt package.nets:factory", False),
        ("bench net.pt net.pt --out results:today", True),  # which names no code
        ("check net.pt net.pt --name gate:net --json gate:net", True),
        ("show 'net imagenet:v2.pt'", True),
        ("net.pt --int8=static --calib 'calib = a:b,c:d' --to onnx", True),
        ("bench net.pt 'net lost:v2.pt'", True),
    ],
)
def test_what_is_confined(words: str, confined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("net.pt", "calib.npz", "net imagenet:v2.pt", "calib = a:b,c:d"):
        (tmp_path / name).touch()
    (tmp_path / "net lost:v2.pt").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    assert is_confined(words, monkeypatch) is confined


def is_confined(words: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether a command becomes two processes; it is stopped short of that."""

    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    monkeypatch.setattr(keeper, "adopt_orphans", stop)
    monkeypatch.setattr(keeper, "can_confine", lambda: True)
    monkeypatch.setattr(keeper, "_has_threads", lambda: False)  # pytest has some
    name, *given = shlex.split(words)
    command = cli.commands.get(name) or cli.commands["run"]
    context = command.make_context(name, given if name in cli.commands else [name, *given])
    try:
        keeper.confine(context)
    except Stop:
        return True
    return False
