"""What a run decided, as the recipe that makes the same files again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from optimize import named
from optimize.job import Export, Job, Variant
from optimize.ops import layer_paths
from optimize.recipe import PassEntry, Recipe
from optimize.report import RECIPE


def recipe_of(job: Job, variants: Sequence[Variant], exports: Sequence[Export]) -> Recipe:
    """Return a run's recipe with what it found out by measuring: a replay measures nothing to decide."""
    passes = job.recipe.passes if job.given_passes is None else tuple(map(PassEntry.of, job.given_passes))
    plans = {variant.precision: variant.program.quantization for variant in variants}
    decided = dict(job.recipe.decided)
    for export in exports:
        if export.can_be_refined and (job.bound is not None or export.times):
            paths, before = layer_paths(export.program.graph), plans[export.precision]
            assert before is not None
            new = {name: why for name, why in export.plan.left_float.items() if name not in before.left_float}
            decided[f"{export.target} {export.precision}"] = {paths[name]: why for name, why in new.items()}
    return job.recipe.model_copy(update={"passes": passes, "decided": decided})


def written(job: Job, recipe: Recipe) -> str:
    """Return a recipe as the text of its file, with the command that replays it."""
    return "".join(f"# {line}\n" for line in _about(job, recipe)) + recipe.yaml()


def _about(job: Job, recipe: Recipe) -> list[str]:
    if isinstance(job.source, torch.nn.Module):
        replayed = ["What was decided for a module that Python code gave."]
    else:
        words = ["optimize", str(job.source), *(["--model", job.factory] if job.factory else [])]
        words += ["--recipe", str(Path(job.out) / RECIPE), "--out", str(job.out)]
        code = next(named.named_in(recipe.model_dump()), None)
        replayed = ["The same files again:", shlex.join([*words, *(["--trust"] if job.trust or code else [])])]
    if job.given_calibration is not None and recipe.calib is None:
        replayed.append("Its calibration data came from Python code: name the same with --calib.")
    return replayed
