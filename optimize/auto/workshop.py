"""The workshop of a search: from a choice to its file, with what several choices share made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from optimize import replay
from optimize.auto.choices import FileChoice
from optimize.costs import program_costs
from optimize.errors import Refused
from optimize.job import Export, Job
from optimize.pipeline import Variant, transform
from optimize.progress import Progress
from optimize.quantization.sensitivity import LayerError, layer_errors
from optimize.quantization.weights import give_back
from optimize.ranking import explain, rank
from optimize.recipe import Recipe
from optimize.search import Search, calibration
from optimize.targets.base import Artifact
from optimize.workflow import Opened, export_file, write_file

#: Families of programs that are kept: each holds the weights, once for all targets or once a group of them.
_FAMILIES = 8


@dataclass
class Workshop:
    """Makes the files of choices.

    Attributes:
        job: What was asked: its recipe has the passes that fuse, and all targets.
        opened: The model and the data.
        folder: Where files are made.
        baseline: The eager program's file.
        tell: Told what goes on; may end it.
    """

    job: Job
    opened: Opened
    folder: Path
    baseline: Artifact
    tell: Progress
    _variants: dict[FileChoice, list[Variant]] = field(default_factory=dict)
    _plain: dict[FileChoice, Export] = field(default_factory=dict)
    _made: dict[FileChoice, Export] = field(default_factory=dict)
    _errors: dict[FileChoice, tuple[LayerError, ...]] = field(default_factory=dict)

    def job_of(self, choice: FileChoice) -> Job:
        """Return the job that makes one choice's file alone."""
        recipe = self.job.recipe
        passes = (*recipe.passes, *choice.passes(recipe.cpu))
        options = {name: entry for name, entry in recipe.target_options.items() if name == choice.target}
        alone = {"passes": passes, "targets": (choice.target,), "target_options": options}
        if not any(entry.keeps for entry in passes):
            alone["keep"] = ()
        return replace(self.job, recipe=recipe.model_copy(update=alone))

    def make(self, choice: FileChoice, path: Path) -> tuple[Job, Export, Recipe]:
        """Write a choice's file; return its job, the file, and the recipe that makes it again.

        Raises:
            OptimizeError: There is no such file.
        """
        job, variant = self.job_of(choice), self.variant(choice)
        if choice.regain_db:
            made = self._regained(choice, path)
        else:
            made = self._written(choice, job, path)
        if made.error is not None:
            raise made.error
        return job, made, replay.recipe_of(job, [variant], [made], self.opened.datasets)

    def _written(self, choice: FileChoice, job: Job, path: Path) -> Export:
        """Write a file as a single command does."""
        search = Search(job, self.opened.model.program, self.baseline, self.opened.datasets, self.tell)
        target, plain = job.recipe.target(choice.target), None
        if choice.is_static and target.times_layers:
            plain = self._float_file(choice)
        made = write_file(job, self.variant(choice), target, path, search, plain, self.tell)
        self._made[choice] = made
        return made

    def _regained(self, choice: FileChoice, path: Path) -> Export:
        """Write a file with more layers in float: those that cost least time for the decibels that are asked."""
        less = replace(choice, regain_db=0.0)
        if less not in self._made:
            self._written(less, self.job_of(less), self.folder / f"less-{path.name}")
        base = self._made[less]
        if base.error is not None:
            raise base.error
        if less not in self._errors:
            data = calibration(base.program)
            self._errors[less] = layer_errors(
                base.program, data, progress=lambda share: self.tell("sensitivity", share)
            )
        errors = self._errors[less]
        names = _fewest(errors, rank(errors, base.times, program_costs(base.program).calls), choice.regain_db)
        reasons = explain(errors, base.times, f"{choice.regain_db:g} dB more")
        program = give_back(base.program, {name: reasons[name] for name in names})
        target = self.job.recipe.target(choice.target)
        made = export_file(program, choice.precision, target, path, self.tell)
        return replace(made, times=base.times, errors=errors)

    def _float_file(self, choice: FileChoice) -> Export | None:
        """Return the target's float32 file, which layers are timed beside."""
        plain = choice.plain
        if plain not in self._plain:
            target = self.job.recipe.target(plain.target)
            path = self.folder / f"plain-{plain.target}-{plain.cut}{target.suffix}"
            self._plain[plain] = export_file(self.variant(plain).program, "float32", target, path, self.tell)
        return self._plain[plain] if self._plain[plain].artifact is not None else None

    def variant(self, choice: FileChoice) -> Variant:
        """Return the program of a choice; what several of them go on from is made once.

        Raises:
            OptimizeError: No pass makes it.
        """
        for variant in self._family(choice):
            if variant.precision == choice.precision and variant.is_for(choice.target):
                return variant
        raise Refused(f"No layer of this model becomes {choice.precision}.")

    def _family(self, choice: FileChoice) -> list[Variant]:
        """Return the programs of a choice's family: one for all targets, or one for each group that needs its own."""
        recipe, made = self.job.recipe, choice.family
        program, targets, passes = self.opened.model.program, recipe.targets, recipe.passes
        if choice.start is not None:
            start = self.variant(choice.start)
            program, targets, passes = start.program, start.targets or targets, ()
            made = replace(made, target=start.targets[0] if start.targets else "")
        if made not in self._variants:
            asked = recipe.model_copy(update={"passes": (*passes, *choice.own_passes(recipe.cpu))})
            found = self.opened.passes(replace(self.job, recipe=asked))
            variants = transform(program, found, targets, self.tell)
            while len(self._variants) >= _FAMILIES:
                self._forget(next(iter(self._variants)))
            self._variants[made] = variants
        self._variants[made] = self._variants.pop(made)  # the last that is let go of
        return self._variants[made]

    def _forget(self, made: FileChoice) -> None:
        """Let go of a family's programs, and of those that were made of them."""
        del self._variants[made]
        for choice in [choice for choice in self._made if choice.family == made.family]:
            del self._made[choice]
            self._errors.pop(choice, None)


def _fewest(errors: Sequence[LayerError], ranked: Sequence[str], regain_db: float) -> list[str]:
    """Return the first of the ranked layers without whose error so many decibels are gained; one stays at least.

    Raises:
        Refused: That is more than all of them but one bring.
    """
    noise = {error.name: error.noise for error in errors}
    left = sum(noise.values())
    least, chosen = left * 10 ** (-regain_db / 10), list[str]()
    for name in ranked[:-1]:
        if left <= least:
            return chosen
        chosen.append(name)
        left -= noise[name]
    if left <= least:
        return chosen
    raise Refused(f"All layers but one in float bring less than {regain_db:g} dB.")
