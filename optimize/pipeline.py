"""Run passes in order, prove after each that the program is still legal and right; the variants that they make."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimize.distances import output_error
from optimize.errors import UsageError, VerificationFailed, attributed, is_foreign, require
from optimize.invariants import EXACT_TOLERANCE, allowed_errors
from optimize.named import free_name
from optimize.passes.base import Exactness, Outcome, Pass, Stage
from optimize.program import CAPTURE_FIRST, Program, Stats
from optimize.progress import Progress, heard_by, silent, tell
from optimize.records import MergeOutlook
from optimize.registry import find_pass, find_target
from optimize.wording import plural

_Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What one pass did to the program.

    Attributes:
        kind: Its class.
        options: Its fields as text.
        exactness: What it promises.
        outcome: Rewrites, skips and notes.
        seconds: Run time of the pass, verification excluded.
        max_error: Largest absolute output difference over the verified batches; None when nothing was compared.
        relative_error: The same divided by the largest output.
        before: Statistics before.
        after: Statistics after.
        warning: What its user must know: it rounds by more than it states.
    """

    pass_name: str
    kind: type[Pass]
    options: str
    exactness: Exactness
    outcome: Outcome
    seconds: float
    max_error: float | None
    relative_error: float | None
    before: Stats
    after: Stats
    warning: str = ""


