"""Where a module spends time in Python, between its operators: cProfile over whole calls."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimize.measure.lockstep import Plan, take_turns

_RUNS = 20
_SHOWN = 12
_PLAN = Plan(restarts=1, rounds=1, settle=False, warm_up={"runs": 1, "seconds": 0.0})


@dataclass(frozen=True)
class PythonFunction:
    """One function in the profile.

    Attributes:
        name: Where it is written and what it is called, such as ``conv.py:553 forward``.
        calls: Calls in one run of the module.
        own_s: Seconds of one run spent in it and not in what it calls.
        is_python: Whether it is written in Python; operators and other built-ins are not.
    """

    name: str
    calls: float
    own_s: float
    is_python: bool


@dataclass(frozen=True)
class PythonCost:
    """What Python costs in one run of a module.

    Attributes:
        own_share: Share of the profiled time that is spent in functions written in Python. The profiler makes each call
            dearer, so it is an upper bound.
        total_s: Lower quartile of a run without the profiler.
        functions: Those that take the most, the dearest first.
    """

    own_share: float
    total_s: float
    functions: tuple[PythonFunction, ...]


def python_cost(call: Callable[[], object], *, runs: int = _RUNS) -> PythonCost:
    """Profile calls of a module and return where Python takes time."""
    ((block,),) = take_turns([call], replace(_PLAN, block_runs=(runs,)))
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(runs):
        call()
    profiler.disable()
    found = sorted(_functions(pstats.Stats(profiler), runs), key=lambda entry: -entry.own_s)
    whole = sum(entry.own_s for entry in found)
    own = sum(entry.own_s for entry in found if entry.is_python)
    return PythonCost(own / whole if whole else 0.0, sorted(block.samples_s)[runs // 4], tuple(found[:_SHOWN]))


def _functions(stats: pstats.Stats, runs: int) -> list[PythonFunction]:
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = stats.stats  # type: ignore[attr-defined]
    return [
        PythonFunction(_name(*place), calls / runs, own_s / runs, is_python=place[0] != "~")
        for place, (_, calls, own_s, _, _) in entries.items()
    ]


def _name(file: str, line: int, function: str) -> str:
    """Return where a function is written, without the folders.

    >>> _name("/lib/torch/nn/modules/conv.py", 553, "forward"), _name("~", 0, "<built-in method torch.conv2d>")
    ('conv.py:553 forward', 'torch.conv2d')
    """
    if file == "~":
        return function.removeprefix("<").removesuffix(">").removeprefix("built-in method ")
    return f"{Path(file).name}:{line} {function}"
