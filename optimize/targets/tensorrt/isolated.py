"""Build an engine in a child process, so that a native crash is a refusal and not the end of the user's run."""

from __future__ import annotations

import dataclasses
import signal

from pydantic import TypeAdapter

from optimize import sandbox
from optimize.errors import Refused
from optimize.progress import tell
from optimize.sandbox import ChildLimits, Died, Unforeseen
from optimize.targets.tensorrt.order import Built, Order

_BUILD = "optimize.targets.tensorrt.builder:build_here"


def build(order: Order) -> Built:
    """Build an engine; ``order.engine`` may be left half-written when this raises.

    Raises:
        TargetUnavailable: The library cannot be imported, is too old, or finds no driver.
        Refused: It does not accept the model, runs out of memory, or crashed on it.
    """
    arguments, limits = {"order": dataclasses.asdict(order)}, ChildLimits.until(None)
    try:
        answer = sandbox.call(_BUILD, arguments, about=order.title, limits=limits, confined=False, progress=tell)
    except (Died, Unforeseen) as error:
        raise _crash(order, error) from error
    return TypeAdapter(Built).validate_python(answer.value)


def _crash(order: Order, error: Died | Unforeseen) -> Refused:
    hint = "Try another version of it, or another target."
    how = error.reason if isinstance(error, Unforeseen) else error.end
    if isinstance(error, Died) and error.code == -signal.SIGKILL:
        hint = "The system ends processes so when it runs out of memory: lower max_batch, or free memory."
    return Refused(f"{order.title} crashed while building the engine ({how}).", hint=hint)
