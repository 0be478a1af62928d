"""What a run decided, as the recipe that makes the same files again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optimize import named, registry
from optimize.datasets import Datasets
from optimize.escaping import plain
from optimize.job import Export, Job
from optimize.load.opening import CapturedModel
from optimize.measure.quality import Quality
from optimize.ops import layer_paths
from optimize.pipeline import Variant
from optimize.recipe import PassEntry, Recipe
from optimize.registry import find_pass, origin_of
from optimize.regular import read_bytes
from optimize.report import RECIPE
from optimize.targets.packaging import describe_file

#: How a recipe that a run has written begins.
_AGAIN, _DECIDED = "The same files again:", "What was decided for a module that Python code gave."
#: How files that somebody may have written himself begin where a run did, by the ending of their names.
_BEGINNINGS = {".yaml": (f"# {_AGAIN}\n".encode(), f"# {_DECIDED}\n".encode()), ".jsonl": (b'{"journal": ',)}


def recipe_of(job: Job, variants: Sequence[Variant], exports: Sequence[Export], datasets: Datasets) -> Recipe:
    """Return a run's recipe with what it found out by measuring, and took for granted: a replay decides nothing."""
    passes = job.recipe.passes if job.given_passes is None else tuple(map(PassEntry.of, job.given_passes))
    plans = {variant.precision: variant.program.quantization for variant in variants}
    decided = dict(job.recipe.decided)
    for export in exports:
        if export.can_be_refined:
            paths, before = layer_paths(export.program.graph), plans[export.precision]
            assert before is not None
            new = {name: why for name, why in export.plan.left_float.items() if name not in before.left_float}
            if not (new or job.bound is not None or export.times):
                continue
            decided[f"{export.target} {export.precision}"] = {paths[name]: why for name, why in new.items()}
    preprocess, held_back = {**job.recipe.preprocess, **datasets.unsaid}, datasets.held_back or None
    found = {"passes": passes, "decided": decided, "preprocess": preprocess, "held_back": held_back}
    return job.recipe.model_copy(update=found)


def written(job: Job, recipe: Recipe, name: str = RECIPE) -> str:
    """Return a recipe as the text of its file, of this name in ``job.out``, with the command that replays it.

    A name of a file may hold what ends a line of YAML: whatever follows would be a key of the recipe.
    """
    return "".join(f"# {plain(line)}\n" for line in _about(job, recipe, name)) + recipe.yaml()


def is_written(path: Path) -> bool:
    """Say whether a recipe or a journal is one that a run has written; other files say nothing of that."""
    begins = _BEGINNINGS.get(path.suffix)
    return begins is None or read_bytes(path, first=max(map(len, begins))).startswith(begins)


def about(
    job: Job, recipe: Recipe, model: CapturedModel, datasets: Datasets, version: str, quality: Quality
) -> dict[str, str]:
    """Return what a file shall say of itself: where it came from, what was done to it, and what that came to."""
    agreement, accuracy = quality.agreement, quality.accuracy
    said = {
        "version": version,
        "source_sha256": model.sha256 or "",
        "passes": json.dumps([{entry.name: entry.options} for entry in recipe.passes]),
        "preprocess": datasets.preprocessing,
        "included": included(job),
        "sqnr_db": "" if agreement is None or not agreement.judged else f"{agreement.sqnr_db:.1f}",
        "accuracy": "" if accuracy is None else f"{accuracy.metric} {accuracy.value:.4f} of {accuracy.samples}",
    }
    return {key: text for key, text in said.items() if text}


def included(job: Job) -> str:
    """Return the words of ``--preprocess`` that the files of a run follow themselves; empty where they do not."""
    return " ".join(entry.included for entry in job.entrance)


def labelled(export: Export, said: Mapping[str, str]) -> Export:
    """Write what a file shall say of itself into it, and return it as it is then."""
    target, path = registry.find_target(export.target), export.made.path
    target.label(path, said)
    now = describe_file(export.target, path, target.files(path), trust=True)
    return replace(export, artifact=replace(export.made, sha256=now.sha256, size_bytes=now.size_bytes))


def _about(job: Job, recipe: Recipe, name: str) -> list[str]:
    if job.object_name:
        replayed = [_DECIDED]
    else:
        words = ["optimize", str(job.source), *(["--model", job.factory] if job.factory else [])]
        out = job.out if name == RECIPE else f"{job.out}-{Path(name).stem}"
        words += ["--recipe", str(Path(job.out) / name), "--out", str(out)]
        asks = next(named.named_in(recipe.model_dump()), None) or next(recipe.places, None)
        replayed = [_AGAIN, shlex.join([*words, *(["--trust"] if job.trust or asks else [])])]
    kinds = [type(entry) for entry in job.given_passes or ()] or [find_pass(entry.name) for entry in recipe.passes]
    replayed += [f"{kind.__name__} is of {origin}." for kind in dict.fromkeys(kinds) if (origin := origin_of(kind))]
    if job.given_calibration is not None and recipe.calib is None:
        replayed.append("Its calibration data came from Python code: name the same with --calib.")
    if job.given_metric is not None:
        replayed.append("Its metric came from Python code: name the same with --metric.")
    return replayed
