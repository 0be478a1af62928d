"""What takes long because it must, and has another of its kind that is run each time, is run each night."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def but_slowly(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return values as parameters, those that ``slow`` holds for slow tests."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (value in slow)) for value in values]
