"""Texts, one a line of JSON, as what a language model takes: tokens by the user's own tokenizer, padded and masked.

    {"text": "a fine film", "label": 1}
    {"text": "who wrote it?", "text_pair": "It was written in 1920.", "label": [3, 5]}

Where a model fixes the length, every text is padded to it, or cut and told of. Where it leaves the length free, texts
of like length go together, padded to the longest of them; a model without a mask would read padding as text, so that
only texts of one length go together there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize import texts
from optimize.data.conform import Batch, InputSpec, conform
from optimize.data.samples import Samples
from optimize.errors import Refused, UsageError
from optimize.regular import read_bytes, require_file, shown
from optimize.wording import plural

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

INSTALL = "pip install tokenizers"
_HINT = 'Write one object a line: {"text": "...", "label": 1}; "text_pair" and "label" may be left out.'
#: Texts among which those of like length are looked for, and how many of them go together.
_WINDOW, _GROUP = 256, 32
#: What tokenizers call padding where they do not say it.
_PADDING = ("[PAD]", "<pad>", "<|pad|>")


def is_json_lines(path: Path) -> bool:
    """Say whether a file begins as JSON lines do."""
    return read_bytes(path, first=64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def from_lines(path: Path, specs: Sequence[InputSpec], tokenizer: str) -> Samples:
    """Open texts, and encode all of them.

    Args:
        path: The lines.
        specs: What the model takes: tokens, and a mask and types by names that hold these words.
        tokenizer: The ``tokenizer.json`` of the package ``tokenizers``; empty where nobody says.

    Raises:
        UsageError: No tokenizer is named, or ``tokenizers`` is not installed, or the model takes something else.
        Refused: A file is damaged, or a line holds no text.
    """
    if not tokenizer:
        raise UsageError(f"'{shown(path)}' holds texts, and nothing says how they become tokens.", hint=_NO_TOKENIZER)
    roles, length = _roles(specs), _length(specs)
    lines = list(_lines(path))
    found = _opened(tokenizer, length)
    padding = _padding(found)
    found.no_padding()
    pairs = [(line["text"], line["text_pair"]) if "text_pair" in line else line["text"] for line in lines]
    encoded = found.encode_batch(pairs)
    cut = sum(bool(each.overflowing) for each in encoded)
    told = (
        f"{cut:,} of {plural(len(lines), 'text')} of '{path.name}' were cut to {length or _own_length(found)} tokens."
    )
    read = _Texts(str(path), tuple(specs), roles, encoded, _labels(lines, path), length, padding)
    return Samples(str(path), read.chunks, len(lines), notes=(told,) if cut else ())


_NO_TOKENIZER = "Name the model's own: --tokenizer tokenizer.json."


@dataclass(frozen=True)
class _Texts:
    """Encoded texts, and how they are put together.

    Attributes:
        name: What to call them.
        specs: What the model takes.
        roles: What each input is, ``ids``, ``attention_mask`` or ``type_ids``, in their order.
        encoded: The texts.
        labels: Theirs, or None.
        length: Of all, where the model fixes it.
        padding: The token of padding, and whether it stands on the left.
    """

    name: str
    specs: tuple[InputSpec, ...]
    roles: tuple[str, ...]
    encoded: Sequence[Encoding]
    labels: np.ndarray | None
    length: int | None
    padding: tuple[int, bool]

    def chunks(self) -> Iterator[Batch]:
        """Yield the texts, of like length together."""
        start = 0
        for places in self._groups():
            size = self.length or max(1, *(len(self.encoded[place]) for place in places))
            arrays = [self._array(role, places, size) for role in self.roles]
            labels = None if self.labels is None else self.labels[places]
            yield conform(arrays, labels, self.specs, self.name, start)
            start += len(places)

    def _groups(self) -> Iterator[list[int]]:
        """Yield the numbers of the texts that go together."""
        alone = "attention_mask" not in self.roles
        for start in range(0, len(self.encoded), _WINDOW):
            window = list(range(start, min(start + _WINDOW, len(self.encoded))))
            if self.length is None:
                window.sort(key=lambda place: len(self.encoded[place]))
            group: list[int] = []
            for place in window:
                other = group and len(self.encoded[place]) != len(self.encoded[group[0]])
                if len(group) == _GROUP or (other and alone and self.length is None):
                    yield group
                    group = []
                group.append(place)
            yield group

    def _array(self, role: str, places: Sequence[int], size: int) -> np.ndarray:
        token, is_left = self.padding
        found = np.full((len(places), size), token if role == "ids" else 0, np.int64)
        for line, place in zip(found, places, strict=True):
            values = getattr(self.encoded[place], role)
            line[slice(size - len(values), None) if is_left else slice(len(values))] = values
        return found


def _roles(specs: Sequence[InputSpec]) -> tuple[str, ...]:
    """Return what each input of a model is.

    Raises:
        UsageError: Not one is left for the tokens, or one has another rank.
    """
    roles = tuple(_role(spec.name.lower()) for spec in specs)
    if roles.count("ids") != 1 or len(set(roles)) < len(roles) or any(len(spec.shape) != 1 for spec in specs):
        listed = ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs)
        raise UsageError(
            f"Texts become tokens, a mask and types, each [N, length]; the model takes {listed}.",
            hint="Give package.module:callable that makes its inputs.",
        )
    return roles


def _role(name: str) -> str:
    if "mask" in name:
        return "attention_mask"
    return "type_ids" if "type" in name or "segment" in name else "ids"


def _length(specs: Sequence[InputSpec]) -> int | None:
    """Return the length that a model fixes; None where it is free.

    Raises:
        UsageError: It fixes several.
    """
    lengths = {size for spec in specs for size in spec.shape if size is not None}
    if len(lengths) > 1:
        raise UsageError(f"The model takes tokens, masks and types of different lengths: {sorted(lengths)}.")
    return next(iter(lengths), None)


def _opened(name: str, length: int | None) -> Tokenizer:
    """Open a tokenizer, and let it cut to a length.

    Raises:
        UsageError: ``tokenizers`` is not installed.
        Refused: The file is none of its.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would be in every process that is forked
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError("Texts need the package tokenizers, which is not installed.", hint=INSTALL) from error
    require_file(Path(name), most_bytes=texts.MOST_JSON_BYTES)
    try:
        found = Tokenizer.from_file(name)
        if length is not None:
            found.enable_truncation(length)
    except Exception as error:  # its errors have no class of their own
        raise Refused(f"'{shown(name)}' is no tokenizer that can be used: {shown(str(error))}.") from error
    return found


