import pytest


@pytest.fixture(autouse=True)
def rules_without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the rules of loading in this process: what they refuse must not depend on the walls around a confined one."""
    monkeypatch.setattr("optimize.sandbox.confine._confined", True)
