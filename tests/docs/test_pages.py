"""The commands and Python blocks of the pages do what the pages say."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimize import registry
from tests.docs.execution import PAGES, Server, chains, execute, is_executed, written_pages
from tests.docs.pages import Block, blocks
from tests.slow import but_slowly


def left_out() -> list[Block]:
    return [block for page in written_pages() for block in blocks(page, PAGES) if block.skipped]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


#: Pages of what has tests of its own: kinds of models, and commands that measure.
TOLD = ["models/detection", "models/encoder", "models/recurrent", "models/segmentation", "models/vit", "measure"]
CHAINS = chains()


@pytest.mark.parametrize(
    "chain",
    but_slowly(CHAINS, [chain for chain in CHAINS if chain[0] in [PAGES / f"howto/{name}.md" for name in TOLD]]),
    ids=lambda chain: str(chain[0].relative_to(PAGES)),
)
def test_a_page_does_what_it_says(chain: list[Path], tmp_path: Path, server: Server) -> None:
    for page in chain:
        execute(page, tmp_path, server)


@pytest.mark.parametrize("block", left_out(), ids=lambda block: block.place)
def test_a_block_that_is_not_executed(block: Block) -> None:
    """Lists it with its reason: pytest -rs tests/docs."""
    assert block.language in ("console", "python", "cpp")
    pytest.skip(f"{block.place}: {block.skipped}")


def test_no_block_of_commands_is_forgotten() -> None:
    for page in written_pages():
        for block in blocks(page, PAGES):
            assert block.language, f"{block.place} names no language"
            assert block.language not in ("bash", "sh", "shell") or block.skipped, f"{block.place} is not executed"
            assert is_executed(block) or "$ " not in block.text.splitlines()[:1] or block.skipped, block.place


def test_every_target_has_a_page() -> None:
    folder = PAGES / "howto" / "targets"
    text = "\n".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md") if page.name != "index.md")
    assert not [name for name in registry.targets() if not re.search(rf"`(--to )?{name}`", text)]


def test_every_file_of_the_package_that_is_named_is_there() -> None:
    package = PAGES.parent / "optimize"
    rooms = "|".join(sorted(path.name for path in package.iterdir() if path.is_dir()))
    pages = [*written_pages(), *PAGES.parent.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {*re.findall(rf"`(?:optimize/)?((?:{rooms})/[a-z0-9_/]+\.py)`", text)}
    examples = {"passes/drop_identity_scale.py"}  # what CONTRIBUTING.md shows how to write
    assert len(named) > 20
    assert not [path for path in named - examples if not (package / path).is_file()]
