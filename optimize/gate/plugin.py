"""The gate in pytest: a fixture that compares two models and fails, skips or passes the test.

Installed with the package, so that a test only names the fixture:

    def test_int8_is_no_slower(optimize_check):
        optimize_check("baselines/net.onnx", "build/net.onnx", max_regression="5%", eval="data/eval.npz")

What is asked comes from ``[tool.optimize.check]`` of the project's pyproject.toml; keywords win over it. Each call has
the error rates for itself: where many tests gate, divide ``alpha`` by their number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from optimize.gate.record import CaseRecord, Record


@pytest.fixture
def optimize_check(request: pytest.FixtureRequest) -> Callable[..., CaseRecord]:
    """Return ``check(base, candidate, **keys) -> CaseRecord``; the keys are those of ``limits.Case`` and ``Settings``.

    A failure fails the test, models that cannot be compared fail it too, an inconclusive comparison skips it unless
    ``on_inconclusive`` says otherwise, and a warning is a warning. The ratio and the verdict become properties of the
    test, which ``--junit-xml`` writes.
    """

    def check(base: str | Path, candidate: str | Path, *, trust: bool = False, **keys: Any) -> CaseRecord:
        from optimize.gate import limits, suite

        folder = request.config.rootpath
        path = limits.find(folder)
        content = {**(limits.read(path) if path else {}), **keys}
        pair = {"base": str(base), "candidate": str(candidate)}
        settings = limits.settings(
            content, given={"cases": [pair]}, source=f"optimize_check, with {path}" if path else "optimize_check"
        )
        located = tuple(limits.located(case, folder) for case in settings.cases)
        record = suite.check(settings.model_copy(update={"cases": located}), trust=trust, command=request.node.nodeid)
        _conclude(record, request.node)
        return record.cases[0]

    return check


def _conclude(record: Record, test: pytest.Item) -> None:
    """Write down the verdict, and end the test with it."""
    from optimize.escaping import plain
    from optimize.gate import wording
    from optimize.gate.verdict import Verdict

    case = record.cases[0]
    test.user_properties.append(("verdict", case.verdict.value))
    if case.time is not None:
        test.user_properties.append(("ratio", wording.ratio(case.time.ratio)))
    text = f"{plain(case.name)}: {wording.verdict(case.verdict)}: {wording.message(case)}"
    if case.verdict is Verdict.INCONCLUSIVE and record.on_inconclusive == "keep":
        pytest.skip(text)
    if record.exit_code:
        pytest.fail("\n".join([text, *wording.details(case)]), pytrace=False)
    if case.verdict is Verdict.WARN:
        warnings.warn(text, stacklevel=3)
