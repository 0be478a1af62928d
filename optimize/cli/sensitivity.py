"""``optimize sensitivity``: what the INT8 of each layer costs and saves, or what cutting each group costs."""

from __future__ import annotations

from typing import Any

import click

from optimize import presets
from optimize.cli import options
from optimize.regular import require_model
from optimize.report import SENSITIVITY


@options.command(short_help="Show what INT8 costs and saves at each layer of MODEL.")
@click.argument("model", type=require_model)
@options.targets("--to", "target", default="onnx", show_default=True, help="The target whose runtime tells the times.")
@options.samples("--calib", "Calibration data, as for INT8; synthesised where none is given.")
@options.samples("--eval", "Samples the errors are taken on; those of --calib without.", "evaluate")
@options.out(SENSITIVITY, "Folder for sensitivity.json, .csv and .html.", "sensitivity")
@options.named_model
@options.pictures
@options.passes("--fuse/--no-fuse", default=True, help="Merge branches and fold BatchNorm before.  [default: on]")
@options.passes("--prune", is_flag=True, help="What cutting channels of each group costs, in place of INT8; no times.")
@options.threads
@options.workers
def sensitivity(model: str, **given: Any) -> None:
    """Measure for every layer of MODEL the error that its INT8 alone makes and the time it saves on this machine."""
    from optimize.recipe import parse
    from optimize.report.sensitivity import PruningSensitivity, tell_pruning, tell_sensitivity
    from optimize.sensitivity import analyse, analyse_pruning
    from optimize.workers import working

    fusing = presets.fusing(fuse=given["fuse"], reparameterize=given["fuse"])
    data = {"calib": given["calib"], "eval": given["evaluate"], "input_shape": given["input_shape"]}
    content = {
        "passes": [*fusing, *([] if given["prune"] else [{"name": "QuantizeStatic", "options": {"spare": 0}}])],
        "targets": [given["target"]],
        "threads": given["threads"],
        **data,
        "preprocess": options.preprocessing(given),
    }
    recipe = parse({key: value for key, value in content.items() if value}, source="options")
    job = options.job_of(model, recipe, given)
    with options.phases() as phases, working(given["on"], threads=job.recipe.threads, trust=job.trust):
        found = (analyse_pruning if given["prune"] else analyse)(job, phases.update)
    document = tell_pruning(found) if isinstance(found, PruningSensitivity) else tell_sensitivity(found)
    options.tell(document, lambda: found, "Sensitivity")
