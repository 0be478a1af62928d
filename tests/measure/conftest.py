"""Makes the test target importable, here and in the workers, and takes it out of the registry again."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from optimize import registry
from optimize.measure import lockstep
from optimize.measure.runs import Block
from optimize.targets.base import Artifact

#: More seconds than any machine needs: what ends a measurement is never the clock.
AMPLE_S = 3600.0


@contextmanager
def making(folder: Path) -> Iterator[Callable[..., Artifact]]:
    """Yields a function that writes an artifact with a behaviour into a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        module = importlib.import_module("arithmetic_target")
        registry._targets.pop(module.NAME, None)  # the first import registers it
        patch.setitem(registry._targets, module.NAME, module.ArithmeticTarget())
        count = iter(range(100))
        yield lambda **behaviour: module.artifact(folder / f"{next(count)}.json", **behaviour)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Artifact]]:
    """Returns a function that writes an artifact with a behaviour."""
    with making(tmp_path) as write:
        yield write


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "WARM_UP", {"runs": 3, "seconds": 0.0, "cap_s": AMPLE_S})


def side(cpu_s: float, stretch: float = 1.0, spread: float = 0.0, seed: int = 0, **fields: object) -> list[Block]:
    """Return 40 rounds of 3 runs whose wall time is stretched by the factor, times one drawn for each round."""
    draws, found = np.random.default_rng(seed), []
    for at in range(40):
        runs = cpu_s * (1 + 0.01 * draws.standard_normal(3))
        wall = runs * stretch * np.exp(spread * draws.standard_normal())
        counted = {"preempted": 1} | fields
        found.append(Block(0, at, tuple(wall.tolist()), tuple(runs.tolist()), float(wall.sum()), **counted))  # type: ignore[arg-type]
    return found
