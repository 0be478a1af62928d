"""Why torch cannot capture a model as asked: where it binds a size that was to stay free, with the line of its code."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.nn.utils.rnn import PackedSequence

from optimize.dimensions import BATCH, Dimensions
from optimize.errors import Refused, spell

_LOGGER = logging.getLogger("torch.fx.experimental.symbolic_shapes")
_MADE = re.compile(r"create_symbol (\w+) = \d+ for (\S+)\.size\(\)\[(\d+)\]")
_BOUND = re.compile(r"set_replacement (\w+) = (\d+) ")
_WORD = re.compile(r"\['?(\w+)'?\]")
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)


@dataclass(frozen=True)
class Binding:
    """A size that became a constant.

    Attributes:
        name: Of the input.
        dim: The dimension.
        where: The line of the module's code that needs it, as the end of a sentence; empty where it is not known.
    """

    name: str
    dim: int
    size: int
    where: str


class _Listener(logging.Handler):
    """Notes what torch says of sizes; it says so at the moment of it, so that the line is found on the stack."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.owners: dict[str, tuple[str, int]] = {}
        self.bindings: list[Binding] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if made := _MADE.match(said):
            self.owners[made[1]] = ("_".join(_WORD.findall(made[2])), int(made[3]))
        elif (bound := _BOUND.match(said)) and bound[1] in self.owners:
            self.bindings.append(Binding(*self.owners[bound[1]], int(bound[2]), _find_line(_callers())))


@contextlib.contextmanager
def heard_bindings() -> Iterator[list[Binding]]:
    """Yield the sizes that become constants while torch captures; the list grows as it does."""
    listener, handlers, level, goes_up = _Listener(), _LOGGER.handlers, _LOGGER.level, _LOGGER.propagate
    _LOGGER.handlers, _LOGGER.propagate = [listener], False  # nobody else asked
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.manager = logging.Manager(logging.root)  # a command switches off what all others say below errors
    try:
        yield listener.bindings
    finally:
        del _LOGGER.manager
        _LOGGER.handlers, _LOGGER.propagate = handlers, goes_up
        _LOGGER.setLevel(level)


def _find_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of a module's own code: outside of torch, in a method of a module.

    Args:
        frames: With the number of the line that each is at, the innermost first.
    """
    for frame, number in frames:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module) and not code.co_filename.startswith((_TORCH, _OURS, "<")):
            line = linecache.getline(code.co_filename, number).strip()
            return f" in {Path(code.co_filename).name}:{number}" + (f" ({line})" if line else "")
    return ""


def _callers() -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that are being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


class BatchFixed(Refused):
    """The model computes with its batch as a constant.

    Attributes:
        why: The reason, as the end of a sentence.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"The batch cannot stay free: {why}.", hint="Take sizes from the input, such as x.shape[0].")
        self.why = why


def explain_refusal(
    error: Exception, free: Dimensions, bindings: Sequence[Binding] = (), shapes: Sequence[Sequence[int]] = ()
) -> Refused:
    """Return what to say of a model that torch does not capture.

    Args:
        error: What torch raised.
        free: What was to stay free.
        bindings: Sizes that became constants.
        shapes: Of the inputs.
    """
    text = str(error)
    names = {name for dims in free.names for name in dims.values()}
    by_torch = "specialized" in text or "Constraints violated" in text or "ConstraintViolation" in type(error).__name__
    for binding in bindings:
        name = dict(zip(free.inputs, free.names, strict=True)).get(binding.name, {}).get(binding.dim)
        if by_torch and name == BATCH:
            return BatchFixed(f"the model computes with {binding.size} as a constant{binding.where}")
        if by_torch and name is not None:
            return Refused(
                f"'{name}' cannot stay free: the model computes with its size of {binding.size} as a constant"
                f"{binding.where}.",
                hint=_forgotten(name, free, shapes)
                or "Take the size from the input there (x.shape), or leave the dimension out of --dynamic and "
                "--dynamic-size.",
            )
    if BATCH in names and (BATCH in text and by_torch):
        return BatchFixed("the model computes with the batch as a constant")
    if by_torch and names - {BATCH}:
        return Refused(
            f"The model does not take every size of {', '.join(sorted(names - {BATCH}))}: {_violation(text)}",
            hint=next(filter(None, (_forgotten(name, free, shapes) for name in sorted(names - {BATCH}))), "")
            or "Leave fewer dimensions free, or others (--dynamic INPUT:3=NAME), or compute alike for any size.",
        )
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    where = _find_line(frames)
    if any(isinstance(held, PackedSequence) for frame, _ in frames for held in frame.f_locals.values()):
        return Refused(
            f"Sequences are packed{where}: how many steps there are then depends on the data.",
            hint="Give nn.LSTM or nn.GRU the padded ones: a step knows nothing of those behind it. Take the last state "
            "of each by its length (torch.gather), and leave out padding where it is read; backwards it is not so.",
        )
    depends_on_data = "data-dependent" in text or "DataDependent" in type(error).__name__
    return Refused(
        f"torch.export cannot capture the model: {spell(error)}{where}.",
        hint="Control flow that depends on data must be rewritten (torch.where) before deployment."
        if depends_on_data
        else "Try torch.export.export(module, args) alone: what it refuses cannot be deployed.",
    )


def _violation(text: str) -> str:
    """Return the line of torch's error that says what is violated."""
    lines = [line.strip(" -") for line in text.splitlines() if line.lstrip().startswith("- ")]
    return (lines[0] if lines else text.partition("\n")[0]).partition(" If you're using mark_dynamic")[0]


def _forgotten(name: str, free: Dimensions, shapes: Sequence[Sequence[int]]) -> str:
    """Return the hint to leave free what has the same size in other inputs; empty where none has it."""
    inputs = [*zip(free.inputs, free.names, shapes, strict=False)]
    said = [(owner, dim, shape[dim]) for owner, dims, shape in inputs for dim, word in dims.items() if word == name]
    owners, sizes = ({entry[place] for entry in said} for place in (0, 2))
    others = [
        (owner, dim, size)
        for owner, dims, shape in inputs
        for dim, size in enumerate(shape)
        if owner not in owners and dim and dim not in dims and size in sizes
    ]
    asked = ",".join(f"{owner}:{dim}={name}" for owner, dim, _ in (*said, *others))
    alike = " and ".join(f"'{owner}'" for owner in dict.fromkeys(owner for owner, *_ in others))
    return f"If {alike}, of the same size, goes along with it, say so: --dynamic {asked}." if others else ""
