"""Makes the test target importable, here and in the workers, and takes it out of the registry again."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimize import registry
from optimize.measure import lockstep
from optimize.targets.base import Artifact

#: More seconds than any machine needs: what ends a measurement is never the clock.
AMPLE_S = 3600.0


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Artifact]]:
    """Returns a function that writes an artifact with a behaviour."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("arithmetic_target")
    registry._targets[module.NAME] = module.ArithmeticTarget()
    count = iter(range(100))
    yield lambda **behaviour: module.artifact(tmp_path / f"{next(count)}.json", **behaviour)
    registry._targets.pop(module.NAME)


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "WARM_UP", {"runs": 3, "seconds": 0.0, "cap_s": AMPLE_S})
