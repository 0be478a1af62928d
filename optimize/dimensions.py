"""Which dimensions of the inputs stay free, by name: what a caller says of them, and which sizes they may have.

What is said has one form, which recipes write down and a confined process is told: by input and dimension the name, and
behind it the range where one is asked, ``{"input_ids": {1: "sequence:16..512"}}``. ``*`` stands for all inputs that
have the dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optimize import bounds
from optimize.errors import UsageError, nearest
from optimize.escaping import shortened

#: By input and dimension, the name of a free dimension and its range.
Said = dict[str, dict[int, str]]
#: The free dimension that counts samples.
BATCH = "batch"
#: The dimensions of ``[N, C, H, W]`` that ``dynamic_size`` leaves free, by name.
SIZES = {2: "height", 3: "width"}
_ALL = "*"
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_FORM = "Write INPUT:DIMENSION=NAME, such as input_ids:1=sequence, or NAME:16..512 for dimension 1 of all inputs."


@dataclass(frozen=True)
class FreeSize:
    """The sizes of a free dimension.

    Attributes:
        least: The smallest that the model takes.
        most: The largest; None where no bound is known.
        others: Sizes, besides the example's, at which the program answered as its module: passes and files are tried
            there.
    """

    least: int = 1
    most: int | None = None
    others: tuple[int, ...] = ()

    @staticmethod
    def between(least: int | None, most: int | None) -> FreeSize:
        """Return a range of torch's: it begins at 2 where 1 was not looked at, and may end where no tensor does."""
        ends = most is not None and most <= bounds.SIZE.most
        return FreeSize(1 if least in (None, 0, 2) else least, most if ends else None)

    def __str__(self) -> str:
        """Return the range as it is written."""
        return f"{self.least}..{'' if self.most is None else self.most}"

    def within(self, size: int) -> int:
        """Return the size of the range that is nearest."""
        return max(self.least, size if self.most is None else min(size, self.most))

    def meet(self, other: FreeSize) -> FreeSize:
        """Return the range of the sizes that both hold."""
        ends = [end for end in (self.most, other.most) if end is not None]
        return FreeSize(max(self.least, other.least), min(ends, default=None))

    def holds(self, size: int) -> bool:
        """Say whether the range holds a size."""
        return self.within(size) == size


@dataclass(frozen=True)
class Dimensions:
    """The free dimensions of a model's inputs.

    Attributes:
        names: One mapping {dimension: name} an input.
        inputs: What the inputs are called.
        sizes: What is asked of the sizes of each, by name.
    """

    names: tuple[dict[int, str], ...]
    inputs: tuple[str, ...] = ()
    sizes: dict[str, FreeSize] = field(default_factory=dict)


def read_dynamic(given: Any) -> Said:
    """Return in one form what a caller says is free: a text of the command, or mappings by input and dimension.

    Args:
        given: ``"input_ids:1=sequence,mask:1=sequence"``, ``"sequence:16..512"``, or ``{"input_ids": {1: name}}`` with
            names that are texts, with a range or without, or ``torch.export.Dim``.

    Raises:
        UsageError: It is none of them; the message says which part.

    >>> read_dynamic("input_ids:1=sequence:16..512,mask:-1=sequence")
    {'input_ids': {1: 'sequence:16..512'}, 'mask': {-1: 'sequence'}}
    >>> read_dynamic("time"), read_dynamic("2=time")
    ({'*': {1: 'time'}}, {'*': {2: 'time'}})
    """
    if not given:
        return {}
    found: Said = {}
    for name, dim, said in _read_text(given) if isinstance(given, str) else _read_mapping(given):
        if found.setdefault(name, {}).setdefault(dim, said) != said:
            raise UsageError(f"Dimension {dim} of '{shortened(name)}' has two names in --dynamic.", hint=_FORM)
    return found


def find_free(
    said: Said, names: Sequence[str], shapes: Sequence[Sequence[int]], *, batch: bool, size: bool
) -> Dimensions:
    """Return the free dimensions of inputs.

    Dimension 0 is the batch of every input that has as many samples as the first. A name that is said for all of these
    is another word for the batch; said for some, it is a dimension of its own.

    Args:
        said: As ``read_dynamic`` returns it.
        names: Of the inputs.
        shapes: Of the examples, batch first.
        batch: Leave the batch free.
        size: Leave height and width of ``[N, C, H, W]`` free.

    Raises:
        UsageError: A name or a dimension fits no input, or the sizes of the examples contradict it.
    """
    leading = next((shape[0] for shape in shapes if shape), None)
    counting = {place for place, shape in enumerate(shapes) if shape and shape[0] == leading}
    found: list[dict[int, str]] = [dict(SIZES) if size and len(shape) == 4 else {} for shape in shapes]
    sizes: dict[str, FreeSize] = {}
    for place, dim, text in _places(said, names, shapes):
        name, asked = _read_name(text)
        found[place][dim] = name
        if asked is not None:
            if sizes.setdefault(name, asked) != asked:
                raise UsageError(f"The dimension '{name}' has two ranges: {sizes[name]} and {asked}.")
            _check_holds(name, asked, names[place], shapes[place][dim])
    words = {found[place].get(0, BATCH) for place in counting}
    elsewhere = {name for place, dims in enumerate(found) for dim, name in dims.items() if dim or place not in counting}
    if len(words) == 1 and not words & elsewhere:  # one word for all that count samples: another for the batch
        for place in counting:
            found[place].pop(0, None)
        if word := next(iter(words & sizes.keys()), ""):
            sizes[BATCH] = sizes.pop(word)
    if batch:
        found = [{0: BATCH, **dims} if place in counting else dims for place, dims in enumerate(found)]
    _check_equal(found, names, shapes)
    return Dimensions(tuple(found), tuple(names), sizes)


