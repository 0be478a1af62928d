"""Mutated files of every kind, more of them each night, through the rules that open them, in one confined process."""

from pathlib import Path

import pytest

from tests.fuzzing import campaign, hostile
from tests.fuzzing.kinds import KINDS
from tests.fuzzing.watch import Watch

#: All runtimes are imported in the one process, and take addresses.
MEMORY_BYTES = 4 << 30


@pytest.fixture(scope="module", params=[100, pytest.param(300, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def tallies(cases: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, campaign.Tally]:
    for runtime in ("onnxruntime", "openvino"):
        pytest.importorskip(runtime)
    files = tmp_path_factory.mktemp("honest")
    campaign.prepare(files, list(KINDS))
    plan = [(kind, 0, cases) for kind in KINDS]
    return campaign.drive(plan, files, 0, deep=0, memory_bytes=MEMORY_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_refusal_comes_of_a_mutated_file(
    tallies: dict[str, campaign.Tally], cases: int, kind: str
) -> None:
    found = tallies[kind]
    assert found.broken == []
    assert found.cases == cases
    # Mutations that all fail at the first check, or all open, would test nothing.
    assert found.outcomes["refused"] > cases / 10 and found.outcomes["opened"] >= cases / 50


def test_code_of_a_file_would_be_seen(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.begin()
    for text in (text for text in hostile.TEXTS if hostile.SIGN in text):
        try:
            compile(text, "<string>", "exec")
        except (SyntaxError, ValueError):
            continue
    assert len(watch.end()) > 10
    watch.begin()
    with pytest.raises(FileNotFoundError):
        (tmp_path.parent / "none" / hostile.SIGN).read_text()
    (tmp_path / "own").write_text("x")
    (seen,) = watch.end()
    assert hostile.SIGN in seen
