"""Counters that are there, full, unreadable or absent."""

from pathlib import Path

import pytest

from optimize.measure import energy
from optimize.measure.energy import GpuPower, Rapl, find_meter


def counter(folder: Path, name: str, value: int) -> Path:
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "max_energy_range_uj").write_text("1000000\n")
    (place / "energy_uj").write_text(f"{value}\n")
    return place / "energy_uj"


def test_packages_are_added_and_a_full_counter_starts_again(tmp_path: Path) -> None:
    one, other = counter(tmp_path, "intel-rapl:0", 100), counter(tmp_path, "intel-rapl:1", 999_000)
    counter(tmp_path, "intel-rapl:0:0", 5)  # a part of package 0 that is in it already
    meter, source = find_meter("cpu", tmp_path)
    assert isinstance(meter, Rapl) and meter.counters == (one, other) and source == meter.source
    assert meter.joules() == 0.0
    one.write_text("500100"), other.write_text("999")
    assert meter.joules() == pytest.approx(0.5 + 0.001999)


def test_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_meter("cpu", tmp_path) == (None, f"not offered: no RAPL counter under {tmp_path}")
    counter(tmp_path, "intel-rapl:0", 100).write_text("")
    assert "root alone" in find_meter("cpu", tmp_path)[1]
    monkeypatch.setattr(energy.shutil, "which", lambda name: None)
    assert find_meter("cuda") == (None, "not offered: nvidia-smi reports no power")


def test_power_times_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr(energy.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(energy, "gpu_watts", lambda command: 100.0)
    meter = GpuPower("nvidia-smi")
    assert [meter.joules(), meter.joules(), meter.joules()] == [0.0, 50.0, 250.0]