@dataclass(frozen=True)
class Trace:
    """The program that came out of a pipeline and how it came to be."""

    program: Program
    steps: tuple[Step, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        """Return what each pass did, a line a pass."""
        lines = [
            f"  {step.pass_name}: {plural(len(step.outcome.rewrites), 'rewrite')}, {len(step.outcome.skips)} left alone"
            for step in self.steps
        ]
        return "\n".join([f"Trace of {self.program!r}", *lines])

    def _repr_html_(self) -> str:
        """Return the same as notebooks show it."""
        return f"<pre>{html.escape(repr(self))}</pre>"


def require_passes(given: Any, what: str) -> tuple[Pass, ...]:
    """Return what a function was given as its passes, checked to be some.

    Raises:
        UsageError: It is no list, or an entry of it is no pass.
    """
    listed = isinstance(given, Iterable) and not isinstance(given, str)
    found = tuple(given) if listed else (given,)
    for entry in found:
        kind = find_pass(entry) if isinstance(entry, str) else entry if isinstance(entry, type) else type(entry)
        name = kind.__name__ if issubclass(kind, Pass) else "FuseConvBN"
        require(entry, Pass if listed else list, what, f"Passes are a list, each made with parentheses: [{name}()].")
    return found


@dataclass(frozen=True)
class Pipeline:
    """An ordered list of passes.

    Attributes:
        passes: Passes that change the graph, then those of a precision, then ``Script``: stages must not decrease.
        verify: Compare outputs with those of the previous program after each pass (two batch sizes, and another height
            and width where those are free).

    Raises:
        UsageError: A pass stands after one of a later stage, or an entry is none.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> optimize.Pipeline([optimize.QuantizeDynamic()]).run(program).program
        Program(input_1 float32[batch, 8] -> output_0; 1 calls, int8-dynamic)
    """

    passes: Sequence[Pass]
    verify: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", require_passes(self.passes, "Pipeline"))
        for first, second in zip(self.passes, self.passes[1:], strict=False):
            if second.stage < first.stage:
                raise UsageError(
                    f"{second.name} ({Stage(second.stage).name.lower()} stage) cannot run after "
                    f"{first.name} ({Stage(first.stage).name.lower()} stage).",
                    hint=f"Put {second.name} before {first.name}.",
                )

    def run(self, program: Program) -> Trace:
        """Run every pass.

        Raises:
            VerificationFailed: A pass broke an invariant or its promise; the message names the pass.
            Refused: A pass of another package raised an error.
            UsageError: It was given no program.
        """
        require(program, Program, "Pipeline.run", hint=CAPTURE_FIRST)
        steps = []
        for entry in self.passes:
            tell(entry.name, 0.0)
            with attributed("pass", entry.name, type(entry)):
                step, program = _run_pass(entry, program, verify=self.verify)
            steps.append(step)
        return Trace(program, tuple(steps))


def _run_pass(entry: Pass, program: Program, *, verify: bool) -> tuple[Step, Program]:
    before, start = program.stats(), time.perf_counter()
    changed, outcome = entry.apply(program)
    seconds = time.perf_counter() - start
    errors: tuple[float, float] | None = None
    if changed is not program:
        try:
            changed.check()
            # A quantization plan leaves the graph in float: INT8 is judged on the deployed file, not here.
            planned = changed.quantization is not program.quantization
            errors = _verify(entry, program, changed) if verify and not planned else None
        except VerificationFailed as error:
            raise VerificationFailed(f"{entry.name}: {error.what}", hint=error.hint) from error
    step = Step(
        pass_name=entry.name,
        kind=type(entry),
        options=_options(entry),
        exactness=entry.exactness,
        outcome=outcome,
        seconds=seconds,
        max_error=errors[0] if errors else None,
        relative_error=errors[1] if errors else None,
        before=before,
        after=changed.stats() if changed is not program else before,
        warning=_excess(entry, errors[1]) if errors else "",
    )
    return step, changed


#: What the author of a pass does whose answers differ.
_INEXACT = "It declares Exactness.EXACT: a pass that may change answers declares ROUNDING or LOSSY."


def _verify(entry: Pass, before: Program, after: Program) -> tuple[float, float]:
    """Compare outputs at two batch sizes; return (max absolute error, the same relative to the largest output)."""
    worst, relative = 0.0, 0.0
    others = map(before.resized, before.other_sizes())
    for inputs in (before.inputs, before.sample((before.batch or 1) + 1), *others):
        given, same = entry.pair(inputs)
        taken = [value.to(example.dtype) for value, example in zip(same, after.inputs, strict=True)]
        expected, found = before.run(given), after.run(taken)
        errors = [output_error(*pair) for pair in zip(expected, found, strict=True)]
        shares = [error / scale for error, scale in errors]
        worst, relative = max([worst, *(error for error, _ in errors)]), max([relative, *shares])
        if entry.exactness is Exactness.EXACT:  # what others cost is for the user to judge, from the file
            _require_exact(entry, shares, before, given, expected)
    return worst, relative


def _require_exact(entry: Pass, shares: Sequence[float], before: Program, inputs: _Tensors, expected: _Tensors) -> None:
    """Refuse a pass by which outputs differ, as shares of their largest values, by more than rounding."""
    allowed = [EXACT_TOLERANCE.get(want.dtype, 0.0) for want in expected]
    if any(share > most for share, most in zip(shares, allowed, strict=True)):
        allowed = allowed_errors(before, inputs)
    for share, most in zip(shares, allowed, strict=True):
        if share > most:
            raise VerificationFailed(
                f"the outputs differ by {share:.1e} of the largest; exact allows {most:.0e}.",
                hint=_INEXACT
                if is_foreign(type(entry))
                else "This is a defect of the pass, not of your model. Leave the pass out to go on, and report it.",
            )


def _excess(entry: Pass, relative: float) -> str:
    """Say that a pass rounds by more than it states, and what to do; nothing where it does not."""
    if entry.exactness is not Exactness.ROUNDING or relative <= entry.tolerance:
        return ""
    return (
        f"{entry.name} moves the outputs by {relative:.1e} of the largest on the example inputs, more than the "
        f"{entry.tolerance:.0e} it usually stays within: see the agreement of its files. {entry.remedy}".rstrip()
    )


def _options(entry: Pass) -> str:
    import dataclasses

    values = [(field, getattr(entry, field.name)) for field in dataclasses.fields(entry) if field.repr]
    told = [f"{field.name}={value!r}" for field, value in values if not (field.kw_only and value == field.default)]
    return ", ".join(told)


@dataclass(frozen=True)
class Variant:
    """One program to export: in float, or in the precision of one pass.

    Attributes:
        precision: ``float32``, ``float16``, ``bfloat16`` or a quantization plan's, such as ``int8``; ``int8_1`` where
            a second pass makes another.
        steps: The passes that made it from the program before (the shared ones belong to the float variant).
        targets: Names of those it is for, where integers mean something else to the others of the run; empty for all.
    """

    precision: str
    program: Program
    steps: tuple[Step, ...] = ()
    targets: tuple[str, ...] = ()

    @property
    def merges(self) -> tuple[MergeOutlook, ...]:
        """What became of the INT8 prospects of weights that its passes merged."""
        return tuple(outlook for step in self.steps for outlook in step.outcome.merges)

    def is_for(self, target: str) -> bool:
        """Say whether a target writes it."""
        return not self.targets or target in self.targets


def transform(
    program: Program, passes: Sequence[Pass], targets: Sequence[str] = (), progress: Progress | None = None
) -> list[Variant]:
    """Run the shared passes once, then each precision pass with those that prepare for it; return the variants.

    The float variant is the first. Targets to which integers mean different things have variants of their own.

    Raises:
        UsageError: The passes are in an impossible order.
        VerificationFailed: A pass broke an invariant or its promise.
    """
    tell = progress or silent
    Pipeline(passes)  # refuses a wrong order before anything runs
    chains = _chains(passes)
    shared = [entry for entry in passes if entry.stage < Stage.PRECISION]
    script = [entry for entry in passes if entry.stage is Stage.SCRIPT]
    with heard_by(tell):
        base = Pipeline(shared).run(program)
        compiled = Pipeline(script).run(base.program)
    variants = [Variant(base.program.precision, compiled.program, (*base.steps, *compiled.steps))]
    for chain in chains:
        starts = _integers(variants, chain[0]) if chain[0].continues else [Variant("", base.program)]
        made: list[Variant] = []
        for start in starts:
            for suited, names in _suited(chain, start.targets or targets):
                with heard_by(tell):
                    trace = Pipeline(suited).run(start.program)
                wanted = names or start.targets
                precision = _told_apart(trace.program.precision, variants, wanted)
                made.append(Variant(precision, trace.program, trace.steps, wanted))
        if made[0].steps[-1].outcome.rewrites:
            variants += made
        else:  # the step says why, and there is no file to add
            variants[0] = replace(variants[0], steps=(*variants[0].steps, made[0].steps[-1]))
    return variants


def _told_apart(precision: str, variants: Sequence[Variant], targets: Sequence[str]) -> str:
    """Return a precision as its files are called: with a number where another variant for one target has it."""
    beside = [variant for variant in variants if not (targets and variant.targets) or {*targets} & {*variant.targets}]
    return free_name(precision, {variant.precision for variant in beside})


def _suited(chain: Sequence[Pass], targets: Sequence[str]) -> list[tuple[list[Pass], tuple[str, ...]]]:
    """Return the passes of a chain as each group of targets needs them, with their names; none where all need one."""
    alike: dict[object, list[str]] = {}
    for name in targets:
        target = find_target(name)
        alike.setdefault((target.numerics.formats, target.packs), []).append(name)
    groups: list[tuple[list[Pass], list[str]]] = []
    for names in alike.values():
        suited = [entry.suited_to(names[0]) for entry in chain]
        same = next((found for passes, found in groups if passes == suited), None)
        if same is None:
            groups.append((suited, names))
        else:
            same += names
    if len(groups) > 1:
        return [(passes, tuple(names)) for passes, names in groups]
    return [(groups[0][0] if groups else list(chain), ())]


def _chains(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Return each precision pass behind the passes that prepare for it.

    Raises:
        UsageError: A pass prepares for none.
    """
    chains: list[list[Pass]] = [[]]
    for entry in passes:
        if entry.stage is Stage.PRECISION:
            chains[-1].append(entry)
            if not entry.prepares:
                chains.append([])
    if chains[-1]:
        names = ", ".join(entry.name for entry in chains[-1])
        raise UsageError(f"{names}: no precision pass follows.", hint="Put QuantizeStatic behind, or leave it out.")
    return chains[:-1]


def _integers(variants: Sequence[Variant], entry: Pass) -> list[Variant]:
    """Return the last static INT8 variants, one for all targets or one a group of them, for a pass to go on from.

    Raises:
        UsageError: There is none.
    """
    found: dict[tuple[str, ...], Variant] = {}
    for variant in variants:
        plan = variant.program.quantization
        if plan is not None and plan.mode == "static" and plan.half is None:
            found[variant.targets] = variant
    if found:
        return list(found.values())
    raise UsageError(
        f"{entry.name}(mixed=True) goes on from static INT8, and none is before it.", hint="Put QuantizeStatic before."
    )
