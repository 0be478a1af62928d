"""A profile as a Chrome trace: open it at https://ui.perfetto.dev or in chrome://tracing.

The format is the Trace Event Format's JSON object: complete events (``"ph": "X"``) with times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimize.files import write_text
from optimize.profile.result import KernelProfile, Profile

_PROCESS, _RUN_THREAD, _KERNEL_THREAD = 1, 0, 1


def chrome_trace(found: Profile, model: str) -> dict[str, Any]:
    """Return the trace of one run: a track with the whole run, and one with its kernels under their layers' names.

    Args:
        model: What to call the process.
    """
    names = (("process_name", _RUN_THREAD, f"{model} on {found.target}"), ("thread_name", _RUN_THREAD, "run"))
    events = [_name(*entry) for entry in (*names, ("thread_name", _KERNEL_THREAD, "kernels"))]
    end_s = max((kernel.start_s + kernel.seconds for kernel in found.kernels), default=0.0)
    events.append(_event("run", _RUN_THREAD, 0.0, max(found.total_s, end_s), {"batch": found.batch}))
    events += [
        _event(label(kernel), _KERNEL_THREAD, kernel.start_s, kernel.seconds, _facts(kernel))
        for kernel in found.kernels
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"threads": found.threads}}


def write_trace(found: Profile, model: str, path: Path) -> None:
    """Write the trace whole or not at all.

    Raises:
        Refused: The file cannot be written.
    """
    write_text(path, json.dumps(chrome_trace(found, model), indent=1) + "\n")


def label(kernel: KernelProfile) -> str:
    """Return the layers a kernel computes, or what it is where it computes none."""
    return " + ".join(kernel.layers) or f"{kernel.op} for {' + '.join(kernel.serves) or 'the run'}"


def _facts(kernel: KernelProfile) -> dict[str, Any]:
    facts = {"kernel": kernel.name, "op": kernel.op, "dtype": kernel.dtype, "macs": kernel.macs}
    return {**facts, "moved_bytes": kernel.moved_bytes, "nodes": list(kernel.nodes)}


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _event(name: str, thread: int, start_s: float, duration_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * duration_s, 3)}
    return {"name": name, "cat": "kernel", "ph": "X", "pid": _PROCESS, "tid": thread, **times, "args": facts}
