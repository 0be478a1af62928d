"""The messages that the page of troubles lists are those that the program has."""

import re
from pathlib import Path

import pytest

from tests.docs.execution import PAGES, ROOT

_QUOTED = re.compile(r"(?<!\*)\*([^*]+)\*(?!\*)")
#: Where a text goes on in the next literal.
_JOINED = re.compile(r"\"\s*\n\s*f?\"")
_VALUE = re.compile(r"\{[^{}]*\}")
PAGE = PAGES / "howto" / "troubleshooting.md"


def quoted() -> list[str]:
    cells = (line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| *"))
    return [text for cell in cells for text in _QUOTED.findall(cell)]


@pytest.fixture(scope="module")
def source() -> str:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(ROOT / "optimize").rglob("*.py")))
    return _VALUE.sub("...", _JOINED.sub("", text))


@pytest.mark.parametrize("message", quoted())
def test_a_message_is_one_of_the_program(message: str, source: str) -> None:
    for part in filter(None, re.split(r"\.\.\.|\bN\b", message)):
        assert part.strip() in source, part