def _read_text(text: str) -> Iterator[tuple[str, int, str]]:
    for part in text.split(","):
        place, is_placed, said = part.strip().partition("=")
        name, has_input, dim = place.rpartition(":")
        if not is_placed:
            name, dim, said = _ALL, "1", part.strip()
        elif not has_input:
            name = _ALL
        if not re.fullmatch(r"-?\d{1,3}", dim) or not name:
            raise UsageError(f"--dynamic '{shortened(text)}' is not understood.", hint=_FORM)
        _read_name(said)
        yield name, int(dim), said


def _read_mapping(given: Any) -> Iterator[tuple[str, int, str]]:
    try:
        pairs = [(str(name), dim, value) for name, dims in given.items() for dim, value in dims.items()]
        dims = [int(dim) for _, dim, _ in pairs]
    except (AttributeError, TypeError, ValueError) as error:
        hint = 'Write {"input_ids": {1: "sequence"}}: by input and dimension, its name.'
        raise UsageError(f"The free dimensions {shortened(str(given))} are not understood.", hint=hint) from error
    for (name, _, value), dim in zip(pairs, dims, strict=True):
        said = value if isinstance(value, str) else _spell_dim(value)
        _read_name(said)
        yield name, dim, said


def _spell_dim(value: Any) -> str:
    """Return a ``torch.export.Dim`` as it is said here."""
    name, least, most = (getattr(value, word, None) for word in ("__name__", "min", "max"))
    if not isinstance(name, str) or not isinstance(least, int):
        hint = (
            'Give a name, such as "sequence" or "sequence:16..512", or torch.export.Dim("sequence", min=16, max=512).'
        )
        raise UsageError(f"A free dimension needs a name; got {shortened(repr(value))}.", hint=hint)
    bounded = isinstance(most, int) and most <= bounds.SIZE.most
    return f"{name}:{max(least, 1)}..{most if bounded else ''}" if least > 1 or bounded else name


def _read_name(said: str) -> tuple[str, FreeSize | None]:
    """Return the name and the range that a text says.

    >>> _read_name("sequence:16..512")
    ('sequence', FreeSize(least=16, most=512, others=()))
    """
    name, _, asked = said.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{shortened(name)}' is no name of a dimension.", hint=_FORM)
    if not asked:
        return name, None
    ends = re.fullmatch(r"(\d{0,9})\.\.(\d{0,9})", asked)
    least, most = (int(text) if text else None for text in ends.groups()) if ends else (0, 0)
    found = FreeSize(1 if least is None else least, most)
    if found.least < 1 or (most is not None and most < found.least):
        raise UsageError(f"'{shortened(asked)}' is no range of sizes for '{name}'.", hint=f"Write {name}:16..512.")
    return name, found


def _places(said: Said, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, str]]:
    """Yield input, dimension and what is said of it, dimensions counted from the front."""
    for name, dims in said.items():
        if name != _ALL and name not in names:
            raise UsageError(f"The model has no input '{shortened(name)}' (--dynamic).", hint=nearest(name, names))
        for dim, text in dims.items():
            places = _places_of_all(dim, text, names, shapes) if name == _ALL else [names.index(name)]
            for place in places:
                rank = len(shapes[place])
                if not -rank <= dim < rank:
                    shown = f"Input '{names[place]}' {list(shapes[place])} has no dimension {dim} (--dynamic)."
                    raise UsageError(shown, hint="Dimension 0 is the batch; the first behind it is 1.")
                yield place, dim % rank, text


def _places_of_all(dim: int, text: str, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the inputs that have a dimension; they must agree on its size, or it is not plain which are meant."""
    found = [place for place, shape in enumerate(shapes) if -len(shape) <= dim < len(shape) and dim]
    if not found:
        raise UsageError(f"No input has a dimension {dim} for '{shortened(text)}' (--dynamic).", hint=_FORM)
    if len({shapes[place][dim] for place in found}) > 1:
        listed = ", ".join(f"'{names[place]}' {shapes[place][dim]}" for place in found)
        hint = f"Name them: {names[found[0]]}:{dim}={text}."
        raise UsageError(
            f"Which inputs have the dimension '{shortened(text)}'? Their sizes differ: {listed}.", hint=hint
        )
    return found


def _check_holds(name: str, asked: FreeSize, owner: str, size: int) -> None:
    if not asked.holds(size):
        hint = "Give examples within the range, or another range."
        raise UsageError(f"The example of '{owner}' has {size} for '{name}', outside of {asked}.", hint=hint)


def _check_equal(found: Sequence[Mapping[int, str]], names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
    """Check that dimensions of one name have one size in the examples.

    Raises:
        UsageError: They have not.
    """
    seen: dict[str, tuple[str, int]] = {}
    for dims, owner, shape in zip(found, names, shapes, strict=True):
        for dim, name in dims.items():
            other, size = seen.setdefault(name, (owner, shape[dim]))
            if size != shape[dim]:
                what = f"'{name}' is {size} in the example of '{other}' and {shape[dim]} in that of '{owner}'."
                raise UsageError(what, hint="Give the dimensions two names, or examples of one size.")
