"""A process that has imported what pages need, and forks for each command and each page: imports are half their time.

It reads requests as JSON, one a line, and answers so. ``{"argv": [...], "cwd": ..., "out": FILE}`` runs the command
line in a fork, its output in a file, and is answered by the exit code; ``{"cwd": ..., "socket": PATH}`` starts a fork
that reads blocks of Python from that socket, executes them, and says what each printed and how it failed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import pytest

#: Seconds after which a fork is ended.
_LIMIT_S = 300


def serve() -> None:
    """Answer requests until there are no more."""
    _import()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _leave(request)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if "argv" in request else pid
        print(json.dumps(code), flush=True)


def _import() -> None:
    """Import what nearly every page does; build torch.onnx's table of translations, which every export builds anew."""
    import onnxruntime  # noqa: F401
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    import optimize.targets.onnx.static
    import optimize.workflow  # noqa: F401
    from optimize.cli import keeper
    from optimize.report import console
    from tests.preloaded import fork_children, nursery

    nursery()  # one for all forks, which are not confined, that they may ask it
    keeper.can_confine = lambda: False
    fork_children(pytest.MonkeyPatch())
    console._LONG_S = 2.0 * _LIMIT_S  # a page shows no progress, however busy the machine is
    built = functools.cache(ONNXRegistry.from_torchlib)
    built()
    ONNXRegistry.from_torchlib = staticmethod(built)  # type: ignore[method-assign]
    gc.freeze()


def _leave(request: dict[str, Any]) -> NoReturn:
    """Do in a fork what is asked, and end it."""
    signal.alarm(_LIMIT_S)
    os.chdir(request["cwd"])
    code = 1
    with contextlib.suppress(BaseException):
        code = _run(request) if "argv" in request else _execute(request["socket"])
    sys.stdout.flush()
    os._exit(code)


def _run(request: dict[str, Any]) -> int:
    from optimize.cli import main

    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, descriptor)
    sys.argv = request["argv"]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _execute(path: str) -> int:
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with link.makefile("rw", encoding="utf-8") as file:
            for line in file:
                printed, failure = io.StringIO(), ""
                with contextlib.redirect_stdout(printed):
                    try:
                        exec(compile(json.loads(line), "<page>", "exec"), names)
                    except BaseException:
                        failure = traceback.format_exc()
                file.write(json.dumps([printed.getvalue(), failure]) + "\n")
                file.flush()
    return 0


if __name__ == "__main__":
    serve()
