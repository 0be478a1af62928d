"""Compile in a child process: inductor starts compilers and worker processes, keeps caches, and can run for long."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.errors import Refused
from optimize.files import whole

if TYPE_CHECKING:
    import torch

_CHILD = "optimize.targets.pt2.compiler"
#: The largest networks take a minute; what is not done by then hangs.
LIMIT_S = 1800.0


def compile_package(exported: torch.export.ExportedProgram, path: Path, *, limit_s: float = LIMIT_S) -> None:
    """Compile an exported program to the package ``path``, whole or not at all.

    Inductor's cache lives in a temporary folder that is removed; precompiled headers of torch stay in the system's
    temporary folder, where torch keeps them for all processes of a user.

    Raises:
        Refused: Inductor or the C++ compiler refuses the program, crashes or takes too long.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        program, package = Path(folder) / "program.pt2", Path(folder) / "model.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(exported, program)
        try:
            done = _run(program, package, Path(folder) / "cache", limit_s)
        except subprocess.TimeoutExpired as error:
            raise Refused(f"Inductor was still compiling after {limit_s:.0f} s.", hint="Choose onnx.") from error
        if done.returncode != 0 or not package.exists():
            raise Refused(f"Inductor cannot compile the program ({_end(done)}).", hint="Choose onnx or torchscript.")
        with whole(path) as temporary:
            shutil.copyfile(package, temporary)


def _run(program: Path, package: Path, cache: Path, limit_s: float) -> subprocess.CompletedProcess[bytes]:
    # The child finds the modules this process finds, and none that lie in the current folder by chance (-P).
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(  # noqa: S603 - our own module in this interpreter, no shell
        [sys.executable, "-P", "-W", "ignore", "-m", _CHILD, str(program), str(package)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": search, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        timeout=limit_s,
        check=False,
    )


def _end(done: subprocess.CompletedProcess[bytes]) -> str:
    code = done.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
    return f"{how}: {last}" if last else how
