"""The commands and Python blocks of the pages do what the pages say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.execution import PAGES, Server, chains, execute, is_executed, written_pages
from tests.docs.pages import blocks


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.mark.parametrize("chain", chains(), ids=lambda chain: str(chain[0].relative_to(PAGES)))
def test_a_page_does_what_it_says(chain: list[Path], tmp_path: Path, server: Server) -> None:
    for page in chain:
        execute(page, tmp_path, server)


def test_every_block_that_is_not_executed_says_why() -> None:
    found = [block for page in written_pages() for block in blocks(page, PAGES) if block.skipped]
    assert {block.language for block in found} <= {"console", "python", "cpp", "bash"}
    for block in found:
        print(f"{block.place}: {block.skipped}")


def test_no_block_of_commands_is_forgotten() -> None:
    for page in written_pages():
        for block in blocks(page, PAGES):
            assert block.language, f"{block.place} names no language"
            assert block.language not in ("bash", "sh", "shell") or block.skipped, f"{block.place} is not executed"
            assert is_executed(block) or "$ " not in block.text.splitlines()[:1] or block.skipped, block.place
