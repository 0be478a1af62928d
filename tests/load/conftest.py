from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def rules_without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the rules of loading in this process: what they refuse must not depend on the walls around a confined one."""
    monkeypatch.setattr("optimize.sandbox.is_confined", lambda: True)  # children are started all the same


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that the attack would make; the test fails if it does."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "code of the file was run"
