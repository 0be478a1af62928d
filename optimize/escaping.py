r"""How text that comes from a file or a name is shown: none of it reaches a terminal, a log or a page as a command.

Layer names, operators, file names and the messages of other libraries are whatever somebody put into a file. Control
characters, escape sequences, marks that reverse the direction of writing and bytes that are no text are written as
Python writes them (``\x1b``, ``\u202e``). Two colons before a word that a CI runner obeys are written so too, wherever
they stand: a terminal may break the line there.
"""

from __future__ import annotations

import json
import re

#: What GitHub takes for a command at the start of a line, and Azure, TeamCity and old runners (``##[``) within one.
_COMMANDS = re.compile(
    r":(?=:(?:error|warning|notice|debug|group|endgroup|echo|stop-commands|(?:add|remove|save|set|internal-set)-[a-z-]+)"
    r"(?![\w-]))|#(?=#\w*\[)",
    re.IGNORECASE,
)
#: Letters, marks and signs that are blank, and selectors of variants: Python counts them among what is printed.
_BLANK = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
#: What may be unseen in JSON: its own writers leave no control characters of ASCII but one.
_UNUSUAL = re.compile(r"[^\n\x20-\x7e]")
_LONGEST_WORD, _LONGEST_TEXT = 300, 3000


def plain(text: str) -> str:
    r"""Return text on one line in which everything that is not seen is written out.

    >>> print(plain("a\x1b[31mb\nc \u202edl\udcff"))
    a\x1b[31mb\nc \u202edl\udcff
    >>> print(plain("::error::owned"), plain("aten::relu"))
    \x3a:error::owned aten::relu
    """
    seen = text if text.isprintable() and not _BLANK.search(text) else "".join(map(_written, text))
    return _COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", seen)


def plain_lines(text: str) -> str:
    r"""Return text of several lines with each of them plain.

    >>> plain_lines("a\nb\r\x07")
    'a\nb\\r\\x07'
    """
    return "\n".join(map(plain, text.split("\n")))


def plain_json(text: str) -> str:
    r"""Return JSON of the same meaning in which everything that is not seen is written out, in JSON's own escapes.

    >>> print(plain_json('{\n"a\u202eb": "##[error]µ"}'))
    {
    "a\u202eb": "\u0023#[error]µ"}
    """
    seen = _UNUSUAL.sub(lambda found: found[0] if _is_seen(found[0]) else json.dumps(found[0])[1:-1], text)
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", seen)


def shortened(text: str) -> str:
    """Return text whose endless words (a number of 5,000 digits) are left out in the middle, as is an endless text's.

    >>> len(shortened("9" * 5000)), len(shortened("a " * 100_000))
    (300, 3000)
    """
    text = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], _LONGEST_WORD), text)
    return text if len(text) <= _LONGEST_TEXT else _without_middle(text, _LONGEST_TEXT)


def _without_middle(text: str, length: int) -> str:
    return f"{text[: length // 2 - 1]}…{text[-(length // 2) :]}"


def _written(char: str) -> str:
    """Return a character as it is where it is seen, else its escape."""
    return char if _is_seen(char) else char.encode("unicode_escape").decode("ascii")


def _is_seen(char: str) -> bool:
    return char.isprintable() and not _BLANK.match(char)
