"""This machine's limits are measured, and the roofline follows from them."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from optimize.profile import machine
from optimize.profile.machine import measure_limits, torch_threads
from tests.profile.nets import LIMITS


def test_limits_are_measured_and_threads_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that every look finds half a second later, so that everything that is timed takes that long."""
    looks = itertools.count()
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 2))
    before = torch.get_num_threads()
    found = measure_limits(1)
    assert torch.get_num_threads() == before and found.threads == 1
    assert {"float32", "bfloat16"} <= set(found.macs_per_s) and set(found.macs_per_s.values()) == {2 * 512**3}
    assert found.copy_bytes_per_s == 2 * 2 * 128 * 2**20 and found.call_s == 0.5 / 500
    with pytest.raises(ValueError), torch_threads(2):
        raise ValueError
    assert torch.get_num_threads() == before


def test_the_roofline() -> None:
    assert LIMITS.ridge("float32") == 2.5 and LIMITS.ridge("int8") == 10.0
    assert LIMITS.attainable(1.0, "float32") == 20e9 and LIMITS.attainable(100.0, "float32") == 50e9
    assert [LIMITS.bound(5.0, dtype) for dtype in ("float32", "int8")] == ["compute", "memory"]
    assert LIMITS.peak("float64") == LIMITS.peak("float32")
    assert LIMITS.least_s(50_000_000, 8) == pytest.approx(1e-3)
    assert LIMITS.least_s(8, 20_000_000) == pytest.approx(1e-3)
