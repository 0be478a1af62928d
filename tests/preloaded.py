"""Children forked from a process that has imported torch: importing it takes seconds of each child of each command.

A child is a process of its own as any other, with its own rights, limits and end; what it finds imported is torch, and
nothing of this package. Tests of processes (their start, their memory, their walls) have them started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from optimize import sandbox, workers
from optimize.measure import fleet
from optimize.sandbox import process
from optimize.sandbox.process import module_path

#: Runtimes of torch, and what children do with torch.
_TARGETS = ("eager", "torchscript", "pt2", fleet.MODULE)
_FUNCTIONS = (
    "optimize.data.json_lines:encode",
    "optimize.load.taking:take",
    "optimize.targets.pt2.compiler:compile_here",
    "optimize.report.layers:compare_here",
    "optimize.profile.artifacts:profile_here",
    "tests.fuzzing.honest:build",
    "tests.fuzzing.batch:run",
)
_NUMBER_BYTES = 32


class Child:
    """A forked process, as ``subprocess.Popen`` has one: who forked it says how it ended."""

    def __init__(self, end: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._end, self.stdin, self.stdout = end, stdin, stdout
        self.pid = int(end.recv(_NUMBER_BYTES))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = int(self._end.recv(_NUMBER_BYTES) or -signal.SIGKILL)
            except TimeoutError:
                raise subprocess.TimeoutExpired("child", timeout or 0.0) from None
            self._end.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that has imported torch, and is asked for children."""

    def __init__(self) -> None:
        self._asked, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", str(Path(__file__).with_name("nursery.py")), str(there.fileno())]
        environment = {**os.environ, **dict.fromkeys(fleet.THREAD_VARIABLES, "1")}  # it may have one thread alone
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        there.close()

    def start(
        self,
        module: str,
        *arguments: str,
        stdin: int | IO[bytes],
        stderr: int | IO[bytes],
        variables: Mapping[str, str] | None = None,
        alone: bool = False,
    ) -> Child:
        """Fork a child, as ``optimize.sandbox.start`` starts one."""
        given, end = os.pipe(), os.pipe()
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: value for name, value in os.environ.items() if not alone or process._is_kept(name)}
        request = {
            "module": module,
            "arguments": arguments,
            "environment": {**kept, "PYTHONPATH": os.pathsep.join(module_path()), **(variables or {})},
            "path": module_path(),
            "folder": os.getcwd(),
            "alone": alone,
        }
        errors = stderr if isinstance(stderr, int) else stderr.fileno()
        socket.send_fds(self._asked, [json.dumps(request).encode()], [given[0], end[1], errors, its.fileno()])
        for number in (given[0], end[1]):
            os.close(number)
        its.close()
        return Child(mine, os.fdopen(given[1], "wb"), os.fdopen(end[0], "rb"))

    def close(self) -> None:
        self._asked.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process, which ends with it."""
    found = Nursery()
    atexit.register(found.close)
    return found


def fork_children(patch: pytest.MonkeyPatch) -> None:
    """Let children that import torch be forked from the nursery, all others be started as ever; on Linux."""
    if not sys.platform.startswith("linux"):
        return
    forking = False

    def in_turn(begin: Callable[..., Any], wanted: Callable[..., bool]) -> Callable[..., Any]:
        def begun(*words: Any, **fields: Any) -> Any:
            nonlocal forking
            before, forking = forking, wanted(*words, **fields)
            try:
                return begin(*words, **fields)
            finally:
                forking = before

        return begun

    def start(module: str, *arguments: str, **fields: Any) -> Any:
        if not forking:
            return process.start(module, *arguments, **fields)
        known = {name: fields[name] for name in ("stdin", "stderr", "variables", "alone") if name in fields}
        return nursery().start(module, *arguments, **known)

    def is_of_torch(session: fleet.Session, interpreter: Path | None, emulated: str) -> bool:
        return session.artifact.target in _TARGETS and session.threads == 1 and interpreter is None and not emulated

    def start_worker(module: str, *, variables: Mapping[str, str], **fields: Any) -> Any:
        begin = nursery().start if {*variables.values()} == {"1"} else process.start
        return begin(module, variables=variables, **fields)

    patch.setattr(workers, "start", start_worker)
    patch.setattr(importlib.import_module("optimize.sandbox.call"), "start", start)
    patch.setattr(fleet, "start", start)
    patch.setattr(fleet.Session, "_begin", in_turn(fleet.Session._begin, is_of_torch))
    patch.setattr(sandbox, "call", in_turn(sandbox.call, lambda function, *_, **__: function in _FUNCTIONS))
