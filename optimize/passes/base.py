"""The contract every pass keeps, enforced by its base class."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar

import torch
from torch import fx

from optimize import graph, ops, processor
from optimize.data import Given
from optimize.errors import UsageError, nearest
from optimize.program import Program
from optimize.records import MergeOutlook, Rewrite, Skip


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
            Refused: The pass cannot run on this program.
        """
        once = self.exactness is Exactness.LOSSY or self.prepares
        if once and self in program.applied:
            return program, Outcome(notes=(f"{self.name} was applied already, with the same options.",))
        changed = program.clone()
        outcome = self.rewrite(changed)
        if not outcome.rewrites:
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
        numbered = ops.layer_paths(program.graph) if self.keep else {}
        called = [node for node in program.graph.nodes if node.op == "call_function"]
        paths = {node: {origin := graph.origin(node), numbered.get(node.name, origin)} for node in called}
        found: dict[fx.Node, str] = {}
        for word in self.keep:
            of_word = [node for node, ways in paths.items() if any(graph.is_within(path, word) for path in ways)]
            if not of_word:
                known = {whole for ways in paths.values() for path in ways for whole in graph.modules_of(path)}
                raise UsageError(f"keep '{word}': the program has no such module.", hint=nearest(word, known))
            found = dict.fromkeys(of_word, f"you keep '{word}' in float") | found
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
