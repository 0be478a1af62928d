"""Texts, one a line of JSON, as what a language model takes: tokens by the user's own tokenizer, padded and masked.

    {"text": "a fine film", "label": 1}
    {"text": "who wrote it?", "text_pair": "It was written in 1920.", "label": [3, 5]}

Where a model fixes the length, every text is padded to it, or cut and told of. Where it leaves the length free, texts
of like length go together, padded to the longest of them; a model without a mask would read padding as text, so that
only texts of one length go together there.

A tokenizer is a program of rules that somebody else wrote, which may run for ever, or take all memory: it is opened and
run in a confined process (`encode`), and what comes back are numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize import sandbox, texts
from optimize.bounds import CountRange
from optimize.data.array_files import Members
from optimize.data.conform import Batch, InputSpec, conform
from optimize.data.samples import Samples
from optimize.errors import Refused, UsageError, lacks_memory
from optimize.progress import Progress
from optimize.regular import find, read_bytes, require_file, shown
from optimize.wording import plural

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INSTALL = "pip install tokenizers"
_HINT = 'Write one object a line: {"text": "...", "label": 1}; "text_pair" and "label" may be left out.'
_FEWER = "Give fewer texts, or shorter ones."
#: Bytes of a file; tokens of all its texts, or labels with what makes them of one length: 65,000 texts of 512.
_MOST_BYTES, _MOST_VALUES = 2**28, 2**25
#: Tokens of one text where the model cuts none, and of those that go together, with padding.
_LONGEST, _MOST_TOGETHER = 2**20, 2**22
#: Texts among which those of like length are looked for, and how many of them go together.
_WINDOW, _GROUP = 256, 32
#: What tokenizers call padding where they do not say it.
_PADDING = ("[PAD]", "<pad>", "<|pad|>")
#: The file in which the confined process leaves its arrays.
_ARRAYS, _MOST_LEFT_BYTES = "texts.npz", 2**30


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
    with sandbox.own_folder() as folder:
        answer = sandbox.call(
            "optimize.data.json_lines:encode",
            {"path": str(path), "tokenizer": tokenizer, "length": length},
            Path(folder),
            about=f"'{shown(path)}' with the tokenizer '{shown(tokenizer)}'",
            limits=sandbox.ChildLimits.of([path, Path(tokenizer)]),
        )
        found = _left(Path(folder), length)
    try:
        cut, kept, token, is_left = (CountRange("a number", 0, 2**32 - 1)(int(said)) for said in answer.value)
    except (TypeError, ValueError) as error:
        raise Refused("The process that encoded the texts gave no answer.") from error
    read = _Texts(str(path), tuple(specs), roles, *found, length, (token, bool(is_left)))
    count = len(read.starts) - 1
    told = f"{cut:,} of {plural(count, 'text')} of '{path.name}' were cut to {length or kept} tokens."
    lacking = (f"The texts were encoded with {missing}." for missing in answer.missing)
    return Samples(str(path), read.chunks, count, notes=(*((told,) if cut else ()), *lacking))


_NO_TOKENIZER = "Name the model's own: --tokenizer tokenizer.json."


@dataclass(frozen=True)
class _Texts:
    """Encoded texts, and how they are put together.

    Attributes:
        name: What to call them.
        specs: What the model takes.
        roles: What each input is, ``ids``, ``attention_mask`` or ``type_ids``, in their order.
        ids: The tokens of all texts, one text behind the other.
        type_ids: The type of each token.
        starts: Where each text begins, and where the last one ends.
        labels: Of the texts, or None.
        length: Of all, where the model fixes it.
        padding: The token of padding, and whether it stands on the left.
    """

    name: str
    specs: tuple[InputSpec, ...]
    roles: tuple[str, ...]
    ids: np.ndarray
    type_ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray | None
    length: int | None
    padding: tuple[int, bool]

    def chunks(self) -> Iterator[Batch]:
        """Yield the texts, of like length together."""
        start, lengths = 0, np.diff(self.starts)
        for places in self._groups(lengths):
            size = self.length or max(1, int(lengths[places].max()))
            arrays = [self._array(role, places, size) for role in self.roles]
            labels = None if self.labels is None else self.labels[places]
            yield conform(arrays, labels, self.specs, self.name, start)
            start += len(places)

    def _groups(self, lengths: np.ndarray) -> Iterator[list[int]]:
        """Yield the numbers of the texts that go together."""
        alone = "attention_mask" not in self.roles
        for start in range(0, len(lengths), _WINDOW):
            window = list(range(start, min(start + _WINDOW, len(lengths))))
            if self.length is None:
                window.sort(key=lambda place: int(lengths[place]))
            group: list[int] = []
            for place in window:
                other = group and lengths[place] != lengths[group[0]]
                large = (len(group) + 1) * (self.length or int(lengths[place])) > _MOST_TOGETHER
                if group and (len(group) == _GROUP or large or (other and alone and self.length is None)):
                    yield group
                    group = []
                group.append(place)
            yield group

    def _array(self, role: str, places: Sequence[int], size: int) -> np.ndarray:
        token, is_left = self.padding
        found = np.full((len(places), size), token if role == "ids" else 0, np.int64)
        for line, place in zip(found, places, strict=True):
            part = slice(self.starts[place], self.starts[place + 1])
            values = 1 if role == "attention_mask" else getattr(self, role)[part]
            count = part.stop - part.start
            line[slice(size - count, None) if is_left else slice(count)] = values
        return found


def _left(folder: Path, length: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the tokens, their types, where texts start and the labels that `encode` left, which may be anything.

    Raises:
        Refused: They do not fit each other.
    """
    with sandbox.left_in(folder, _ARRAYS, most_bytes=_MOST_LEFT_BYTES) as file:
        arrays = Members(file, _ARRAYS)
        found = [arrays[name] for name in ("ids", "type_ids", "lengths", "labels") if name in arrays]
    kinds = "".join(array.dtype.kind for array in found)
    if kinds[:3] == "uui" and kinds[3:] in {"", *"iufU"} and found[2].ndim == 1 and found[-1].ndim:
        ids, types, lengths = found[:3]
        labels = found[3] if len(found) > 3 else None
        starts = np.concatenate([[0], lengths.cumsum()])
        bounded = bool(((lengths >= 0) & (lengths <= (length or _LONGEST))).all())
        if bounded and ids.shape == types.shape == (starts[-1],) and len(found[-1]) == len(lengths):
            return ids, types, starts, labels
    raise Refused("The process that encoded the texts gave arrays that do not fit each other.")


