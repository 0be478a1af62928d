"""Run passes in order, and prove after each that the program is still legal and still right."""

from __future__ import annotations

import contextlib
import html
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from optimize.distances import output_error
from optimize.errors import OptimizeError, Refused, UsageError, VerificationFailed, lacks_memory, require
from optimize.invariants import EXACT_TOLERANCE
from optimize.passes.base import Exactness, Outcome, Pass, Stage
from optimize.preparation import first_line
from optimize.program import CAPTURE_FIRST, Program, Stats
from optimize.progress import tell
from optimize.wording import plural


@dataclass(frozen=True)
class Step:
    """What one pass did to the program.

    Attributes:
        pass_name: The pass.
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


@dataclass(frozen=True)
class Pipeline:
    """An ordered list of passes.

    Attributes:
        passes: The passes; their stages must not decrease.
        verify: Compare outputs with those of the previous program after each pass (two batch sizes, and another height
            and width where those are free).

    Raises:
        UsageError: A pass stands after one of a later stage, or an entry is none.
    """

    passes: Sequence[Pass]
    verify: bool = True

    def __post_init__(self) -> None:
        for entry in self.passes:
            name = getattr(entry, "__name__", "FuseConvBN")
            require(entry, Pass, "Pipeline", hint=f"A pass is made with parentheses: {name}().")
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
            with _attributed(entry):
                step, program = _run_pass(entry, program, verify=self.verify)
            steps.append(step)
        return Trace(program, tuple(steps))


@contextlib.contextmanager
def _attributed(entry: Pass) -> Iterator[None]:
    """Tell an error in a pass of another package as that pass's own, in its words and with its line.

    Raises:
        Refused: There was one.
    """
    try:
        yield
    except Exception as error:
        home = type(entry).__module__
        package = home.partition(".")[0]
        if isinstance(error, OptimizeError) or lacks_memory(error) or package == "optimize":
            raise
        frames = [at for at in traceback.walk_tb(error.__traceback__) if at[0].f_globals.get("__name__") == home]
        place = f" in {home}, line {frames[-1][1]}" if frames else ""
        owner = "" if package == "__main__" else f" of the package '{package}'"
        raise Refused(
            f"The pass {entry.name}{owner} failed{place}: {type(error).__name__}: {first_line(error)}",
            hint="It is the pass that failed, not the model: mend it, or leave it out to go on. The command shows the "
            "traceback with --debug.",
        ) from error


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


def _verify(entry: Pass, before: Program, after: Program) -> tuple[float, float]:
    """Compare outputs at two batch sizes; return (max absolute error, the same relative to the largest output)."""
    worst, relative = 0.0, 0.0
    others = map(before.resized, before.other_sizes())
    for inputs in (before.inputs, before.sample((before.batch or 1) + 1), *others):
        given, same = entry.pair(inputs)
        taken = [value.to(example.dtype) for value, example in zip(same, after.inputs, strict=True)]
        expected, found = before.run(given), after.run(taken)
        for want, got in zip(expected, found, strict=True):
            error, scale = output_error(want, got)
            worst = max(worst, error)
            relative = max(relative, error / scale)
            _require(entry, want.dtype, error / scale)
    return worst, relative


def _require(entry: Pass, dtype: torch.dtype, relative: float) -> None:
    """Refuse an exact pass that is not; what others cost is for the user to judge, from the file."""
    allowed = EXACT_TOLERANCE.get(dtype, 0.0)
    if entry.exactness is Exactness.EXACT and relative > allowed:
        raise VerificationFailed(
            f"the outputs differ by {relative:.1e} of the largest; exact allows {allowed:.0e}.",
            hint="This is a defect of the pass, not of your model. Leave the pass out to go on, and report it.",
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
