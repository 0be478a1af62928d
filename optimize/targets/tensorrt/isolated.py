"""Build an engine in a child process, so that a native crash is a refusal and not the end of the user's run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from optimize.errors import Refused, TargetUnavailable
from optimize.targets.tensorrt.builder import Built, Layer, Order

_CHILD = "optimize.targets.tensorrt.builder"


def build(order: Order) -> Built:
    """Build an engine; ``order.engine`` may be left half-written when this raises.

    Raises:
        TargetUnavailable: The library cannot be imported.
        Refused: It does not accept the model, or crashed on it.
    """
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        asked, answered = Path(folder) / "order.json", Path(folder) / "reply.json"
        asked.write_text(json.dumps(dataclasses.asdict(order)), encoding="utf-8")
        done = _run(asked, answered)
        if done.returncode != 0 or not answered.exists():
            raise Refused(
                f"{order.title} crashed while building the engine ({_end(done)}).",
                hint="Try another version of it, or another target.",
            )
        reply = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in reply:
        raise (TargetUnavailable if reply["error"] == "TargetUnavailable" else Refused)(reply["what"])
    built = reply["built"]
    layers = tuple(Layer(**entry) for entry in built["layers"])
    return Built(built["version"], layers, tuple(built["warnings"]), built["build_s"])


def _run(asked: Path, answered: Path) -> subprocess.CompletedProcess[bytes]:
    # The child finds the modules this process finds, and none that lie in the current folder by chance (-P).
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(  # noqa: S603 - our own module in this interpreter, no shell
        [sys.executable, "-P", "-m", _CHILD, str(asked), str(answered)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )


def _end(done: subprocess.CompletedProcess[bytes]) -> str:
    code = done.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
    return f"{how}: {last}" if last else how