def encode(folder: Path, tell: Progress, path: str, tokenizer: str, length: int | None) -> list[int]:
    """Encode all texts in this, confined, process; leave tokens, types, lengths and labels in ``folder``.

    Returns:
        How many texts were cut, to how many tokens, the token of padding, and whether it stands on the left.

    Raises:
        UsageError: ``tokenizers`` is not installed.
        Refused: A file is damaged, a line holds no text, or the texts or their labels are too many.
    """
    found = _opened(tokenizer, length)
    with _used(tokenizer):
        (token, is_left), kept = _padding(found), _own_length(found) or 0
        found.no_padding()
    parts: list[list[np.ndarray]] = [[], []]
    lengths, given, cut, total = list[int](), list[Any](), 0, 0
    for line in _lines(Path(path)):
        with _used(tokenizer):
            encoded = found.encode(line["text"], line.get("text_pair"))
        for part, values in zip(parts, (encoded.ids, encoded.type_ids), strict=True):
            part.append(np.array(values, np.uint32))
        lengths.append(len(encoded))
        given.append(line.get("label"))
        cut += bool(encoded.overflowing)
        if (length is None and lengths[-1] > _LONGEST) or (total := total + lengths[-1]) > _MOST_VALUES:
            most = f"{_LONGEST:,} tokens, and all of them {_MOST_VALUES:,}"
            raise Refused(f"A text may have {most}; those of '{shown(path)}' have more.", hint=_FEWER)
    ids, types = (np.concatenate([np.empty(0, np.uint32), *part]) for part in parts)
    labels = _labels(given, Path(path))
    more: dict[str, Any] = {} if labels is None else {"labels": labels}
    np.savez(folder / _ARRAYS, ids=ids, type_ids=types, lengths=np.array(lengths, np.int64), **more)
    return [cut, kept, token, is_left]


def _roles(specs: Sequence[InputSpec]) -> tuple[str, ...]:
    """Return what each input of a model is.

    Raises:
        UsageError: Not one is left for the tokens, or one has another rank.
    """
    roles = tuple(role(spec.name) for spec in specs)
    if roles.count("ids") != 1 or len(set(roles)) < len(roles) or any(len(spec.shape) != 1 for spec in specs):
        listed = ", ".join(map(str, specs))
        raise UsageError(
            f"Texts become tokens, a mask and types, each [N, length]; the model takes {listed}.",
            hint="Give package.module:callable that makes its inputs.",
        )
    return roles


def text_inputs(takes: Mapping[str, bool]) -> list[InputSpec]:
    """Return the inputs of a model that texts fill: its first and what else it demands, then a mask and types.

    Args:
        takes: Its arguments, and whether it can do without each; of none, the tokens alone are.
    """
    first, *others = takes or ("input_ids",)
    found = [first]
    for name in others:
        if takes[name] and role(name) in {"ids", *map(role, found)}:
            break
        found.append(name)
    return [InputSpec(name, (None,), "int64") for name in found]


