"""What may be tried for one file, what is tried first, and what next, by what was found so far."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from optimize import presets
from optimize.errors import TargetUnavailable
from optimize.recipe import PassEntry
from optimize.registry import find_target, targets

#: Decibels that layers in float shall bring, by what their errors say; and shares of the work that may be cut.
REGAINS, CUTS = (0.0, 1.5, 3.0, 5.0, 8.0), (0.0, 0.15, 0.3, 0.5)
#: How often the sampler is asked for one choice before any that is left will do.
_MOST_ASKED = 5
#: Kinds of files, the most promising first: the order in which each is tried once for every target.
_KINDS = (
    "int8", "int8-bfloat16", "int7", "bfloat16", "float32", "int6", "int8-float16", "float16", "int8-dynamic",
    "int8-weights", "int4", "int4-weights",
)  # fmt: skip
#: Bits of the weights of static INT8: few, which some targets alone store and which spare no layer, and all.
_FEW = {"int7": 7, "int6": 6, "int4": 4}
_BITS = {"int8": 8, **_FEW}
_CASTS = {"float16": "CastFP16", "bfloat16": "CastBF16"}
_PASSES: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{kind: (name, {}) for kind, name in _CASTS.items()},
    "int8-weights": ("QuantizeWeights", {}),
    "int4-weights": ("QuantizeWeights", {"bits": 4}),
}


@dataclass(frozen=True)
class FileChoice:
    """One file that may be made.

    Attributes:
        precision: As files carry it in their names.
        effort: What static INT8 may cost to make, a word of ``--effort``.
        spare: Whether layers that lose more than they save stay in float from the start.
        regain_db: Decibels that further layers in float shall bring.
        cut: Share of the multiply-accumulates that goes with channels.
    """

    target: str
    precision: str
    effort: str = "default"
    spare: bool = True
    regain_db: float = 0.0
    cut: float = 0.0

    @property
    def is_static(self) -> bool:
        """Whether it is of static INT8, alone or with half."""
        return self.precision in _BITS or self.precision.partition("-")[2] in _CASTS

    @property
    def how(self) -> str:
        """What is unusual about it, in words; empty where nothing is."""
        words = (
            f"{100 * self.cut:g} % cut" if self.cut else "",
            f"effort {self.effort}" if self.effort != "default" else "",
            "" if self.spare else "none spared",
            f"{self.regain_db:g} dB more" if self.regain_db else "",
        )
        return ", ".join(filter(None, words))

    @property
    def family(self) -> FileChoice:
        """What its program is made like: files of one family differ by target and by layers given back."""
        return replace(self, target="", regain_db=0.0)

    @property
    def plain(self) -> FileChoice:
        """The float32 file of its target, with the same channels."""
        return FileChoice(self.target, "float32", cut=self.cut)

    @property
    def start(self) -> FileChoice | None:
        """What its program goes on from; None where it is the first: float32, with channels cut."""
        if self.precision == "float32":
            return None
        is_mixed = self.is_static and self.precision not in _BITS
        return replace(self, precision="int8", regain_db=0.0) if is_mixed else self.plain

    def own_passes(self, cpu: str) -> tuple[PassEntry, ...]:
        """Return the passes that make its program of what it goes on from."""
        if self.precision == "float32":
            entries = presets.chosen((self.cut, "PruneChannels", {"ratio": self.cut, "of": "macs"}))
        elif self.precision in _BITS:
            entries = presets.quantizing(self.effort, cpu, _BITS[self.precision])
            if not self.spare:
                entries[-1]["options"] = {**entries[-1]["options"], "spare": 0.0}
        elif self.is_static:
            entries = presets.chosen((True, _CASTS[self.precision.partition("-")[2]], {"mixed": True}))
        elif self.precision == "int8-dynamic":
            entries = presets.quantizing_at_run_time(data=True)
        else:
            entries = presets.chosen((True, *_PASSES[self.precision]))
        return tuple(PassEntry(**entry) for entry in entries)

    def passes(self, cpu: str) -> tuple[PassEntry, ...]:
        """Return the passes behind those that fuse that make its program."""
        return (*(self.start.passes(cpu) if self.start else ()), *self.own_passes(cpu))


def every_target() -> list[str]:
    """Return the targets whose files run here and are for deploying.

    Raises:
        TargetUnavailable: There is none.
    """
    found = [
        name for name, target in targets().items() if target.alone and name != "eager" and target.available().run
    ]  # the eager file is what all others are measured against
    if not found:
        raise TargetUnavailable("No runtime is installed here.", hint="pip install onnxruntime openvino")
    return found


def kinds_of(names: Sequence[str]) -> list[str]:
    """Return the precisions that some of the targets write, the most promising first."""
    return [kind for kind in _KINDS if any(_writes(name, kind) for name in names)]


def _writes(name: str, kind: str) -> bool:
    """Say whether a target writes a kind of file: fewer bits are INT8's form, and static ones some targets' alone."""
    target = find_target(name)
    return (target.packs or kind not in _FEW) and re.sub(r"^int\d", "int8", kind) in target.support.precisions


def first_choices(names: Sequence[str]) -> Iterator[FileChoice]:
    """Yield each kind of file once for every target that writes it: what single commands make.

    A float file is first: within seconds there is something that answers rightly.
    """
    first = FileChoice(names[0], "float32")
    yield first
    for kind in kinds_of(names):
        found = (FileChoice(name, kind) for name in names if _writes(name, kind))
        yield from (choice for choice in found if choice != first)


class Sampler:
    """Proposes what to try behind the first choices: Optuna's multi-objective tree of Parzen estimators.

    It is told of every file that could be judged by three numbers, all to be small: time, error and bytes; and of those
    that miss what was asked by how far they are from allowed.

    Args:
        names: Of the targets.
        cuts: Shares of the work that may be cut.
        shard: Which of how many parts of all it is for, from 1: families go to them in turn.

    Source: J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Y. Ozaki et al.,
    "Multiobjective tree-structured Parzen estimator", JAIR 2022.
    """

    def __init__(self, names: Sequence[str], cuts: Sequence[float], shard: tuple[int, int] = (1, 1)) -> None:
        optuna = _import_optuna()
        self._shard = shard
        files = [f"{choice.target} {choice.precision}" for choice in first_choices(names)]
        values: dict[str, Sequence[Any]] = {
            "file": files,
            "effort": ("default", "best"),
            "spare": (True, False),
            "regain_db": REGAINS,
            "cut": cuts,
        }
        self._room = {
            name: optuna.distributions.CategoricalDistribution(list(entries)) for name, entries in values.items()
        }
        self._random = np.random.default_rng(0)
        sampler = optuna.samplers.TPESampler(seed=0, multivariate=True)
        self._study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)

    def learn(self, choice: FileChoice, values: Sequence[float], *, is_allowed: bool) -> None:
        """Take in what a choice came to.

        Args:
            choice: What was tried.
            values: Three numbers, all to be small.
            is_allowed: Whether it keeps what was asked of its answers.
        """
        optuna = _import_optuna()
        params = {name: getattr(choice, name) for name in self._room if name != "file"}
        params["file"] = f"{choice.target} {choice.precision}"
        self._study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=self._room,
                values=list(values),
                system_attrs={"constraints": [-1.0 if is_allowed else 1.0]},
            )
        )

    def propose(self, known: Collection[FileChoice]) -> Iterator[FileChoice]:
        """Yield choices that are not known by then, until there are no more."""
        optuna = _import_optuna()
        while left := [choice for choice in self.every() if choice not in known]:
            for _ in range(_MOST_ASKED * self._shard[1]):
                asked = self._study.ask(self._room)
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)  # what comes of it, ``learn`` is told
                if (drawn := _choice(asked.params)) in left:
                    yield drawn
                    break
            else:
                yield left[self._random.integers(len(left))]

    def every(self) -> Iterator[FileChoice]:
        """Yield every choice of the shard once."""
        rows = product(*(entry.choices for entry in self._room.values()))
        number, count = self._shard
        families = dict[FileChoice, int]()
        for choice in dict.fromkeys(_choice(dict(zip(self._room, row, strict=True))) for row in rows):
            if families.setdefault(choice.family, len(families)) % count == number - 1:
                yield choice


def _choice(drawn: Mapping[str, Any]) -> FileChoice:
    """Return what was drawn, without what means nothing to it."""
    target, _, precision = drawn["file"].partition(" ")
    found = FileChoice(target, precision, **{name: value for name, value in drawn.items() if name != "file"})
    found = replace(found, spare=True) if precision in _FEW else found
    return found if found.is_static else FileChoice(target, precision, cut=found.cut)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise TargetUnavailable("The search for files needs Optuna.", hint="pip install 'optuna>=5.0'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
