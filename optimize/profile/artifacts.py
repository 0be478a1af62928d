"""Profiling a file that a runtime takes as it is (.onnx, .xml, a run's TorchScript), whose program is not at hand.

Layers are called as the file calls its nodes, without the operators that exporters append.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from optimize import sandbox
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.load.identify import Kind, identify
from optimize.measure.feed import draw
from optimize.measure.fleet import is_count, is_spent, is_time
from optimize.measure.openers import Opening
from optimize.measure.subjects import Subject, agreed_inputs
from optimize.measure.worker import artifact_from, read_arrays, write_arrays
from optimize.profile.kernels import take_times
from optimize.profile.machine import MachineLimits, measure_limits
from optimize.profile.profiling import join, require_times, run_fresh
from optimize.profile.result import FreshProcess, KernelProfile, Profile
from optimize.progress import Progress, silent
from optimize.registry import find_target, target_of
from optimize.targets.base import Artifact, Probing
from optimize.targets.packaging import said_in_archive
from optimize.targets.probe import module_of

#: For the repetitions of one file.
_PROFILING_S = 3600.0
_INPUTS = "inputs.npz"
#: Of one run; and of the shortest run, what one of them takes at least.
_MOST_KERNELS, _PARTS = 1 << 16, 1e3


def runtime_of(source: str) -> str | None:
    """Return the target that runs a file as it is; None where the source is to be captured.

    TorchScript is captured, unless it says that it was made here: its integers are no graph to start from.
    """
    path = Path(source)
    if any(said_in_archive(path, key) for key in ("version", "cpu")) and identify(path) is Kind.TORCHSCRIPT:
        return "torchscript"
    owner = target_of(path)
    return None if owner is None else owner.name


def profile_file(
    path: Path,
    *,
    input_shape: str | None = None,
    batch: int = 1,
    threads: int = 1,
    limits: MachineLimits | None = None,
    fresh: bool = True,
    trust: bool = False,
    progress: Progress = silent,
) -> Profile:
    """Return what one run of a file is made of, on noise.

    Args:
        path: An ``.onnx`` file, an ``.xml`` of OpenVINO with its ``.bin`` beside it, or TorchScript.
        input_shape: Sizes of one sample, such as ``3,224,224``, where the file leaves them free.
        batch: Samples in a run, where the file leaves that free.
        threads: Compute threads.
        limits: What this machine can do; measured when None.
        fresh: Also run the file in a process of its own, for its memory and first call.
        trust: Take whatever time and memory the file asks for.
        progress: Told what is going on.

    Raises:
        Refused: The file is missing, is refused by the checks of its kind, or cannot be run.
        UsageError: Nothing says what it takes, or its runtime does not tell the time of each kernel.
        TargetUnavailable: Its runtime is not installed.
    """
    artifact = _opened(path, input_shape, trust)  # before the machine is measured, which takes its time
    inputs = _inputs(artifact, batch)
    asked = {"artifact": {**asdict(artifact), "path": str(path)}, "threads": threads}
    machine = limits or measure_limits(threads)
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        write_arrays(folder / _INPUTS, inputs)
        answer = sandbox.call(
            "optimize.profile.artifacts:profile_here",
            {**asked, "limits": asdict(machine)},
            folder,
            about=f"'{path}'",
            limits=sandbox.ChildLimits.of([path], seconds=_PROFILING_S, on_clock=True),
            confined=not trust,
            progress=progress,
        )
        found = _read(answer.value, path)
    own = FreshProcess.of(run_fresh(artifact, inputs, threads, progress)) if fresh else None
    return dataclasses.replace(
        found,
        target=artifact.target,
        batch=len(inputs[0]),
        threads=threads,
        limits=machine,
        fresh=own,
        live=None,
        python=None,
    )


def _read(value: Any, path: Path) -> Profile:
    """Return what a child says of a file, which may be anything.

    Raises:
        Refused: It is no profile, or has times and counts that no run has.
    """
    try:
        found = TypeAdapter(Profile).validate_python(value)
    except ValueError as error:
        raise Refused(f"The process that ran '{path}' gave no profile.") from error
    if len(found.kernels) > _MOST_KERNELS or not is_time(found.total_s) or not all(map(_is_kernel, found.kernels)):
        raise Refused(f"The process that ran '{path}' told times that no run takes.")
    return found


def _is_kernel(kernel: KernelProfile) -> bool:
    is_told = kernel.seconds == 0 or is_time(kernel.seconds * _PARTS)
    counts = (kernel.macs or 0, kernel.moved_bytes or 0)
    return is_told and is_spent(kernel.start_s) and all(map(is_count, counts))


def profile_here(
    folder: Path, tell: Progress, artifact: dict[str, Any], threads: int, limits: dict[str, Any]
) -> dict[str, Any]:
    """Profile a file in this process on the inputs in ``folder``; return the profile as JSON holds it."""
    found, inputs = artifact_from(artifact), read_arrays(folder / _INPUTS)
    probe = find_target(found.target).probe(Probing(found, inputs, folder, threads))
    machine, times = TypeAdapter(MachineLimits).validate_python(limits), take_times(probe, progress=tell)
    layers = {node: module_of(node) for kernel in times.kernels for node in kernel.nodes}
    profile = join(times, probe.costs(), layers, machine, target=found.target, batch=len(inputs[0]))
    dumped: dict[str, Any] = TypeAdapter(Profile).dump_python(profile, mode="json")
    return dumped


def _opened(path: Path, input_shape: str | None, trust: bool) -> Artifact:
    """Return a file with all its sizes but a free batch."""
    if runtime_of(str(path)) is None:
        raise Refused(f"'{path}' is no file that a runtime takes as it is.", hint="Profile the model it was made from.")
    subject = Opening(path.parent, trust=trust).open(str(path))
    require_times(subject.artifact.target)
    if subject.missing:
        here = find_target(subject.artifact.target).available()
        raise (
            Refused(f"{subject.missing}.") if here.run else TargetUnavailable(f"{subject.missing}.", hint=here.install)
        )
    return agreed_inputs([subject], input_shape)[0].artifact


def _inputs(artifact: Artifact, batch: int) -> list[np.ndarray]:
    """Return noise for one run, the batch as asked where the file leaves it free."""
    fixed = Subject("", "", artifact).fixed_batch
    if fixed is not None and fixed < 1:
        raise Refused(f"'{artifact.path}' takes a batch of {fixed}: there is nothing to profile.")
    if fixed is not None and batch not in (1, fixed):
        raise UsageError(f"'{artifact.path}' takes a batch of {fixed} and no other.", hint="Leave --batch out.")
    generator = np.random.default_rng(0)
    return draw(artifact.inputs, fixed or batch, generator)
