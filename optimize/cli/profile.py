"""``optimize profile``: what one run of a model is made of, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize.cli import options
from optimize.report import PROFILE

if TYPE_CHECKING:
    from optimize.profile.result import Profile
    from optimize.progress import Progress


@options.command()
@click.argument("model")
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
@options.output(
    "--out", type=options.Destination(PROFILE), help="Folder for profile.json, profile.html and roofline.svg, too."
)
@options.output("--trace", type=options.Destination(), help="Write a Chrome trace (ui.perfetto.dev) to this file.")
@options.factory
@options.trust
@options.input_shape
def profile(model: str, **given: Any) -> None:
    """Show where one run of MODEL spends its time: every kernel of the runtime with the layers it computes, their
    multiply-accumulates and bytes, and how near they come to what this machine can do.

    MODEL is whatever `optimize` opens, an .onnx file, or an .xml of OpenVINO.
    """
    from optimize.measure import environment
    from optimize.profile.trace import write_trace
    from optimize.report.files import save_all
    from optimize.report.profile import ProfileRecord, tell_profile
    from optimize.transaction import check

    if given["out"]:
        check(given["out"], PROFILE)
    with options.phases() as phases:
        machine = environment.current()
        found, source = _profiled(model, given, phases.update)
    record = ProfileRecord(
        command=options.command_line(), files=(model,), source=source, environment=machine, found=found
    )
    told = tell_profile(record, whole=given["whole"])
    options.tell(told, lambda: record)
    if given["trace"]:
        write_trace(found, source, given["trace"])
        options.told("Trace", given["trace"])
    if given["out"]:
        options.told("Profile", save_all(given["out"], PROFILE, told, record))


def _profiled(model: str, given: dict[str, Any], progress: Progress) -> tuple[Profile, str]:
    """Return the profile and what to call the model."""
    from optimize.errors import UsageError
    from optimize.profile.artifacts import profile_file, runtime_of
    from optimize.profile.profiling import profile_program, require_times

    own = runtime_of(model)
    target = given["target"] or own or "eager"
    require_times(target)
    settings = {"batch": given["batch"], "threads": given["threads"], "progress": progress}
    if own is None:
        program, source = _opened(model, given, progress)
        return profile_program(program, target, **settings), source
    if target != own or given["fuse"]:
        raise UsageError(f"'{model}' runs in its own runtime, as it is.", hint="Leave --to and --fuse out.")
    return profile_file(Path(model), input_shape=given["input_shape"], trust=given["trust"], **settings), model


def _opened(model: str, given: dict[str, Any], progress: Progress) -> tuple[Any, str]:
    from optimize.job import Job
    from optimize.opening import open_program
    from optimize.recipe import parse
    from optimize.workflow import transform

    entries = options.fusing(fuse=given["fuse"], reparameterize=given["fuse"])
    shape = {"input_shape": given["input_shape"]} if given["input_shape"] else {}
    recipe = parse({"passes": entries, **shape}, source="options")
    job = Job(source=model, recipe=recipe, factory=given["factory"], trust=given["trust"])
    captured = open_program(job, progress)
    options.warn(captured)
    (variant,) = transform(captured.program, job.passes(), progress=progress)
    return variant.program, captured.source
