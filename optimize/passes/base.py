"""The contract every pass keeps, enforced by its base class."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar

import torch
from torch import fx

from optimize import graph, ops, processor
from optimize.data import Given
from optimize.errors import Refused, UsageError, is_foreign, named_with_package, nearest
from optimize.program import Program
from optimize.quantization.batches import require_batches
from optimize.records import MergeOutlook, Rewrite, Skip
from optimize.wording import plural

#: Of what an outcome lists, so many are in its short form.
_SHOWN = 8


class Stage(IntEnum):
    """When a pass may run; a pipeline's stages never decrease."""

    INPUT = 0
    GRAPH = 1
    PRECISION = 2
    SCRIPT = 3


class Exactness(Enum):
    """What a pass promises about the program's outputs.

    ``EXACT``: equal up to the rounding of re-associated sums. ``ROUNDING``: equal up to the stated precision on
    ordinary models.
    ``LOSSY``: may differ; the report says by how much.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Outcome:
    """What a pass did.

    Attributes:
        rewrites: The places it changed.
        skips: The places it left alone, with the reason.
        notes: What else the report should say.
        merges: What merging branches did to the INT8 prospects of each merged weight.
    """

    rewrites: tuple[Rewrite, ...] = ()
    skips: tuple[Skip, ...] = ()
    notes: tuple[str, ...] = ()
    merges: tuple[MergeOutlook, ...] = ()

    def __repr__(self) -> str:
        """Return what was done, a line a place, the first of many; its attributes have them all."""
        done = [f"{entry.where}: {entry.what}" for entry in self.rewrites]
        left = [f"{entry.where}: left alone, {entry.reason}" for entry in self.skips]
        heading = f"Outcome: {plural(len(done), 'rewrite')}, {len(left)} left alone"
        return "\n  ".join([heading, *_first(done), *_first(left), *self.notes])


def _first(lines: Sequence[str]) -> list[str]:
    return [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]


def _alike(one: Program, other: Program) -> bool:
    """Say whether two programs have the same calls, weights and plan."""
    programs = (one, other)
    calls = [
        [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in p.graph.nodes] for p in programs
    ]
    weights = [program.graph_module.state_dict() for program in programs]
    same = calls[0] == calls[1] and weights[0].keys() == weights[1].keys() and one.quantization is other.quantization
    return same and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@dataclass(frozen=True)
class Pass(ABC):
    """One idea. Subclasses are frozen dataclasses whose fields are the options, and write one method, ``rewrite``.

    Attributes:
        stage: When it may run.
        exactness: What it promises.
        tolerance: For ``ROUNDING``: the largest error on ordinary models, relative to the largest output; more is
            reported as a warning.
        remedy: For ``ROUNDING``: what to do about more, as sentences.
        prepares: Whether it only makes a program ready for the precision pass behind it, and belongs to its variant.
    """

    stage: ClassVar[Stage] = Stage.GRAPH
    exactness: ClassVar[Exactness] = Exactness.EXACT
    tolerance: ClassVar[float] = 0.0
    remedy: ClassVar[str] = ""
    prepares: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The class name, the pass's name everywhere."""
        return type(self).__name__

    @property
    def is_lossy(self) -> bool:
        """Whether its outputs may differ by any amount."""
        return self.exactness is Exactness.LOSSY

    @classmethod
    def place(cls) -> tuple[int, int, bool]:
        """Return what passes are put in order by: the stage; on the graph the promise; whether they prepare."""
        promise = list(Exactness).index(cls.exactness) if cls.stage is Stage.GRAPH else 0
        return cls.stage, promise, not cls.prepares

    @property
    def data(self) -> Given | None:
        """The calibration data it was given; None where it takes none."""
        return getattr(self, "calibration", None)

    @property
    def included(self) -> str:
        """The words of ``--preprocess`` that it takes into the graph; mostly none."""
        return ""

    @property
    def continues(self) -> bool:
        """Whether it goes on from the INT8 variant before it; a precision pass else starts from the float program."""
        return False

    def pair(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return flat inputs of the program before, and the same as the one after takes them (but for casts).

        Both are the given ones, unless the pass changes what a program takes.
        """
        return inputs, inputs

    def suited_to(self, target: str) -> Pass:
        """Return the pass for a program that one target is to write; itself, where targets do not differ to it."""
        return self

    @abstractmethod
    def rewrite(self, program: Program) -> Outcome:
        """Change ``program`` (a private clone) in place and say what was done and what was left alone."""

    def apply(self, program: Program) -> tuple[Program, Outcome]:
        """Run on a clone; return the new program, or the given one untouched when nothing was rewritten.

        A pass that is lossy or decides by data is applied once: the same one with the same options leaves its own
        result alone.

        Raises:
            Refused: The pass cannot run on this program, or is of another package and changes what it does not list.
        """
        once = self.is_lossy or self.prepares
        if once and self in program.applied:
            return program, Outcome(notes=(f"{self.name} was applied already, with the same options.",))
        changed = program.clone()
        outcome = self.rewrite(changed)
        if not isinstance(outcome, Outcome):
            raise Refused(
                f"{named_with_package('pass', self.name, type(self))} returned a {type(outcome).__name__}.",
                hint="rewrite returns what it did: Outcome((Rewrite(where, what), ...)).",
            )
        if not outcome.rewrites:
            if is_foreign(type(self)) and not _alike(program, changed):
                who = named_with_package("pass", self.name, type(self))
                raise Refused(
                    f"{who} changed the program, and its Outcome lists no Rewrite.",
                    hint="List each place, Outcome((Rewrite(where, what), ...)): a pass that lists none did nothing.",
                )
            return program, outcome
        changed.refresh()
        applied = (*changed.applied, self) if once else changed.applied
        planned = changed.quantization is not None and program.quantization is None
        unquantized = program if planned else changed.unquantized
        return dataclasses.replace(changed, source=None, applied=applied, unquantized=unquantized), outcome

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the pass's documentation."""
        return (cls.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class PrecisionPass(Pass):
    """Base of the passes that choose what computes in fewer bits; what the user names stays in float.

    Attributes:
        keep: Modules that stay in float, each with all within it, by path: ``("head", "stages.0", "*.gate")``; ``*``
            stands for any letters. This comes before whatever the pass would choose by itself.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    keep: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        words = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "keep", words)

    def kept(self, program: Program) -> dict[fx.Node, str]:
        """Return the calls that the user keeps in float, with the reason.

        Raises:
            UsageError: A word names no module of the program; the nearest is named.
        """
        words = reversed(calls_within(program, self.keep, "keep").items())
        return {node: f"you keep '{word}' in float" for word, nodes in words for node in nodes}


def calls_within(program: Program, words: Iterable[str], option: str) -> dict[str, list[fx.Node]]:
    """Return the calls of the modules that each path or pattern names.

    Raises:
        UsageError: A word of the option names no module of the program; the nearest is named.
    """
    if not (words := tuple(words)):
        return {}
    numbered = ops.layer_paths(program.graph)
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    paths = {node: {origin := graph.origin(node), numbered.get(node.name, origin)} for node in called}
    found = {}
    for word in words:
        found[word] = [node for node, ways in paths.items() if any(graph.is_within(path, word) for path in ways)]
        if not found[word]:
            known = {whole for ways in paths.values() for path in ways for whole in graph.modules_of(path)}
            raise UsageError(f"{option} '{word}': the program has no such module.", hint=nearest(word, known))
    return found


@dataclass(frozen=True)
class IntegerPass(PrecisionPass):
    """Base of the passes that choose integer products.

    Attributes:
        cpu: Processors that the integers are right on: ``any``, ``avx2``, ``vnni``, ``amx``, ``arm-dotprod``, or
            ``host`` for this machine's. x86 without VNNI adds two products in 16 bits, so for ``any`` and ``avx2``
            weights leave room for that; it costs some tenths of a decibel, and nothing at run time.
    """

    cpu: str = field(default="any", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cpu", processor.named(self.cpu))


#: What a share is of, in the words of a report.
_MEASURED = {"params": "parameters", "macs": "multiply-accumulates", "time": "layers' time"}

#: How the sentence about such a share ends, which says nothing to who has asked for a time.
ASKED = "were asked for."


class Cutting(Pass):
    """Base of the passes that make a program smaller by a share; each declares these fields, and what more it takes.

    ``measures`` is what the share may be of, and a ``survey_type`` may stand for the data that it was made of.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    measures: ClassVar[tuple[str, ...]]
    survey_type: ClassVar[type[Any]]

    ratio: float
    of: str
    calibration: Any
    times: dict[str, float] | None
    intact: tuple[str, ...]

    @property
    def data(self) -> Given | None:
        """The calibration data it was given."""
        given: Given | None = self.calibration
        return self.calibration.data if isinstance(self.calibration, self.survey_type) else given

    def __post_init__(self) -> None:
        words = (self.intact,) if isinstance(self.intact, str) else tuple(self.intact)
        object.__setattr__(self, "intact", words)
        if self.of not in self.measures:
            raise UsageError(f"{self.name}: of='{self.of}' is not {', '.join(self.measures)}.")
        if self.data is not None:
            require_batches(self.data)
        if not 0 <= self.ratio < 1:
            raise UsageError(f"{self.name}: ratio must be at least 0 and below 1; got {self.ratio}.")

    def require_times(self) -> None:
        """Check that the layers' times are known where the share is of them.

        Raises:
            UsageError: They are not.
        """
        if self.of == "time" and not self.times:
            raise UsageError(
                f"{self.name}: of='time' needs the time of each layer.",
                hint="Say latency='0.5x' (--latency 0.5x), which measures them, or give times={'layer': seconds}.",
            )

    def layers_intact(self, layers: Set[str]) -> dict[str, str]:
        """Return the layers that the user leaves as they are, by path, each with the word that says so.

        Raises:
            UsageError: A word names none.
        """
        found: dict[str, str] = {}
        for word in self.intact:
            named = {path for path in layers if graph.is_within(path, word)}
            if not named:
                raise UsageError(f"intact '{word}': no layer is there.", hint=nearest(word, layers))
            found |= dict.fromkeys(named, word)
        return found

    def told(self, gone: float) -> str:
        """Say which share went."""
        return f"{100 * gone:.1f} % of the {_MEASURED[self.of]} went; {100 * self.ratio:g} % {ASKED}"
