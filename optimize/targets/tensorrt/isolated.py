"""Build an engine in a child process, so that a native crash is a refusal and not the end of the user's run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimize.errors import OptimizeError, Refused, TargetUnavailable
from optimize.targets.base import LayerTypes, TypedLayer
from optimize.targets.tensorrt.layers import Layer
from optimize.targets.tensorrt.order import Built, Order

_CHILD = "optimize.targets.tensorrt.builder"


def build(order: Order, tell: Callable[[float], None] = lambda share: None) -> Built:
    """Build an engine; ``order.engine`` may be left half-written when this raises.

    Args:
        order: What to build.
        tell: Told the share that is done, from 0 to 1.

    Raises:
        TargetUnavailable: The library cannot be imported, is too old, or finds no driver.
        Refused: It does not accept the model, runs out of memory, or crashed on it.
    """
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        asked, answered, errors = (Path(folder) / name for name in ("order.json", "reply.json", "stderr"))
        asked.write_text(json.dumps(dataclasses.asdict(order)), encoding="utf-8")
        code = _run(asked, answered, errors, tell)
        if code != 0 or not answered.exists():
            raise _crash(order, code, errors.read_text(encoding="utf-8", errors="replace"))
        reply = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in reply:
        raised: type[OptimizeError] = TargetUnavailable if reply["error"] == "TargetUnavailable" else Refused
        raise raised(reply["what"], hint=reply["hint"])
    return _built(reply["built"])


def _run(asked: Path, answered: Path, errors: Path, tell: Callable[[float], None]) -> int:
    # The child finds the modules this process finds, and none that lie in the current folder by chance (-P).
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(  # noqa: S603 - our own module in this interpreter, no shell
            [sys.executable, "-P", "-m", _CHILD, str(asked), str(answered)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": search},
            encoding="utf-8",
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                tell(float(line))
        except BaseException:  # Ctrl-C: the build is of no use to anyone any more
            child.kill()
            raise
    return child.returncode


def _built(reply: dict[str, Any]) -> Built:
    types = reply["types"]
    return Built(
        version=reply["version"],
        layers=tuple(Layer(**entry) for entry in reply["layers"]),
        types=LayerTypes(types["source"], tuple(TypedLayer(**entry) for entry in types["layers"])),
        warnings=tuple(reply["warnings"]),
        build_s=reply["build_s"],
        inputs=tuple(reply["inputs"]),
        outputs=tuple(reply["outputs"]),
    )


def _crash(order: Order, code: int, stderr: str) -> Refused:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = (stderr.strip().splitlines() or [""])[-1][:200]
    hint = "Try another version of it, or another target."
    if code == -signal.SIGKILL:
        hint = "The system ends processes so when it runs out of memory: lower max_batch, or free memory."
    what = f"{order.title} crashed while building the engine ({how}{': ' if last else ''}{last})."
    return Refused(what, hint=hint)