def _own_length(found: Tokenizer) -> int | None:
    truncation: Mapping[str, Any] = found.truncation or {}
    return truncation.get("max_length")


def _padding(found: Tokenizer) -> tuple[int, bool]:
    """Return the token of padding, 0 where there is none, and whether it stands on the left."""
    said: Mapping[str, Any] = found.padding or {}
    named = (token for text in _PADDING if (token := found.token_to_id(text)) is not None)
    return int(said.get("pad_id", next(named, 0))), said.get("direction") == "left"


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of the lines that are not blank.

    Raises:
        Refused: One is none, or has no text.
    """
    content = read_bytes(path, most_bytes=texts.MOST_JSON_BYTES)
    for number, line in enumerate(content.decode("utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            source = f"Line {number} of '{shown(path)}'"
            found = texts.parse_json(line, source=source, failure=Refused)
            said = [found.get(key, "") for key in ("text", "text_pair")] if isinstance(found, dict) else []
            if not said or "text" not in found or not all(isinstance(text, str) for text in said):
                raise Refused(f"{source} has no text.", hint=_HINT)
            yield found


def _labels(lines: Sequence[Mapping[str, Any]], path: Path) -> np.ndarray | None:
    """Return the labels of all lines as one array, lists of numbers padded with -1; None where no line has one.

    Raises:
        Refused: Some have none, or they are of several kinds.
    """
    found = [line["label"] for line in lines if line.get("label") is not None]
    if not found:
        return None
    if len(found) < len(lines):
        raise Refused(f"{len(found)} of the {len(lines)} lines of '{shown(path)}' have a label.", hint=_HINT)
    if all(isinstance(label, list) for label in found):
        longest = max(map(len, found))
        found = [[*label, *[-1] * (longest - len(label))] for label in found]
    kinds = {isinstance(label, str) for label in found}
    try:
        labels = np.array(found)
    except ValueError:
        labels = np.array(None)
    if len(kinds) > 1 or labels.dtype.kind not in "iufU" or not labels.size:
        raise Refused(f"The labels of '{shown(path)}' are not all numbers, lists of numbers, or texts.", hint=_HINT)
    return labels
