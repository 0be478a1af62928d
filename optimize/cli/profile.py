"""``optimize profile``: what one run of a model is made of, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import presets
from optimize.cli import options
from optimize.regular import require_model
from optimize.report import PROFILE

if TYPE_CHECKING:
    from optimize.profile.result import Profile
    from optimize.progress import Progress


@options.command(short_help="Show where one run of MODEL spends its time.")
@click.argument("model", type=require_model)
@options.targets(
    "--to",
    "target",
    metavar="TARGET",
    help="Runtime: eager, torchscript, onnx, openvino or pt2.  [default: eager; of a .onnx or .xml file its own]",
)
@options.batch
@options.threads
@options.passes("--fuse", is_flag=True, help="Merge branches and fold BatchNorm before.")
@options.output("--all", "whole", is_flag=True, help="Show every kernel of a long profile.")
@options.out(PROFILE, "Folder for profile.json, profile.html and roofline.svg, too.")
@options.output("--trace", type=options.Destination(), help="Write a Chrome trace (ui.perfetto.dev) to this file.")
@options.named_model
def profile(model: str, **given: Any) -> None:
    """Show where one run of MODEL spends its time: every kernel of the runtime with the layers it computes, their
    multiply-accumulates and bytes, and how near they come to what this machine can do.

    MODEL is whatever `optimize` opens, an .onnx file, an .xml of OpenVINO, or TorchScript that `optimize` made.
    """
    from optimize.measure import environment
    from optimize.report.profile import ProfileRecord, tell_profile, write_trace

    with options.phases() as phases:
        machine = environment.current()
        found, source = _profiled(model, given, phases.update)
    record = ProfileRecord(
        command=options.command_line(), files=(model,), source=source, environment=machine, found=found
    )
    options.tell(tell_profile(record, whole=given["whole"]), lambda: record, "Profile")
    if given["trace"]:
        write_trace(found, source, given["trace"])
        options.told("Trace", given["trace"])


def _profiled(model: str, given: dict[str, Any], progress: Progress) -> tuple[Profile, str]:
    """Return the profile and what to call the model."""
    from optimize.errors import UsageError
    from optimize.pipeline import transform
    from optimize.profile.artifacts import profile_file, runtime_of
    from optimize.profile.profiling import profile_program, require_times

    own = runtime_of(model)
    target = given["target"] or own or "eager"
    require_times(target)
    settings = {"batch": given["batch"], "threads": given["threads"], "progress": progress}
    if own is None:
        passes = presets.fusing(fuse=given["fuse"], reparameterize=given["fuse"])
        captured, job = options.open_model(model, given, progress, passes)
        (variant,) = transform(captured.program, job.passes(), progress=progress)
        return profile_program(variant.program, target, **settings), captured.source
    if target != own or given["fuse"]:
        raise UsageError(f"'{model}' runs in its own runtime, as it is.", hint="Leave --to and --fuse out.")
    return profile_file(Path(model), input_shape=given["input_shape"], trust=given["trust"], **settings), model
