"""The target for tests that scales, crashes or hangs as told, and pairs of its files."""

import functools
from collections.abc import Callable

import pytest

from optimize.gate import case as cases
from optimize.measure.subjects import AgreedPair, Subject, agreed_pair
from optimize.targets.base import Artifact
from tests.measure.conftest import make, short_warm_up

__all__ = ["make", "short_warm_up"]
Make = Callable[..., Artifact]


@pytest.fixture
def pair(make: Make) -> Callable[..., AgreedPair]:
    """Returns a function that makes a pair from the behaviours of its sides."""

    def build(base: dict[str, object], candidate: dict[str, object]) -> AgreedPair:
        subjects = [Subject(name, name, make(**told)) for name, told in (("base", base), ("candidate", candidate))]
        return agreed_pair(*subjects, None)

    return build


@pytest.fixture
def models(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that gives names to behaviours: a case that names them is opened as those."""

    return functools.partial(name, make, monkeypatch)


def name(make: Make, patch: pytest.MonkeyPatch, **behaviours: dict[str, object]) -> None:
    """Gives names to behaviours as long as something is patched."""
    subjects = {key: Subject(key, "arithmetic", make(**told)) for key, told in behaviours.items()}
    patch.setattr(cases, "open_model", lambda source, opening, input_shape: subjects[source])
