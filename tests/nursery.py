"""A process that imports torch once, and forks a child for each request on the socket whose number it is started with.

It knows nothing of this package: `preloaded.py` asks it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time

_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def main(asked: socket.socket) -> None:
    """Fork what is asked for until nobody is there to ask."""
    gc.disable()  # what is imported stays
    for name in ("numpy", "torch._dynamo", "torch._export.serde.serialize", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) == 1:
            break
        time.sleep(0.01)  # some builds of torch start a thread that ends
    else:
        raise RuntimeError("A fork would lack the other threads.")
    while True:
        words, numbers, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not words:
            return
        if not os.fork():
            asked.close()
            _mind(json.loads(words), *numbers)
            return
        for number in numbers:
            os.close(number)


def _mind(request: dict, stdin: int, stdout: int, stderr: int, told: int) -> None:
    """Fork the child, tell its number and, when it has ended, how."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if not child:
        for number, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(number, place)
        os.closerange(3, max(stdin, stdout, stderr, told) + 1)
        _begin(request)
        return
    for number in (stdin, stdout, stderr):
        os.close(number)
    with contextlib.suppress(OSError):
        os.write(told, b"%d\n" % child)
        os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def _begin(request: dict) -> None:
    """Run a module as the program of this process."""
    if request["alone"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    sys.path_importer_cache.clear()
    sys.argv[1:] = request["arguments"]
    tempfile.tempdir = None
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
