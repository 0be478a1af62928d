"""Files timed and judged on another machine, which OpenSSH reaches: the same workers, behind its pipes.

One connection carries everything. A shell there holds a private folder: when its standard input ends, whatever ended
this process or the network, it ends the workers and removes the folder. Into the folder go this package and the files
that are run, as archives: no name of a file is ever part of a command, nor anything that the machine says. A command is
made of words of this module, numbers that it counts, and the path of a Python that the user named.

Run there as ``python -m optimize.measure.remote [TARGET ...]``, it describes that machine, and what targets lack on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import IO, Any

from optimize.bounds import ANSWER_SHARE, free_bytes
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.escaping import plain
from optimize.files import copy_bytes
from optimize.measure import environment
from optimize.measure.environment import Environment
from optimize.measure.fleet import PROGRAM, Session
from optimize.registry import find_target
from optimize.sandbox.process import THREAD_VARIABLES, Lines, end, limit_files, read_object
from optimize.targets.base import Artifact
from optimize.targets.packaging import versions_of

#: The user's own configuration and keys hold, but nobody is asked for anything and nothing else is carried along.
_SSH = (
    "ssh", "-T", "-a", "-x",
    *(f"-o{option}" for option in (
        "BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ClearAllForwardings=yes", "RemoteCommand=none",
        "PermitLocalCommand=no", "ControlPersist=no", "LogLevel=ERROR",
    )),
)  # fmt: skip
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_URL = re.compile(rf"ssh://(?:({_NAME})@)?({_NAME}|\[[0-9A-Fa-f:]+\])(?::([0-9]{{1,5}}))?(/[A-Za-z0-9_./+-]+)?")
#: Ends the workers and removes the folder when nobody is there any more; one that still writes is waited for.
_KEEPER = (
    'umask 077; cd "${{TMPDIR:-/tmp}}" && mkdir {0} && cd {0} && trap "" HUP INT TERM PIPE && echo ready && {{ '
    'cat >/dev/null; for found in */pid; do kill -9 "$(cat "$found")"; done 2>/dev/null; cd ..; '
    "for turn in 1 2 3 4 5 6 7 8 9 10; do rm -rf {0} && break; sleep 1; done; }}"
)
#: Runs a worker as a child, so that its end is told as a code and its number is known while it lives, no longer.
_WORKER = (
    'mkdir {0} && exec 3<&0 && {{ TMPDIR="$PWD/{0}" {1} <&3 3<&- & }} && echo $! >{0}/pid && exec 3<&-; '
    "wait $!; code=$?; rm -f {0}/pid; exit $code"
)
_FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
#: Says why a Python does not run a worker, in words that older ones know too.
_PROBE = "import sys; sys.version_info < (3, 11) and sys.exit('it is %d.%d' % sys.version_info[:2]); import numpy"
#: Seconds until a short command must be done (of a slow board: it imports NumPy), and bytes of what it says in a line.
_PATIENCE_S, _MOST_BYTES = 120.0, 1 << 20
#: Of any file that ``ssh`` writes: its errors are kept in some, and lists of known hosts have megabytes at most.
_MOST_WRITTEN_BYTES = 64 << 20
#: Letters of a line that is shown, and seconds in which the folder there is removed, and a worker ended; and those that
#: one who owes an answer is waited for.
_MOST_WORDS, _LEAVING_S, _ENDING_S, _MUTE_S = 300, 15.0, 5.0, 1.0
#: Texts that a machine says in one list of itself, processors that it may have, and processes that may wait for them.
_MOST_TEXTS, _MOST_PROCESSORS, _MOST_LOAD = 64, 1 << 12, 1e6


@dataclass(frozen=True)
class Address:
    """A machine that OpenSSH reaches.

    Attributes:
        url: As the user writes it.
        name: Of the machine, also one that only the user's configuration of ssh knows.
        user: Who runs files there; whom that configuration says where empty.
        port: Of its sshd, likewise.
        python: The Python there, 3.11 or later, with NumPy and the runtimes of the files.
    """

    url: str
    name: str
    user: str = ""
    port: str = ""
    python: str = "python3"

    @classmethod
    def of(cls, url: str) -> Address:
        """Read ``ssh://[user@]host[:port][/path/of/python]``.

        Raises:
            UsageError: It is something else.

        >>> Address.of("ssh://pi@board:2222/opt/venv/bin/python").python
        '/opt/venv/bin/python'
        """
        found = _URL.fullmatch(url)
        if found is None:
            raise UsageError(
                f"--on '{plain(url)}' names no machine.",
                hint="Write ssh://[user@]host[:port], behind it the path of a Python there that is not python3.",
            )
        user, name, port, python = (part or "" for part in found.groups())
        return cls(url, name.strip("[]"), user, port, python or cls.python)

    @property
    def words(self) -> tuple[str, ...]:
        """What ``ssh`` is told of it."""
        named = (*(("-l", self.user) if self.user else ()), *(("-p", self.port) if self.port else ()))
        return (*named, "--", self.name)


class Remote:
    """A connection to another machine; a context manager that leaves nothing there.

    Attributes:
        environment: What it is, read before anything ran there.

    Raises:
        TargetUnavailable: On entry: there is no ``ssh``, the machine is not reached, or lacks Python or NumPy.
    """

    environment: Environment

    def __init__(self, address: Address) -> None:
        self.address = address
        self._base = f"optimize-{secrets.token_hex(16)}"
        self._numbers, self._held = itertools.count(1), dict[str, str]()
        self._lacks = dict[tuple[str, str], str]()
        self._is_mute = True

    def __enter__(self) -> Remote:
        with contextlib.ExitStack() as closing:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="optimize-"))
            self._control = ("-S", f"{folder}/ssh", "-oControlMaster=no")
            self._connect(f"{folder}/ssh", closing)
            package = Path(__file__).parents[1]
            sources = {f"optimize/{path.relative_to(package)}": path for path in sorted(package.rglob("*.py"))}
            self.send("package", sources)
            self._require_python()
            self.environment = self._describe()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _connect(self, control: str, closing: contextlib.ExitStack) -> None:
        """Open the connection, with the shell that keeps the folder."""
        words = closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the connection
        command = [*_SSH, "-S", control, "-oControlMaster=yes", *self.address.words, _shell(_KEEPER.format(self._base))]
        keeper = _start(command, stdout=subprocess.PIPE, stderr=words)
        closing.callback(lambda: _leave(keeper, _MUTE_S if self._is_mute else _LEAVING_S))
        with contextlib.suppress(TimeoutError):
            if Lines(_said(keeper), most_bytes=_MOST_BYTES, most_waiting=1).read(_PATIENCE_S) == b"ready\n":
                self._is_mute = False
                return
        words.seek(0)
        raise TargetUnavailable(
            f"'{self.address.url}' is not reached: {_last(words.read(_MOST_BYTES))}.",
            hint="Nobody is asked for passwords: with a key and a host that is known this must work, "
            f"{shlex.join(['ssh', *self.address.words, 'true'])}",
        )

    def _require_python(self) -> None:
        python = self.address.python
        done = self._ask(f"{shlex.quote(python)} -c {shlex.quote(_PROBE)}")
        if done.returncode:
            raise TargetUnavailable(
                f"'{self.address.url}' has no Python of 3.11 or later with NumPy at '{python}': {_last(done.stderr)}.",
                hint=f"Install it there ({python} -m pip install numpy), or name another: ssh://host/path/of/python",
            )

    def _describe(self) -> Environment:
        from pydantic import TypeAdapter  # not in the processes there, which have none

        told = self._tell(self.address.python).get("environment")
        try:
            found = TypeAdapter(Environment).validate_json(json.dumps(_plain(told)))
            _require_sane(found)
        except (ValueError, RecursionError) as error:
            raise TargetUnavailable(f"'{self.address.url}' does not say what it is.") from error
        # This package runs there, and is not installed there.
        return dataclasses.replace(found, versions={**found.versions, **versions_of("optimize")})

    def _tell(self, python: str, *targets: str) -> dict[str, Any]:
        """Return what this module says there."""
        words = shlex.join([python, "-P", "-m", "optimize.measure.remote", *targets])
        done = self._ask(f'PYTHONPATH="$PWD/package" {words}')
        told = read_object(done.stdout) if not done.returncode else None
        if told is None:
            raise TargetUnavailable(f"'{self.address.url}' does not run a worker in '{python}': {_last(done.stderr)}.")
        return told

    def lacks(self, target: str, interpreter: Path | None) -> str:
        """Return why files of a target cannot run there, and what to install; empty where they can."""
        python = str(interpreter or self.address.python)
        if (python, target) not in self._lacks:
            told = self._tell(python, target).get("lacks")
            self._lacks[python, target] = plain(str(told)[:_MOST_WORDS]) if told else ""
        return self._lacks[python, target]

    def frequency_mhz(self) -> list[float]:
        """Return the present frequency of its first processor in MHz; empty where it is not readable."""
        digits = self._ask(f"cat {_FREQUENCY}").stdout.strip()
        return [int(digits) / 1000] if re.fullmatch(rb"[1-9][0-9]{1,9}", digits) else []

    def session(self, artifact: Artifact, folder: Path, **more: Any) -> Session:
        """Start a worker there; the arguments are those of ``Session``.

        Raises:
            Refused: The file is untrusted.
            TargetUnavailable: The connection is lost.
        """
        return RemoteSession(self, f"{next(self._numbers)}", artifact, folder, **more)

    def start(self, name: str, python: str, threads: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process of a session in a folder of its own."""
        variables = " ".join(f"{variable}={int(threads)}" for variable in THREAD_VARIABLES)
        worker = f'PYTHONPATH="$PWD/package" {variables} {shlex.join([python, "-P", "-m", PROGRAM])}'
        return _start(self._command(_WORKER.format(name, worker)), stdout=subprocess.PIPE, stderr=stderr)

    def hold(self, artifact: Artifact) -> str:
        """Bring all files of an artifact there, once; return where the first of them lies."""
        key = f"{artifact.path} {artifact.sha256}"
        if key not in self._held:
            number, home = f"{next(self._numbers)}", artifact.path.parent
            self.send(number, {name: home / name for name in (artifact.path.name, *artifact.beside)})
            self._held[key] = f"{number}/{artifact.path.name}"
        return self._held[key]

    def send(self, folder: str, files: Mapping[str, Path]) -> None:
        """Bring files into a folder there, each under the name that is given.

        Raises:
            Refused: A name leads out of the folder.
            TargetUnavailable: They did not arrive.
        """
        for name in files:
            if name.startswith("/") or ".." in name.split("/"):
                raise Refused(f"'{plain(name)}' is not sent to another machine: it lies outside its file's folder.")
        done = self._ask(f"mkdir -p {folder} && tar -xof - -C {folder}", files)
        if done.returncode:
            raise TargetUnavailable(f"'{self.address.url}' did not take what was sent: {_last(done.stderr)}.")

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file from there, no more of it than is read; what it holds is for the reader to judge."""
        most = free_bytes() // ANSWER_SHARE + 1
        # Whoever reads a pipe that nobody writes to waits for ever.
        with self._process(f"test -f {name} && head -c {most} {name}") as (process, _), path.open("wb") as file:
            copy_bytes(_said(process), file, most)

    def peak_memory_bytes(self, name: str) -> int | None:
        """Return the largest resident memory of a worker so far, None where that machine does not say."""
        told = self._ask(f'grep VmHWM: "/proc/$(cat {name}/pid)/status"').stdout
        found = re.fullmatch(rb"VmHWM:\s*([0-9]{1,15}) kB\s*", told)
        return int(found[1]) * 1024 if found else None

    def end(self, name: str) -> None:
        """End a worker, which need not hear that nobody listens any more; the keeper ends those that are left."""
        if not self._is_mute:
            with contextlib.suppress(TargetUnavailable):
                self._ask(f'test -f {name}/pid && kill -9 "$(cat {name}/pid)"', patience_s=_ENDING_S)

    def _ask(
        self, script: str, sent: Mapping[str, Path] | None = None, patience_s: float | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command there, and return the first line that it says.

        Args:
            script: Of words of our own.
            sent: What it reads, as an archive; then it may take its time.
            patience_s: How long it may take otherwise; as long as any short command where None.

        Raises:
            Refused: A file cannot be read.
            TargetUnavailable: It does not end.
        """
        patience_s = patience_s or _PATIENCE_S
        self._is_mute = True  # until it answers: who is interrupted meanwhile waits for nothing else there
        with self._process(script, sent) as (process, words):
            try:
                said = Lines(_said(process), most_bytes=_MOST_BYTES, most_waiting=1).read(None if sent else patience_s)
                code = process.wait(patience_s)  # what takes files says nothing before its end
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                raise TargetUnavailable(f"'{self.address.url}' does not answer within {patience_s:g} s.") from error
            self._is_mute = False
            words.seek(0)
            return subprocess.CompletedProcess(script, code, said, words.read(_MOST_BYTES))

    @contextlib.contextmanager
    def _process(
        self, script: str, sent: Mapping[str, Path] | None = None
    ) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
        """Yield the process of a command there, and what it complains; it ends with the context.

        Raises:
            Refused: A file that is sent cannot be read.
        """
        failed = list[OSError]()
        with tempfile.TemporaryFile() as words, _archive(sent or {}, failed) as archive:
            process = _start(self._command(script), stdin=archive, stdout=subprocess.PIPE, stderr=words)
            try:
                yield process, words
            finally:
                end(process)
        for error in failed:
            raise Refused(f"'{error.filename}' cannot be sent to another machine: {error.strerror}.") from error

    def _command(self, script: str) -> list[str]:
        """Return the command that runs a script in the folder there, over the connection that is open."""
        return [*_SSH, *self._control, *self.address.words, _shell(f'cd "${{TMPDIR:-/tmp}}/{self._base}" && {script}')]


