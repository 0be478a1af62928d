"""What of a page is executed, and what a page says is printed: the rules of CONTRIBUTING.md, "Write a page".

- A ``console`` block is executed: each line behind ``$ `` is a command (a backslash continues it), what stands below it
  is what it prints, standard error included. ``$ echo $?`` shows the exit code of the command before; without it that
  is 0.
- A ``python`` block is executed; those of one page share their names, in one process. A block whose first line is a
  comment with a file name, such as ``# net.py``, is written to that file in place of it, whatever its language.
- An ``output`` block is what the Python block before it prints.
- Behind the paragraph ``*Not executed by the tests: REASON.*`` a block is not.
- A page that says ``*Goes on in the folder of [TITLE](PAGE).*`` is executed behind that page, where it left off.

What is printed is compared line by line without blank lines, after :func:`masked`; ``...`` stands for any lines, or at
the end of a line for the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(`{3,})(\S*)\s*$")
_SKIPPED = re.compile(r"^\*Not executed by the tests: (.+)\.\*$")
_CONTINUES = re.compile(r"^\*Goes on in the folder of \[[^]]+\]\(([^)]+)\)\.\*$", re.MULTILINE)
_FILE = re.compile(r"^(?:#|//) (\w[\w.\-/]*\.\w+)$")
_NUMBER = re.compile(r"[±+−-]?\d[\d.,]*(e[+-]?\d+)?( ?(ns|µs|ms|s|[kMG]?B|k|M|%|dB|×|pp)(?![\w]))?")
_MEASURED = re.compile(r"measured \S+ on .*")
ELLIPSIS = "..."


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page, from the folder of pages.
        line: Where it starts.
        language: The word behind the fence.
        text: What it holds.
        skipped: Why it is not executed; empty where it is.
    """

    page: str
    line: int
    language: str
    text: str
    skipped: str = ""

    @property
    def place(self) -> str:
        """Page and line, as an editor opens them."""
        return f"docs/{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that it is written to; empty where it is none."""
        found = _FILE.match(self.text.partition("\n")[0])
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Command:
    """A command of a console block: its line, what it prints by the page, and the exit code."""

    line: str
    printed: str
    code: int


def blocks(path: Path, folder: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    skipped, fence, start, language, held = "", "", 0, "", list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = _FENCE.match(line)
        if not fence and found:
            fence, language, start, held = found.group(1), found.group(2), number, []
        elif fence and line.strip() == fence:
            yield Block(str(path.relative_to(folder)), start, language, "\n".join(held), skipped)
            fence, skipped = "", ""
        elif fence:
            held.append(line)
        elif line.strip():
            reason = _SKIPPED.match(line)
            skipped = reason.group(1) if reason else ""


def before(path: Path, folder: Path) -> str:
    """Return the page in whose folder a page goes on; empty where it has its own."""
    found = _CONTINUES.search(path.read_text(encoding="utf-8"))
    return str((path.parent / found.group(1)).resolve().relative_to(folder.resolve())) if found else ""


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a console block.

    >>> [(each.line, each.printed, each.code) for each in commands("$ true\\n$ ls a\\nno a\\n$ echo $?\\n2")]
    [('true', '', 0), ('ls a', 'no a', 2)]
    """
    entries: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            entries.append((line.removeprefix("$ "), []))
        else:
            entries[-1][1].append(line)
    for place, (line, printed) in enumerate(entries):
        after = entries[place + 1] if place + 1 < len(entries) else ("", ["0"])
        if line != "echo $?":
            yield Command(" ".join(line.split()), "\n".join(printed), int(after[1][0]) if after[0] == "echo $?" else 0)


def masked(text: str) -> list[str]:
    """Return the lines of an output with what differs from run to run taken out.

    Numbers, with their units, are ``#``; spaces and rules of tables count once; blank lines, the day and the processor
    are left out.

    >>> masked("onnx int8   13.7 µs  [13.6, 13.7]  50.3 dB\\n────────────\\n\\n9 layers")
    ['onnx int# # [# #] #', '─', '# layers']
    """
    text = _NUMBER.sub("#", _MEASURED.sub("measured", text))
    lines = (re.sub(r"─+", "─", re.sub(r"[ \t]+", " ", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


def difference(shown: str, found: str) -> str:
    """Return what an output has otherwise than a page shows; empty where nothing.

    >>> difference("one 1\\n...\\nthree 3 ...", "one 7\\ntwo\\nthree 5 and more")
    ''
    >>> difference("one", "two")
    'The page shows:\\n  one\\nand this is printed:\\n  two'
    """
    wanted, printed = masked(shown), masked(found)
    if _fits(wanted, printed):
        return ""
    sides = (("The page shows:", wanted), ("and this is printed:", printed))
    return "\n".join(line for title, lines in sides for line in (title, *(f"  {line}" for line in lines)))


def _fits(wanted: list[str], printed: list[str]) -> bool:
    """Say whether lines are those wanted, where ``...`` stands for any."""
    if not wanted:
        return not printed
    if wanted[0] == ELLIPSIS:
        return any(_fits(wanted[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and _alike(wanted[0], printed[0]) and _fits(wanted[1:], printed[1:])


def _alike(wanted: str, printed: str) -> bool:
    if wanted.endswith(ELLIPSIS):
        return printed.startswith(wanted.removesuffix(ELLIPSIS).rstrip())
    return wanted == printed