def role(name: str) -> str:
    """Return what an input of such a name is: ``ids``, ``attention_mask`` or ``type_ids``."""
    name = name.lower()
    if "mask" in name:
        return "attention_mask"
    return "type_ids" if "type" in name or "segment" in name else "ids"


def _length(specs: Sequence[InputSpec]) -> int | None:
    """Return the length that a model fixes; None where it is free.

    Raises:
        UsageError: It fixes several, or a longer one than any text has.
    """
    lengths = {size for spec in specs for size in spec.shape if size is not None}
    if len(lengths) > 1:
        raise UsageError(f"The model takes tokens, masks and types of different lengths: {sorted(lengths)}.")
    if max(lengths, default=0) > _LONGEST:
        raise UsageError(f"The model fixes a length of {max(lengths)} tokens; a text has {_LONGEST} at most here.")
    return next(iter(lengths), None)


def _opened(name: str, length: int | None) -> Tokenizer:
    """Open a tokenizer, and let it cut to a length.

    Raises:
        UsageError: ``tokenizers`` is not installed.
        Refused: The file is none of its.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # memory is limited, whatever the processors are
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError("Texts need the package tokenizers, which is not installed.", hint=INSTALL) from error
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?(?<!\.json)", name) and find(Path(name)) is None:
        got = f"https://huggingface.co/{name}/resolve/main/tokenizer.json"
        what = f"There is no file '{name}', and names on a hub are not downloaded (--tokenizer)."
        raise Refused(what, hint=f"Give --tokenizer tokenizer.json, which this gets:\ncurl -LO {got}")
    require_file(Path(name), most_bytes=texts.MOST_JSON_BYTES)
    with _used(name):
        found = Tokenizer.from_file(name)
        if getattr(found.model, "dropout", None) is not None:  # of BPE, for training: each reading would draw others
            found.model.dropout = None
        if length is not None:
            found.enable_truncation(length)
    return found


@contextmanager
def _used(name: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises into a refusal: its errors have no class of their own, and some are panics."""
    try:
        yield
    except BaseException as error:
        if lacks_memory(error):
            raise MemoryError(str(error)) from error
        raise Refused(f"'{shown(name)}' is no tokenizer that can be used: {shown(str(error))}.") from error


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
    content = read_bytes(path, most_bytes=_MOST_BYTES).removeprefix(b"\xef\xbb\xbf")
    for number, coded in enumerate(content.split(b"\n"), 1):
        source = f"Line {number} of '{shown(path)}'"
        try:
            line = coded.decode().strip()
        except UnicodeDecodeError as error:
            hint = "Write the file in UTF-8: other letters would be read for those that are not."
            raise Refused(f"{source} is not UTF-8.", hint=hint) from error
        if line:
            found = texts.parse_json(line, source=source, failure=Refused)
            said = [found.get(key, "") for key in ("text", "text_pair")] if isinstance(found, dict) else []
            if not said or "text" not in found or not all(isinstance(text, str) for text in said):
                held = f": it holds {shown(', '.join(map(str, found)))}" if isinstance(found, dict) and found else ""
                raise Refused(f"{source} has no text{held}.", hint=_HINT)
            yield found


def _labels(given: Sequence[Any], path: Path) -> np.ndarray | None:
    """Return the labels of all lines as one array, lists of numbers padded with -1; None where no line has one.

    Raises:
        Refused: Some have none, or they are of several kinds, or too many for the longest of them.
    """
    found = [label for label in given if label is not None]
    if not found:
        return None
    if len(found) < len(given):
        raise Refused(f"{len(found)} of the {len(given)} lines of '{shown(path)}' have a label.", hint=_HINT)
    longest = max(len(label) if isinstance(label, list | str) else 1 for label in found)
    too_many = Refused(f"'{shown(path)}' has {len(found):,} labels, one of them {longest:,} long.", hint=_FEWER)
    if longest * len(found) > _MOST_VALUES:
        raise too_many
    if all(isinstance(label, list) for label in found):
        found = [[*label, *[-1] * (longest - len(label))] for label in found]
    kinds = {isinstance(label, str) for label in found}
    try:
        labels = np.array(found)
    except ValueError:
        labels = np.array(None)
    if labels.nbytes > _MOST_VALUES * np.dtype(np.int64).itemsize:  # of texts in lists each takes what the longest does
        raise too_many
    if len(kinds) > 1 or labels.dtype.kind not in "iufU" or not labels.size:
        raise Refused(f"The labels of '{shown(path)}' are not all numbers, lists of numbers, or texts.", hint=_HINT)
    return labels