class RemoteSession(Session):
    """One artifact in a fresh process on another machine.

    Args:
        name: Of its folder there.
        artifact: What it runs.
        folder: Made by the session, for its files here.
        more: As for ``Session``.

    Raises:
        Refused: The file is untrusted.
    """

    def __init__(self, remote: Remote, name: str, artifact: Artifact, folder: Path, **more: Any) -> None:
        if artifact.untrusted:
            raise Refused(_untrusted(f"'{artifact.path}'"), hint="Give it if you made the file yourself.")
        self._remote, self._name = remote, name
        super().__init__(artifact, folder, **more)

    def _begin(self, interpreter: Path | None, emulated: str) -> subprocess.Popen[bytes]:
        python = str(interpreter or self._remote.address.python)
        return self._remote.start(self._name, python, self.threads, self._words)

    def _given(self, path: Path) -> str:
        if path == self.artifact.path:
            return self._remote.hold(self.artifact)
        self._remote.send(self._name, {path.name: path})
        return self._wanted(path)

    def _wanted(self, path: Path) -> str:
        return f"{self._name}/{path.name}"

    def _answered(self, path: Path) -> None:
        self._remote.fetch(self._wanted(path), path)

    def peak_memory_bytes(self) -> int | None:
        """Return the largest resident memory of the process there so far, None where that machine does not say."""
        return self._remote.peak_memory_bytes(self._name)

    def close(self) -> None:
        """End the process here and there."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._remote.end(self._name)
        super().close()


@contextlib.contextmanager
def connected(url: str | None, *, trust: bool) -> Iterator[Remote | None]:
    """Yield the connection to a machine, or None where none is named: then everything runs on this one.

    Args:
        url: As ``Address.of`` reads it.
        trust: Whether files may be run in processes that are not confined.

    Raises:
        UsageError: It names no machine.
        Refused: Files are not trusted.
        TargetUnavailable: The machine is not reached, or lacks what a worker needs.
    """
    if not url:
        yield None
        return
    address = Address.of(url)
    if not trust:
        raise Refused(_untrusted("A file"), hint="Give it if you made the files yourself.")
    with Remote(address) as remote:
        yield remote


def _untrusted(what: str) -> str:
    return f"{what} needs --trust to run on another machine: no process is confined there."


def _start(
    command: Sequence[str], *, stdin: int | IO[bytes] = subprocess.PIPE, **pipes: Any
) -> subprocess.Popen[bytes]:
    """Start ``ssh`` out of reach of the terminal, whose Ctrl-C would end it before it has cleaned up.

    A machine that complains without end fills no disk: the system ends an ``ssh`` that writes too much (Linux).

    Raises:
        TargetUnavailable: It is not installed.
    """
    try:
        process = subprocess.Popen(command, stdin=stdin, start_new_session=True, **pipes)  # noqa: S603 - ssh of the user's own
        limit_files(process.pid, _MOST_WRITTEN_BYTES)
        return process
    except FileNotFoundError as error:
        hint = "Install OpenSSH's client: apt install openssh-client"
        raise TargetUnavailable("No other machine is reached: ssh is not installed.", hint=hint) from error


def _said(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _leave(keeper: subprocess.Popen[bytes], patience_s: float) -> None:
    """Let the keeper clean up for so long, then end the connection."""
    assert keeper.stdin is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(patience_s)
    finally:  # whoever is interrupted again waits no longer, and leaves no connection
        end(keeper)


def _shell(script: str) -> str:
    """Return a script as a command for whatever shell the user has there."""
    return f"sh -c {shlex.quote(script)}"


@contextlib.contextmanager
def _archive(sent: Mapping[str, Path], failed: list[OSError]) -> Iterator[int | IO[bytes]]:
    """Yield what a process reads files from, as an archive.

    It is written beside: a machine that reads nothing holds up neither this process nor its Ctrl-C.

    Args:
        sent: The files, by the name of each in the archive.
        failed: Told of one that cannot be read.
    """
    if not sent:
        yield subprocess.DEVNULL
        return
    read, write = os.pipe()
    threading.Thread(target=_pack, args=(sent, os.fdopen(write, "wb"), failed), daemon=True).start()
    with os.fdopen(read, "rb") as pipe:
        yield pipe


def _pack(sent: Mapping[str, Path], pipe: IO[bytes], failed: list[OSError]) -> None:
    """Write files to a pipe as an archive, which says nothing of owners; a reader that has ended says why."""
    with contextlib.suppress(BrokenPipeError), pipe:
        try:
            # GNU's form of an archive, because BusyBox reads it.
            with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.GNU_FORMAT, dereference=True) as archive:
                for name, path in sent.items():
                    entry = archive.gettarinfo(path, name)
                    entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, "", "", 0o600
                    with path.open("rb") as file:
                        archive.addfile(entry, file)
        except BrokenPipeError:
            raise
        except OSError as error:
            failed.append(error)


def _last(words: bytes) -> str:
    """Return the last line that a command said, as part of a sentence."""
    lines = words.decode(errors="replace").strip().splitlines()
    return plain(lines[-1].strip().rstrip(".")[:_MOST_WORDS]) if lines else "it does not say why"


def _plain(value: Any) -> Any:
    """Return JSON values of another machine with their texts as they may be shown, no more of them than are told."""
    if isinstance(value, dict):
        entries = itertools.islice(value.items(), _MOST_TEXTS)
        return {plain(key[:_MOST_WORDS]): _plain(entry) for key, entry in entries}
    if isinstance(value, list):
        numbers = all(isinstance(entry, int) for entry in value)
        return [_plain(entry) for entry in value[: _MOST_PROCESSORS if numbers else _MOST_TEXTS]]
    return plain(value[:_MOST_WORDS]) if isinstance(value, str) else value


def _require_sane(found: Environment) -> None:
    """Check the counts that a machine says of itself.

    Raises:
        ValueError: No machine has them.
    """
    places = all(0 <= place < _MOST_PROCESSORS for place in found.affinity)
    loads = all(0 <= load < _MOST_LOAD for load in found.load_average or ())
    memory, frequency = found.memory_bytes or 1, found.frequency_mhz or 1
    if not (0 < found.cores <= _MOST_PROCESSORS and places and loads and 0 < memory < 1 << 63 and 0 < frequency < 1e6):
        raise ValueError(found.cores)


def _described(targets: Sequence[str]) -> dict[str, Any]:
    """Return what this machine is, or why it lacks what a target needs."""
    if not targets:
        return {"environment": dataclasses.asdict(environment.current())}
    try:
        found = find_target(targets[0]).available()
    except PackageNotFoundError as error:
        return {"lacks": f"{error.name} is not installed (pip install {error.name})"}
    except UsageError as error:  # of another package
        return {"lacks": error.what}
    return {"lacks": "" if found.run else f"{found.reason} ({found.install})" if found.install else found.reason}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_described(sys.argv[1:])) + "\n")
